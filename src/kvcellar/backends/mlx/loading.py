"""Checkpoints through mlx-lm: Hugging Face folders as they are, and mlx-community's quantised ones.

mlx-lm reads older configs than transformers writes today: RoPE in fields of its own, tied
embeddings by a default of its own. So its arguments are made from the config of transformers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils

from kvcellar.backends.mlx.binding import text_model, wrap
from kvcellar.backends.mlx.codecs import FLOAT_DTYPES
from kvcellar.backends.mlx.facts import learn_facts
from kvcellar.backends.mlx.runner import MlxRunner
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.models.architecture import check_architecture, without_quantisation
from kvcellar.models.checkpoint import check_tokenizer_files, check_weights, read_config
from kvcellar.models.configs import config_from_dict
from kvcellar.models.facts import ModelFacts
from kvcellar.models.generation import sampling_defaults
from kvcellar.models.hub import find_checkpoint, is_local
from kvcellar.models.known import facts_of
from kvcellar.models.loading import loader_of
from kvcellar.models.model import LoadedModel
from kvcellar.models.options import DEMO, LoadOptions, ProgressFn, no_progress
from kvcellar.models.runner import Runner
from kvcellar.models.sizing import size_checkpoint
from kvcellar.models.tokenizer import check_vocabulary, find_eos_token_ids, load_tokenizer, quiet
from kvcellar.models.weights import PLAIN
from kvcellar.registry import CacheSession
from kvcellar.spec import ModelCacheSpec

_PARTS = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""Where transformers keeps the parts of a multimodal model -> where mlx-lm looks for them."""


@dataclass(frozen=True, slots=True, eq=False)
class MlxModel(LoadedModel):
    """A model of mlx-lm in memory; attributes as in :class:`LoadedModel`.

    Attributes:
        network: the module of mlx-lm, wrapped.
        device: where it runs; None: MLX's default, the GPU of a Mac.
    """

    network: Any = field(repr=False)
    device: mx.Device | None

    def _make_runner(self, session: CacheSession[Any], feature_layers: Sequence[int]) -> Runner:
        """Make a runner of MLX, which keeps inside of the session's budget."""
        budget = session.cache.config.budget
        if budget is not None:
            limit_memory(budget.limit_bytes, budget.reserve_bytes)
        return MlxRunner(
            self.network, self.params, self.vocab_size, session, self.device, feature_layers
        )

    def touch_weights(self) -> int:
        """Return the bytes of the weights: loading has read them all."""
        return sum(array.nbytes for array in _arrays(self.network))


def limit_memory(limit_bytes: int, spare_bytes: int) -> None:
    """Keep MLX, in the whole process, inside of a memory budget.

    Args:
        limit_bytes: what its arrays may take.
        spare_bytes: freed memory that it may keep for later.
    """
    mx.set_memory_limit(limit_bytes)
    mx.set_cache_limit(spare_bytes)


def load_model(options: LoadOptions, report: ProgressFn) -> MlxModel:
    """Load a model and its tokenizer for MLX; see :func:`kvcellar.models.load_model`.

    A folder may be quantised for MLX; its weights are then loaded as they are.

    Args:
        options: ``dtype`` is that of the weights that are floats; None or ``auto``: as they are
            stored, and float32 for the bundled model. ``device`` is ``cpu`` or ``gpu``; None:
            MLX's default.
        report: called while loading.

    Raises:
        ModelError, ConfigError: as there.
    """
    _check_weights_option(options.weights)
    wanted, where = _pick_dtype(options), _pick_device(options.device)
    with quiet(lambda part: None):
        folder = find_checkpoint(options.model, lambda part, what: report(0.9 * part, what))
        report(0.9, "reading the config")
        raw = read_config(folder)
        stored = _check_files(folder, raw)
        facts = model_facts(without_quantisation(raw))
        config = config_from_dict(raw)
        tokenizer = load_tokenizer(folder)
        report(0.92, "loading weights")
        model = load_weights(folder, raw, config)
        if wanted is not None:
            model.set_dtype(FLOAT_DTYPES[wanted])
        _untruncate(model, config)
        mx.eval(_arrays(model))  # what stayed lazy would belong to this thread
        vocab_size = int(config.vocab_size)
        if "weight" in text_model(model).embed_tokens:
            vocab_size = int(text_model(model).embed_tokens.weight.shape[0])
        wrap(model)
    check_vocabulary(tokenizer, vocab_size, folder)
    report(1.0, "ready")
    return MlxModel(
        name=options.name,
        path=folder,
        backend=options.backend,
        params=facts.params,
        config=config,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=find_eos_token_ids(folder, raw, tokenizer),
        max_positions=facts.max_positions,
        dtype=wanted or _float_type(model, stored),
        weights=None,
        sampling=sampling_defaults(folder),
        chat_template=None,
        network=model,
        device=where,
    )


def load_weights(folder: Path, raw: Mapping[str, Any], config: Any) -> Any:
    """Make a model of mlx-lm, in evaluation mode, its weights not yet read.

    Args:
        folder: the checkpoint.
        raw: its ``config.json``.
        config: the config object of its text part.

    Raises:
        ModelError: weights that are missing or not this architecture's, or a quantisation that
            mlx-lm does not know.
    """
    try:
        model, _ = mlx_lm.utils.load_model(
            folder,
            lazy=True,
            model_config=arguments(raw, config),
            get_model_classes=_classes,
        )
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(f"the weights in {folder} cannot be loaded by mlx-lm: {error}") from error
    return model


def arguments(raw: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Write a checkpoint's config in the words that mlx-lm knows.

    Raises:
        ModelError: layers in an order that mlx-lm's model does not have.
    """
    text = {**config.to_dict(), **(raw.get("text_config") or raw)}
    rope = text.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    if "rope_theta" in full:
        text["rope_theta"] = full["rope_theta"]
    kind = full.get("rope_type", "default")
    if kind != "default":
        text["rope_scaling"] = dict(full)
    elif full:
        text["rope_scaling"] = None
    if "sliding_attention" in rope:
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    family = config.model_type
    if family == "gemma3_text":
        text["sliding_window_pattern"] = _pattern(list(config.layer_types))
    if family in ("llama", "mistral"):
        text["layer_types"] = None  # windows are the cache's
    text.pop("architectures", None)
    if "text_config" in raw:
        return {**raw, "text_config": text, "vocab_size": text["vocab_size"]}
    return text


def _pattern(layer_types: list[str]) -> int:
    """Return n where every n-th layer sees all of the history, as in Gemma 3.

    Raises:
        ModelError: the layers come in another order.
    """
    first = layer_types.index("full_attention") if "full_attention" in layer_types else -1
    if first < 0 or any(
        (kind == "full_attention") != ((i + 1) % (first + 1) == 0)
        for i, kind in enumerate(layer_types)
    ):
        raise ModelError(
            f"mlx-lm's Gemma 3 has a full layer every so many, and this one has {layer_types}; "
            f"load it with the backend torch"
        )
    return first + 1


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes of a model; its ``sanitize`` gets weights as it knows them."""
    model_class, arguments_class = mlx_lm.utils._get_classes(config)

    class Model(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = _renamed(weights)
            own = getattr(super(), "sanitize", None)
            return dict(own(weights)) if own else weights

    return Model, arguments_class


def _renamed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rename weights of multimodal models and of gpt-oss with float experts for mlx-lm."""
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        for theirs, ours in _PARTS.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":  # [experts, in, 2 * out], gate and up in turns
            found[f"{stem}.gate_proj.weight"] = value[..., 0::2].swapaxes(-1, -2)
            found[f"{stem}.up_proj.weight"] = value[..., 1::2].swapaxes(-1, -2)
        elif last == "down_proj" and stem.endswith("experts"):
            found[f"{name}.weight"] = value.swapaxes(-1, -2)
        elif last == "gate_up_proj_bias" and f"{stem}.gate_up_proj" in weights:
            found[f"{stem}.gate_proj.bias"] = value[..., 0::2]
            found[f"{stem}.up_proj.bias"] = value[..., 1::2]
        elif last == "down_proj_bias" and f"{stem}.gate_up_proj" in weights:
            found[f"{stem}.down_proj.bias"] = value
        else:
            found[name] = value
    return found


def _untruncate(model: Any, config: Any) -> None:
    """Let YaRN blend its frequencies between the bounds that the config asks for.

    A config may say ``truncate: false`` (gpt-oss does); mlx-lm rounds the bounds in any case. Its K
    would not be those of the model, nor of a snapshot that another backend wrote.
    """
    rope = config.to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return
    base, original = float(rope["rope_theta"]), float(rope["original_max_position_embeddings"])
    for layer in text_model(model).layers:
        yarn = layer.self_attn.rope
        dims = yarn.dims
        low, high = (
            dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1))
        )
        low, high = max(low, 0.0), min(high, dims - 1.0)
        half = mx.arange(0, dims, 2, dtype=mx.float32)
        ramp = mx.clip((half / 2 - low) / max(high - low, 0.001), 0, 1)
        alone = base ** (half / dims)
        scaled = float(rope["factor"]) * alone
        yarn._freqs = scaled * alone / (scaled * (1 - ramp) + alone * ramp)


def _arrays(model: Any) -> list[mx.array]:
    """Return every array of a model, those that are no parameters too."""
    return [
        value
        for module in model.modules()
        for value in module.values()
        if isinstance(value, mx.array)
    ]


def _float_type(model: Any, stored: Counter[str]) -> str:
    """Return the type that the model computes in: that of its last norm."""
    dtype = text_model(model).norm.norm.weight.dtype
    return next(name for name, known in FLOAT_DTYPES.items() if known == dtype)


def check_model(options: LoadOptions) -> None:
    """Find what is wrong with a model; see :func:`kvcellar.models.check_model`."""
    _check_weights_option(options.weights)
    _pick_dtype(options)
    _pick_device(options.device)
    if is_local(options.model):
        folder = find_checkpoint(options.model, no_progress)
        _check_files(folder, read_config(folder))


def size_model(options: LoadOptions) -> ModelCacheSpec:
    """Work out what a model costs; see :func:`kvcellar.models.sizing.size_model`."""
    return size_checkpoint(options, model_facts)


def model_facts(raw: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a model; see :meth:`kvcellar.models.loading.ModelLoader.model_facts`.

    Where torch is installed the model itself tells them.
    """
    try:
        told: ModelFacts = loader_of("torch").model_facts(raw)
    except BackendError:
        return facts_of(raw, learn_facts, "configs alone")
    return told


def device_bytes(device: Any) -> int | None:
    """Return None: a Mac's GPU has no memory of its own."""
    return None


def _check_weights_option(weights: str | None) -> None:
    """Refuse a format of weights that is not made here."""
    if weights not in (None, PLAIN):
        raise ConfigError(
            f"weights {weights!r} are not made by the backend mlx; quantise the checkpoint with "
            f"mlx_lm.convert, and give its folder"
        )


def _check_files(folder: Path, raw: dict[str, Any]) -> Counter[str]:
    """Check a checkpoint's files; return how many tensors are stored in each type."""
    check_architecture(without_quantisation(raw), folder)
    facts = model_facts(without_quantisation(raw))
    facts.check_served()
    if not facts.rope.is_fixed:
        raise ModelError(
            f"{folder} has RoPE of type {facts.rope.kind!r}, which turns every position anew as a "
            f"sequence grows; load it with the backend torch, which holds it still"
        )
    stored = check_weights(folder)
    check_tokenizer_files(folder)
    return stored


def _pick_dtype(options: LoadOptions) -> str | None:
    """Return the type that floats are converted to; None: they stay."""
    dtype = options.dtype
    if dtype in (None, "auto"):
        return "float32" if options.model == DEMO else None
    name = str(dtype).removeprefix("mlx.core.")
    if name not in FLOAT_DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; choose one of {', '.join(FLOAT_DTYPES)}")
    return name


def _pick_device(device: Any) -> mx.Device | None:
    """Return a device of MLX; None: its default."""
    if device is None:
        return None
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"device {device!r} is not one of MLX's; choose 'cpu' or 'gpu'")
    if device == "gpu" and not mx.metal.is_available():
        raise BackendError("MLX finds no GPU here; leave the device out, or say cpu")
    return mx.Device(mx.gpu if device == "gpu" else mx.cpu)
