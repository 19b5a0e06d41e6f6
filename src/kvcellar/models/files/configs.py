"""Config objects of transformers for a checkpoint's ``config.json``, and what they say in one way.

A config's own class knows its rules: which layers have windows, what a field that is left out
means. Nothing of that is written down here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kvcellar.errors import BackendError, ModelError
from kvcellar.installed import pip_command
from kvcellar.models.facts import Rope

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Fields whose default in a config class is the size of its family's first model."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def config_from_dict(raw: Mapping[str, Any]) -> Any:
    """Make the config object of transformers for a ``config.json``: that of its text part.

    Raises:
        ModelError: an unknown family, or a field that is missing or impossible.
        BackendError: transformers is not installed.
    """
    return whole_config(raw).get_text_config(decoder=True)


def whole_config(raw: Mapping[str, Any]) -> Any:
    """Make the config object of transformers for all of a checkpoint, as ``AutoConfig`` does.

    Raises:
        ModelError, BackendError: as ``config_from_dict``.
    """
    family = raw.get("model_type")
    if family is None:
        raise ModelError(_missing("model's", "model_type"))
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise BackendError(
            f"reading a {family} config needs the package {error.name!r}; install it with: "
            f"{pip_command('torch')}"
        ) from error
    if family == "mistral" and raw.get("layer_types"):
        family = "ministral"  # a rule of AutoConfig
    classes: Any = transformers.CONFIG_MAPPING
    if not isinstance(family, str) or family not in classes:
        raise ModelError(
            f"architecture {family!r} is unknown to transformers {transformers.__version__}; "
            f"choose a model of another architecture"
        )
    made: Any = classes[family]
    _check_sizes(family, raw, made)
    try:
        return made.from_dict(made._decode_special_floats(dict(raw)))
    except Exception as error:  # its validators raise classes of their own
        what = str(error).strip().splitlines()[-1].strip()
        raise ModelError(f"the {family} config cannot be read: {what}; check the file") from error


def _check_sizes(family: str, raw: Mapping[str, Any], made: Any) -> None:
    """Refuse a config without a size for which its class would take that of another model.

    Parts of a config are published without what is as their class has it, and are left to it.

    Raises:
        ModelError: it names the field.
    """
    text = raw.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ModelError(
            f"the {family} config has text_config={text!r:.40}, and it must be an "
            f"object; check the file"
        )
    for name in _SIZES:
        for value in (raw.get(name), text.get(name)):
            if isinstance(value, int) and value < 1:
                raise ModelError(
                    f"the {family} config has {name}={value!r}; it must be at least 1; check the "
                    f"file"
                )
    names = {ours: theirs for ours, theirs in made.attribute_map.items() if ours in _SIZES}
    defaults = {field.name: field.default for field in dataclasses.fields(made)}
    for name in _SIZES:
        own = names.get(name, name)
        if defaults.get(own) is None or raw.get(own) is not None or raw.get(name) is not None:
            continue
        raise ModelError(_missing(family, name))


def positions_of(config: Any) -> int:
    """Return the longest sequence that a model was made for, by the config of its text part.

    The positions that it names, or what YaRN and dynamic RoPE stretch the original ones to where
    that is more: published configs that switch them on leave the other number as it was. Other
    kinds of scaled RoPE have it counted in already.

    Raises:
        ModelError: the config does not say.
    """
    said = _said_positions(config)
    longest = said
    for part in _ropes(config):
        original = {
            "yarn": part.get("original_max_position_embeddings"),
            "dynamic": said,
        }.get(_rope_kind(part))
        longest = max(longest, int((original or 0) * (part.get("factor") or 1)))
    return longest


def _said_positions(config: Any) -> int:
    told = [getattr(config, name, None) for name in _POSITIONS]
    said = next((n for n in told if isinstance(n, int) and n >= 1), None)
    if said is None:
        raise ModelError(_missing(str(config.model_type), _POSITIONS[0]))
    return said


def rope_of(config: Any) -> Rope:
    """Return how a model turns positions, by the config of its text part.

    Raises:
        ModelError: its kinds of layers do so in several ways that depend on a text's length.
    """
    parts = list(_ropes(config))
    longest = positions_of(config)
    moving = set()
    for part in parts:
        kind, original = _rope_kind(part), _said_positions(config)
        if kind == "longrope":
            original = int(part["original_max_position_embeddings"])
        if kind in ("longrope", "dynamic") and longest > original:
            moving.add(Rope(kind, original))
    if len(moving) > 1:
        raise ModelError(
            f"the {config.model_type} config has several kinds of RoPE that turn positions "
            f"otherwise in longer texts, {moving}; choose a model with one"
        )
    return moving.pop() if moving else Rope("fixed" if parts else "none")


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of every RoPE that a config has: one, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    yield from nested or ([rope] if rope else [])


def _rope_kind(part: Mapping[str, Any]) -> str:
    return str(part.get("rope_type", part.get("type", "default")))


def _missing(family: str, name: str) -> str:
    """Say that a config lacks a field, and what to do."""
    return f"the {family} config has no {name}; add the field, or take the model's own config.json"
