"""Shrunk twins of configs: the same classes of transformers with few, small layers of every kind.

Nothing is written down per family. Which layers differ is seen in the model itself, built on the
meta device with small sizes and all its layers; what a field of the config means is read off its
name, as transformers names fields, and what came of it is built again and compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from kvcellar.errors import ModelError

VOCAB_SIZE = 288
"""Numbers of a twin's vocabulary: 256 bytes, special tokens, and a few to spare."""

WINDOW = 8
"""Tokens of a twin's shortest window; a text of 40 tokens leaves it far behind."""

CHUNK = 16
"""Tokens of what counts in chunks or blocks, and RoPE's original length."""

SOFTCAP = 1.0
"""Cap on a twin's attention logits, which are small: published caps, such as 50, do nothing."""

MAX_POSITIONS = 512
"""The longest text of a twin."""

_N_EXPERTS, _TOP_K, _N_HEADS = 8, 2, 4

_MOST_OF_A_KIND, _MANY_KINDS = 2, 4

Build = Callable[[Any], torch.nn.Module]
"""Function from a config to its network on the meta device."""


def twin(config: Any, build: Build, *, keeps_dims: bool = False) -> Any:
    """Return a small config of the same class, whose layers are of the same kinds.

    Args:
        config: a text config of transformers; it stays as it is.
        build: makes a network of a text config.
        keeps_dims: the lengths of heads stay.

    Raises:
        ModelError: no small model of these classes can be built.
    """
    small = shrink(config.to_dict(), keeps_dims=keeps_dims)
    try:
        whole = type(config)(**small)
        n_layers, layers = layers_of(build(whole))
    except ModelError:
        raise
    except Exception as error:  # whatever its classes do not like
        raise ModelError(
            f"no small {config.model_type} model can be built: {type(error).__name__}: {error}; "
            f"try the model itself"
        ) from error
    if n_layers <= 2 * _MOST_OF_A_KIND:
        return whole
    for has_numbers in (True, False):
        kinds = [kind_of(layer, has_numbers=has_numbers) for layer in layers]
        for kept in (_some_of_each(kinds), list(range(_first_with_all(kinds)))):
            with suppress(Exception):  # whatever a class does not like of other layers
                candidate = type(config)(**keep_layers(small, n_layers, kept))
                there = layers_of(build(candidate))[1]
                if {kind_of(layer, has_numbers=has_numbers) for layer in there} == set(kinds):
                    return candidate
    return whole


# --- layers -------------------------------------------------------------------------------------


def layers_of(network: torch.nn.Module) -> tuple[int, list[torch.nn.Module]]:
    """Return how many layers a network has, and the layers: its first list of modules that counts.

    Lists within a layer, such as experts, and of other length than the config's layers are none.
    """
    config = network.config
    counts = [getattr(config, name, None) for name in LAYER_COUNTS]
    lists = [list(m) for m in network.modules() if isinstance(m, torch.nn.ModuleList)]
    layers: list[torch.nn.Module] = next((m for m in lists if len(m) in counts), [])
    return len(layers), layers


def kind_of(layer: torch.nn.Module, *, has_numbers: bool = True) -> Any:
    """Return a value that equals that of every layer of the same kind.

    Compared are the modules' classes, the shapes of their parameters, and the plain values that
    they hold (is it a sliding layer, has it RoPE, does it share K and V), but for its number.

    Args:
        layer: one of a network's.
        has_numbers: fractions are compared too, which some models have of their own in each layer.
    """
    plain = bool | int | str | float | None if has_numbers else bool | int | str | None
    described = []
    for name, module in layer.named_modules():
        if re.search(r"\.\d+(\.|$)", name):
            continue  # experts, one like the other
        values = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, plain) and not re.search(r"idx|index|layer_id|layer_num|^_", key)
        )
        shapes = tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False))
        described.append((name, type(module).__name__, values, shapes))
    return tuple(described)


def _some_of_each(kinds: list[Any]) -> list[int]:
    """Return the numbers of the first two layers of every kind; one each where kinds are many."""
    most = _MOST_OF_A_KIND if len(set(kinds)) <= _MANY_KINDS else 1
    seen: dict[Any, int] = {}
    kept = []
    for layer, kind in enumerate(kinds):
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= most:
            kept.append(layer)
    return kept


def _first_with_all(kinds: list[Any]) -> int:
    """Return how many of the first layers have every kind among them."""
    last_new = max(kinds.index(kind) for kind in set(kinds))
    return max(last_new + 1, min(len(kinds), _MOST_OF_A_KIND))


LAYER_COUNTS = (
    "num_hidden_layers", "num_layers", "n_layers", "n_layer", "layers", "decoder_layers",
    "num_decoder_layers", "num_layers_per_stack", "num_blocks",
)  # fmt: skip
_FIRST_LAYERS = re.compile(
    r"^(first_k_dense_replace|num_dense_layers|n_dense_layers|moe_layer_start_index"
    r"|max_window_layers)$"
)
_LAST_LAYERS = re.compile(r"^num_kv_shared_layers$")
_LABELS = ("id2label", "label2id")
_LAST_INDEX = re.compile(r"^moe_layer_end_index$")


def keep_layers(fields: Mapping[str, Any], n_layers: int, kept: list[int]) -> dict[str, Any]:
    """Return a config's fields for a model that has only some of its layers.

    Lists with a value per layer, lists and keys that name layers, and counts of the first or last
    layers follow.
    """
    return {key: _kept(key, value, n_layers, kept) for key, value in fields.items()}


def _kept(key: str, value: Any, n_layers: int, kept: list[int]) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if key in LAYER_COUNTS and value % n_layers == 0:
            return len(kept) * (value // n_layers)
        if _FIRST_LAYERS.match(key):
            return sum(layer < value for layer in kept)
        if _LAST_LAYERS.match(key):
            return sum(layer >= n_layers - value for layer in kept)
        if _LAST_INDEX.match(key):
            return max(sum(layer <= value for layer in kept) - 1, 0)
        return value
    if isinstance(value, (list, tuple)):
        return _kept_list(key, list(value), n_layers, kept)
    if isinstance(value, dict) and value and all(str(k).isdigit() for k in value):
        width = len(str(next(iter(value))))
        named = {int(k): part for k, part in value.items()}
        return {f"{new:0{width}d}": named[old] for new, old in enumerate(kept) if old in named}
    return value


def _kept_list(key: str, value: list[Any], n_layers: int, kept: list[int]) -> list[Any]:
    whole = bool(value) and all(type(item) is int for item in value)
    names_layers = whole and re.search(r"layer|idx", key) and max(value) < n_layers
    if whole and len(value) == n_layers and max(value) > 1 and _is_source(value):
        return [
            kept.index(value[old]) if value[old] in kept else new for new, old in enumerate(kept)
        ]
    if names_layers and value == sorted(set(value)):
        return [new for new, old in enumerate(kept) if old in value]
    return [value[layer] for layer in kept] if len(value) == n_layers else value


def _is_source(value: list[int]) -> bool:
    return all(source <= layer for layer, source in enumerate(value)) and value != sorted(
        set(value)
    )


# --- sizes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a model, and what the twin has in their place.

    Attributes:
        hidden: the model's hidden size -> the twin's.
        head_dims: lengths of head rows -> the twin's.
        n_heads: the model's query heads.
    """

    hidden: tuple[int, int]
    head_dims: Mapping[int, int]
    n_heads: int


_HEAD_DIM = re.compile(r"head_dim$|^head_size$|^d_kv$|^kv_channels$|^dim_head$|head_dim_|^d_head$")
_MLA = ("qk_nope_head_dim", "qk_rope_head_dim")
_HIDDEN = re.compile(r"^(hidden_size|d_model|n_embd|embed_dim|embedding_dim|emb_dim|dim_model)$")
_HEADS = re.compile(
    r"^(num_attention_heads|n_heads?|num_heads|attention_heads|"
    r"\w*num_attention_heads\w*|(en|de)coder_attention_heads|num_\w*attention_heads)$"
)
_SOFTCAP = re.compile(r"^(attn|attention)_logit_(softcapping|softcap|cap)$")
_KV_HEADS = re.compile(r"num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups")


def shrink(fields: Mapping[str, Any], *, keeps_dims: bool = False) -> dict[str, Any]:
    """Return a config's fields with everything small, and as many layers as before."""
    fields = _named(fields)
    sizes = _sizes(fields, keeps_dims)
    small = _shrunk(fields, sizes)
    _fit_products(fields, small)
    _fit_rope(fields, small)
    return small


def _named(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Return fields and those of nested configs, without labels, by names that are texts."""
    return {
        str(key): _named(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if key not in _LABELS
    }


def _sizes(fields: Mapping[str, Any], keeps_dims: bool) -> _Sizes:
    n_heads = (
        _first(
            fields,
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
        )
        or _N_HEADS
    )
    hidden = _first(fields, "hidden_size", "d_model", "n_embd", "embedding_dim", "embed_dim") or 64
    found = sorted(
        {
            value
            for part in _parts(fields)
            for key, value in part.items()
            if _HEAD_DIM.search(key) and type(value) is int and value > 0
        }
    )
    base = found[0] if found else 1
    unit = 16 if len(found) <= 1 else 8
    dims = {dim: max(unit * min(round(dim / base * 2), 8) // 2, 4) for dim in found}
    explicit = fields.get("head_dim")
    if keeps_dims:
        dims = {dim: dim for dim in found}
        small = _N_HEADS * (explicit or max(hidden // n_heads, 1))
    elif explicit and explicit * n_heads != hidden:
        small = 96
    else:
        small = _N_HEADS * dims.get(explicit or 0, 16)
    return _Sizes((hidden, small), dims, n_heads)


def _parts(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = [value for value in fields.values() if isinstance(value, Mapping)]
    return [fields, *(part for value in nested for part in _parts(value))]


def _first(fields: Mapping[str, Any], *names: str) -> int | None:
    found = (fields.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)


def _shrunk(fields: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in fields.items():
        if key in ("rope_parameters", "rope_scaling"):
            small[key] = value
        elif isinstance(value, Mapping):
            small[key] = _shrunk(value, sizes)
        elif isinstance(value, (list, tuple)):
            small[key] = [
                _size(key, item, fields, sizes) if type(item) is int else item for item in value
            ]
        elif value and _SOFTCAP.search(key):
            small[key] = min(float(value), SOFTCAP)
        else:
            small[key] = _size(key, value, fields, sizes) if type(value) is int else value
    return small


def _size(key: str, value: int, fields: Mapping[str, Any], sizes: _Sizes) -> int:
    """Return a twin's value of one whole number; what nobody knows stays."""
    if key.endswith(("token_id", "token_ids", "token_index", "_index", "padding_idx")):
        return value if value < VOCAB_SIZE else VOCAB_SIZE - 1 - value % 8
    if value <= 0 or key in LAYER_COUNTS:
        return value
    for pattern, size in _RULES:
        if pattern.search(key):
            return size(value, sizes)
    if _HIDDEN.match(key) or value == sizes.hidden[0]:
        return sizes.hidden[1]
    return value


def _heads(value: int, sizes: _Sizes) -> int:
    return min(value, _N_HEADS if value == sizes.n_heads else 2)


def _head_dim(value: int, sizes: _Sizes) -> int:
    return sizes.head_dims.get(value, 16)


def _to(most: int) -> Callable[[int, _Sizes], int]:
    """Return the function that makes a number at most this."""
    return lambda value, sizes: min(value, most)


def _hidden(value: int, sizes: _Sizes) -> int:
    before, after = sizes.hidden
    return after * (value // before) if value % before == 0 else 48


_RULES: tuple[tuple[re.Pattern[str], Callable[[int, _Sizes], int]], ...] = tuple(
    (re.compile(pattern), size)
    for pattern, size in (
        (r"vocab_size", _to(VOCAB_SIZE)),
        (_KV_HEADS.pattern, _heads),
        (r"^linear_num_value_heads$", _to(4)),
        (r"^linear_num_key_heads$", _to(2)),
        (_HEADS.pattern, _heads),
        (r"num_heads$|n_heads$", _to(4)),
        (r"^linear_(key|value)_head_dim$", _to(16)),
        (_HEAD_DIM.pattern, _head_dim),
        (r"lora_rank$|lowrank$|_rank$", _to(24)),
        (
            r"^(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)$"
            r"|^zero_expert_num$",
            _to(_N_EXPERTS),
        ),
        (r"experts_per_tok|top_?k$|^moe_k$", _to(_TOP_K)),
        (r"^(n_group|num_expert_groups?)$", _to(2)),
        (r"^(topk_group|num_limited_groups)$", _to(1)),
        (r"max_window_layers|window_pattern", _to(1 << 30)),
        (r"window|^local_attention$", _to(WINDOW)),
        (
            r"chunk_size|chunk_length|^floor_scale$|log_scaling_n_floor|rel_extent|block_size$",
            _to(CHUNK),
        ),
        (r"^original_max_position|^original_max_len", _to(CHUNK)),
        (
            r"max_position|^n_positions$|^n_ctx$|max_seq_len|model_max_length|context_length"
            r"|max_target_positions",
            _to(MAX_POSITIONS),
        ),
        (
            r"moe_\w*intermediate_size|shared_expert\w*intermediate|expert_ffn_hidden|expert_dim$",
            _to(32),
        ),
        (
            r"intermediate_size|ffn_dim|ffn_hidden|feed_forward|^d_ff$|^dff$|^dim_ff$|^n_inner$"
            r"|^d_inner$",
            _to(96),
        ),
        (r"hidden_size_per_layer_input", _to(16)),
        (r"state_size|d_state", _to(16)),
        (r"hidden_size|^d_model$|_embed_dim$|embedding_size$|proj_dim$|width$", _hidden),
    )
)


def _fit_products(fields: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Keep what is a product of others: inner sizes of state-space layers, parts of MLA's rows."""
    if all(type(small.get(name)) is int for name in _MLA) and "qk_head_dim" in small:
        small["qk_head_dim"] = small[_MLA[0]] + small[_MLA[1]]
    hidden = small.get("hidden_size")
    expand = small.get("mamba_expand", small.get("expand"))
    for heads, dim in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
        ("num_heads", "head_dim"),
    ):
        if heads in small and dim in small and expand and hidden:
            inner = small.get("mamba_d_ssm")
            if inner:
                inner = small["mamba_d_ssm"] = int(expand * hidden)
            small[dim] = 16
            small[heads] = (inner or int(expand * hidden)) // 16
    wide = small.get("attention_hidden_size")
    if isinstance(wide, int) and "attention_head_dim" in small:
        small["attention_head_dim"] = wide // small["num_attention_heads"]
    if type(small.get("rotary_dim")) is int:
        was, now = _rotary_pairs(fields, {}), _rotary_pairs(small, {})
        small["rotary_dim"] = max(2, small["rotary_dim"] * now // was)
    for groups in ("n_groups", "mamba_n_groups", "mamba_ngroups"):
        if type(small.get(groups)) is int:
            small[groups] = min(small[groups], 2)


def _fit_rope(fields: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Shrink RoPE's own lengths, one set of them or one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = small.get(key)
        if not isinstance(rope, Mapping):
            continue
        if any(isinstance(part, Mapping) for part in rope.values()):
            small[key] = {
                k: _rope(p, fields, small) if isinstance(p, Mapping) else p for k, p in rope.items()
            }
        else:
            small[key] = _rope(rope, fields, small)
        kinds = [part.get("rope_type") for part in _parts(small[key])]
        if "dynamic" in kinds and "max_position_embeddings" in small:
            small["max_position_embeddings"] = CHUNK


def _rope(
    rope: Mapping[str, Any], fields: Mapping[str, Any], small: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one set of RoPE's parameters for the twin's rows."""
    shrunk = dict(rope)
    if type(rope.get("original_max_position_embeddings")) is int:
        shrunk["original_max_position_embeddings"] = CHUNK
    was, now = _rotary_pairs(fields, rope), _rotary_pairs(small, rope)
    for key in ("long_factor", "short_factor"):
        if rope.get(key):
            factors = rope[key]
            shrunk[key] = [factors[i * len(factors) // now] for i in range(now)]
    for key in ("mrope_section", "xdrope_section"):
        if rope.get(key):
            sections = [max(1, part * now // max(was, 1)) for part in rope[key]]
            sections[0] += now - sum(sections)
            shrunk[key] = sections
    return shrunk


def _rotary_pairs(fields: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Return how many pairs of numbers of a row RoPE turns."""
    dim = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    if not dim:
        heads = _first(fields, "num_attention_heads", "n_head", "n_heads") or 1
        dim = (_first(fields, "hidden_size", "n_embd", "d_model") or heads) // heads
    part = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    return max(int(dim * part) // 2, 1)
