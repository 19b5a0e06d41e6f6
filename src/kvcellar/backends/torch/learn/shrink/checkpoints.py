"""Tiny checkpoints with random weights, of any family that transformers can build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto import modeling_auto

from kvcellar.backends.torch.learn.shrink.configs import LAYER_COUNTS, VOCAB_SIZE, twin
from kvcellar.backends.torch.load.networks import WrappedText, empty_network
from kvcellar.errors import ModelError
from kvcellar.models.files.configs import whole_config
from kvcellar.models.text.tokenizer import quiet

SPECIALS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Special tokens of a tiny tokenizer, behind its 256 bytes."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template of a tiny tokenizer."""

_DEFAULTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
"""Fields that some families' own defaults leave open -> what a tiny model has there."""

_MOST_NUMBERS = 50_000_000
"""Numbers of a tiny model at most."""

_TOWER_LAYERS = (*LAYER_COUNTS, "depth", "encoder_layers")
"""Names by which configs of towers count layers."""


def zoo() -> list[str]:
    """Return every model type whose decoder transformers can build, sorted.

    Found from the mappings by which transformers itself picks classes: causal language models, and
    models that read images or sounds beside text.
    """
    found: dict[str, Any] = {
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return sorted(found)


def default_raw(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a family with its class's own defaults, made complete.

    Args:
        model_type: the family, as its config.json has it.
        fields: of its text part, in place of the defaults.

    Raises:
        ModelError: transformers has no such family, or its defaults make no config.
    """
    try:
        whole = transformers.CONFIG_MAPPING[model_type]()
        text = whole.get_text_config(decoder=True)
        raw = {**text.to_dict(), **fields}
        raw = {**raw, **_mixed(raw), **fields}
        return raw_of(with_text(whole, type(text)(**{**raw, **_open(raw)})))
    except Exception as error:  # whatever a config class does not like of its own defaults
        said = (str(error).strip().splitlines() or [""])[-1].strip()
        raise ModelError(
            f"transformers makes no config of model type {model_type!r} by its own defaults: "
            f"{type(error).__name__}: {said}; give the fields that it lacks"
        ) from error


def _mixed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return kinds of layers for a family that has recurrent ones, where its defaults do not mix.

    Every second layer has attention, the others a short convolution or another recurrence.
    """
    n_layers = raw.get("num_hidden_layers")
    if not isinstance(n_layers, int):
        return {}
    if "attn_layer_indices" in raw and raw["attn_layer_indices"] is None:
        return {"attn_layer_indices": list(range(1, n_layers, 2))}
    kinds = set(raw.get("layer_types") or ())
    recurrent = "conv" if "conv_L_cache" in raw else "linear_attention"
    if len(kinds) > 1 or (recurrent not in kinds and "conv_L_cache" not in raw):
        return {}
    types = [recurrent, "full_attention"] * n_layers
    return {"layer_types": types[:n_layers]}


def _open(raw: dict[str, Any]) -> dict[str, Any]:
    """Return values for what a family's defaults leave open and its model needs."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    values: dict[str, Any] = dict(_DEFAULTS)
    if isinstance(heads, int) and isinstance(hidden, int):
        values |= {"head_dim": hidden // heads, "num_key_value_heads": heads}
    return {key: value for key, value in values.items() if key in raw and raw[key] is None}


def twin_raw(raw: Mapping[str, Any], *, keeps_dims: bool = False) -> dict[str, Any]:
    """Return the ``config.json`` of a model's twin; a wrapper's towers get one layer.

    Args:
        raw: the model's.
        keeps_dims: as of :func:`~kvcellar.backends.torch.learn.shrink.configs.twin`.

    Raises:
        ModelError: the config makes no model, or no small one.
    """
    whole = _without_towers(raw)
    names = {key: raw[key] for key in ("architectures",) if raw.get(key)}

    def small(text: Any) -> dict[str, Any]:
        return {**raw_of(with_text(whole, text)), **names}

    text = whole.get_text_config(decoder=True)
    return small(
        twin(
            text, lambda text: empty_network(small(text), attention="eager"), keeps_dims=keeps_dims
        )
    )


def _without_towers(raw: Mapping[str, Any]) -> Any:
    """Return a config whose towers have one layer, which is what they are taken away with."""
    config = whole_config(raw)
    text = config.get_text_config(decoder=True)
    low = {
        name: {**part, **{key: 1 for key in _TOWER_LAYERS if type(part.get(key)) is int}}
        for name, part in raw.items()
        if isinstance(part, Mapping) and getattr(config, name, None) is not text
    }
    try:
        return whole_config({**raw, **low})
    except ModelError:  # some count theirs in other fields as well
        return config


def with_text(config: Any, text: Any) -> Any:
    """Return a wrapper's config with another text part; of a text config that is all.

    Where a tower must be as wide as the text part, its fields that were as wide follow.
    """
    before = config.get_text_config(decoder=True)
    if before is config:
        return text
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    texts = {
        name: with_text(part, text).to_dict()
        for name, part in parts.items()
        if part is not None and part.get_text_config(decoder=True) is before
    }
    fields = config.to_dict()
    try:
        return type(config)(**{**fields, **texts})
    except Exception:  # its validators raise classes of their own
        fields = _as_wide(fields, before.hidden_size, text.hidden_size)
        return type(config)(**{**fields, **texts})


def _as_wide(fields: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Return fields, nested ones too, of which all of one width, or a half or quarter, follow."""
    widths = {before // part: after // part for part in (4, 2, 1)}
    return {
        key: _as_wide(value, before, after)
        if isinstance(value, Mapping)
        else (widths.get(value, value) if type(value) is int else value)
        for key, value in fields.items()
    }


def raw_of(config: Any) -> dict[str, Any]:
    """Return what a config's ``config.json`` has."""
    return {**config.to_dict(), "model_type": config.model_type}


def random_network(raw: Mapping[str, Any], *, attention: str | None = None, seed: int = 0) -> Any:
    """Return the network of a small config in memory, with random weights in float32.

    The same seed gives the same weights, whatever the attention.

    Args:
        raw: its ``config.json``.
        attention: as of :func:`~kvcellar.backends.torch.load.networks.empty_network`.
        seed: of the weights.

    Raises:
        ModelError: it is not small, or cannot be built.
    """
    n_numbers = sum(
        parameter.numel() for parameter in empty_network(raw, attention="eager").parameters()
    )
    if n_numbers > _MOST_NUMBERS:
        raise ModelError(
            f"a twin of {raw.get('model_type')} has {n_numbers:,} numbers, more than "
            f"{_MOST_NUMBERS:,}; some of its parts have sizes that nobody here knows"
        )
    network = started_network(raw, attention=attention, seed=seed)
    randomise(network, seed)
    return network.eval()


def started_network(raw: Mapping[str, Any], *, attention: str | None = None, seed: int = 0) -> Any:
    """Return the network of a config in memory, in float32, with what its classes start with."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        config = whole_config(raw)
        if config.get_text_config(decoder=True) is config:
            return empty_network(raw, attention=attention, device="cpu").float()
        network = empty_network(raw, attention=attention)  # its towers are taken away by now
        start(network)
    return network.eval()


def start(network: Any) -> None:
    """Give a network on the meta device the values that its classes start with, in place.

    As transformers itself does for tensors that a checkpoint lacks.
    """
    network.to_empty(device="cpu").float()
    for module in network.modules():
        module._is_hf_initialized = False
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor._is_hf_initialized = False
    _whole(network).initialize_weights()


def _whole(network: Any) -> Any:
    """Return the module of transformers that a network is, or is in."""
    return network.whole if isinstance(network, WrappedText) else network


def randomise(network: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter a value of its own, so that one that is not loaded is missed.

    Matrices keep the size of what they are given, embeddings and the head make clear choices, and
    norms, biases and the like move a little from where the model starts them.
    """
    is_tied = bool(getattr(network.config, "tie_word_embeddings", False))
    words = {id(m.weight) for m in network.modules() if isinstance(m, torch.nn.Embedding)}
    words |= {id(p) for p in network.parameters() if VOCAB_SIZE in p.shape}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(network.named_parameters()):
            noise = torch.empty(parameter.shape).normal_(0.0, 1.0, generator=generator)
            if id(parameter) in words:
                parameter.copy_((0.15 if is_tied else 0.3) * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * max(parameter.shape[-1], 1) ** -0.5)
            else:
                parameter.add_(0.1 * noise)


def write_tiny(model_type: str, folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a tiny random checkpoint of a family; return its folder.

    Args:
        model_type: the family, as its config.json has it.
        folder: where to; made if it is not there. A wrapper's has its text part alone.
        seed: of the weights.
        fields: values that are wanted in place of the family's defaults.

    Raises:
        ModelError: transformers has no such family, or no small model of it can be built.
    """
    network = random_network(twin_raw(default_raw(model_type, **fields)), seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet(lambda part: None):
        _whole(network).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer(specials: Sequence[str] = SPECIALS) -> Any:
    """Return a tokenizer with one token per byte, ids 0 to 255, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) + len(specials) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast
