"""A model's cache facts, read from the model's own config, and what they cost in bytes.

Windows and layer types are never written down here: a ``config.json`` is handed to the config
class of transformers, whose rules are the ones that the model runs by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.bookkeeping.growth import STEP_TOKENS, grown_size
from kvcellar.bookkeeping.pool import MAX_GAP, MIN_RUN
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.kv_dtype import KvDtype
from kvcellar.types import MIN_CHUNK, WINDOW_SLACK, LayerGroup, ModelCacheParams

_ALL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "llama": _ALL[:3],  # without num_key_value_heads there is one per query head
    "mistral": _ALL,
    "qwen2": _ALL,
    "qwen3": (*_ALL, "head_dim"),
    "gemma2": (*_ALL, "head_dim"),
    "gemma3_text": _ALL[:2],  # published configs leave the class's own values out
    "gpt_oss": (*_ALL, "head_dim"),
}
"""The families whose attention is verified here -> fields that their config.json must have.

Every other field has a meaning when it is absent. Without this list the config class would fill
in the sizes of its family's first model, and a wrong cache would be built in silence.
"""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def params_from_config(config: Any) -> ModelCacheParams:
    """Read what a cache must know of a model from the model's own config.

    Args:
        config: a config object of transformers, or a ``config.json`` as a dict. The text part is
            taken where a config has one (``text_config``).

    Raises:
        ModelError: an unknown family, a missing or impossible field, or layers that no cache here
            can serve (other than full and sliding attention, layers that share K and V).
        BackendError: a dict is given and transformers, which reads it, is not installed.
    """
    text = config_from_dict(config) if isinstance(config, Mapping) else config
    text = getattr(text, "text_config", None) or text
    check_family(getattr(text, "model_type", None))
    _refuse_uncachable(text)
    n_layers, n_heads = _number(text, "num_hidden_layers"), _number(text, "num_attention_heads")
    n_kv_heads = _number(text, "num_key_value_heads")
    head_dim = _head_dim(text, n_heads)
    has_v_dim = getattr(text, "v_head_dim", None) is not None
    v_head_dim = _number(text, "v_head_dim") if has_v_dim else head_dim
    family = text.model_type
    if n_heads % n_kv_heads:
        raise ModelError(
            f"the {family} config has {n_heads} query heads and {n_kv_heads} KV heads; "
            f"num_key_value_heads must divide num_attention_heads; check the file"
        )
    softcap = getattr(text, "attn_logit_softcapping", None)
    layers_by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(_windows(text, n_layers)):
        layers_by_window.setdefault(window, []).append(layer)
    try:
        groups = tuple(
            LayerGroup(tuple(layers), n_kv_heads, head_dim, v_head_dim, window, softcap)
            for window, layers in layers_by_window.items()
        )
        return ModelCacheParams(n_layers, groups=groups)
    except ConfigError as error:
        raise ModelError(f"the {family} config cannot work: {error}; check the file") from error


def _number(text: Any, name: str) -> int:
    """Return a field of a config.

    Raises:
        ModelError: it is missing, or not at least 1.
    """
    family, value = text.model_type, getattr(text, name, None)
    if value is None:
        raise ModelError(_missing(family, name))
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"the {family} config has {name}={value!r}; it must be at least 1; check the file"
        )
    return value


def _head_dim(text: Any, n_heads: int) -> int:
    """Return the length of a K row: a field of its own, or hidden size over heads.

    Raises:
        ModelError: there is no such field, and the heads do not divide the hidden size.
    """
    if getattr(text, "head_dim", None) is not None:
        return _number(text, "head_dim")
    hidden = _number(text, "hidden_size")
    if hidden % n_heads:
        raise ModelError(
            f"the {text.model_type} config has no head_dim, and its hidden_size {hidden} is no "
            f"multiple of its num_attention_heads {n_heads}; check the file"
        )
    return hidden // n_heads


def _refuse_uncachable(text: Any) -> None:
    """Refuse layers whose past no cache here can keep.

    Raises:
        ModelError: layers share K and V, or tokens see later ones.
    """
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelError(
            f"the {text.model_type} config shares K and V among {text.num_kv_shared_layers} "
            f"layers, which caches here cannot do; choose another model"
        )
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelError(
            f"the {text.model_type} config asks for bidirectional attention, where a token sees "
            f"later ones and nothing can be cached; choose a causal model"
        )


def _windows(text: Any, n_layers: int) -> list[int | None]:
    """Return the window of every layer, None for full attention.

    transformers masks a sliding layer with ``kv > q - sliding_window``, in every family here, so
    its number is our window: a query at p sees ``(p - w, p]``.
    """
    family, sliding = text.model_type, getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if family in ("llama", "mistral"):
        # These models mask all layers alike and never look at layer_types.
        window = sliding if family == "mistral" else None
        kind = _FULL if window is None else _SLIDING
        if types is not None and set(types[:n_layers]) != {kind}:
            raise ModelError(
                f"the {family} config has layer_types of its own, {sorted(set(types))}, and "
                f"{family} models have {kind} in every layer; the checkpoint is of another family"
            )
        return [window] * n_layers
    if types is None:
        raise ModelError(_missing(family, "layer_types"))
    if len(types) != n_layers:
        raise ModelError(
            f"the {family} config has {n_layers} layers and {len(types)} layer_types; they must "
            f"be one per layer, as many as num_hidden_layers; check the file"
        )
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown:
        raise ModelError(
            f"the {family} config has layers of {', '.join(unknown)}; caches here serve {_FULL} "
            f"and {_SLIDING}; choose another model"
        )
    if _SLIDING in types and sliding is None:
        raise ModelError(
            f"the {family} config has layers of {_SLIDING} and no sliding_window; add the field, "
            f"or set use_sliding_window where the config has it"
        )
    return [sliding if kind == _SLIDING else None for kind in types]


def positions_from_config(config: Any) -> int:
    """Return the longest sequence that a model was made for, by the config of its text part.

    ``max_position_embeddings``, or what YaRN stretches the original positions to where that is
    more: published configs that switch YaRN on leave the other number as it was. Other kinds of
    scaled RoPE have it counted in already.

    Raises:
        ModelError: the config does not say.
    """
    said = getattr(config, "max_position_embeddings", None)
    if not isinstance(said, int) or said < 1:
        raise ModelError(_missing(str(config.model_type), "max_position_embeddings"))
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    stretched = [
        int(part["original_max_position_embeddings"] * part["factor"])
        for part in parts
        if part.get("rope_type", part.get("type")) == "yarn"
        and part.get("original_max_position_embeddings")
        and part.get("factor")
    ]
    return max([said, *stretched])


def check_family(model_type: str | None) -> None:
    """Refuse a family whose attention is not verified here.

    Raises:
        ModelError: it names the family and the supported ones.
    """
    if model_type is None:
        raise ModelError(_missing("model's", "model_type"))
    if model_type not in REQUIRED_FIELDS:
        raise ModelError(
            f"architecture {model_type!r} is not supported; there are: {', '.join(REQUIRED_FIELDS)}"
        )


def config_from_dict(raw: Mapping[str, Any]) -> Any:
    """Make the config object of transformers for a ``config.json``: of its text part, if any.

    Raises:
        ModelError: an unknown family, or a field that is missing or impossible.
        BackendError: transformers is not installed.
    """
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config is {type(text).__name__} and must be an object")
    family = text.get("model_type")
    check_family(family)
    for name in REQUIRED_FIELDS[str(family)]:
        if text.get(name) is None:
            raise ModelError(_missing(str(family), name))
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise BackendError(
            f"reading a {family} config needs the package {error.name!r}; install it with: "
            f"pip install 'kvcellar[torch]'"
        ) from error
    fields = {key: value for key, value in text.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(str(family), **fields)
    except Exception as error:  # its validators raise classes of their own
        what = str(error).strip().splitlines()[-1].strip()
        raise ModelError(f"the {family} config cannot be read: {what}; check the file") from error


def _missing(family: str, name: str) -> str:
    """Say that a config lacks a field, and what to do."""
    return f"the {family} config has no {name}; add the field, or take the model's own config.json"


# What it costs -----------------------------------------------------------------------------------

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, by the names that configs and files use."""

PROCESS_BYTES = 450_000_000
"""Python, torch and transformers in memory, before any weights: measured on Linux, rounded up."""

ALLOCATOR_BYTES = 64_000_000
"""What threads, kernels' own buffers and the allocator take besides what is asked for."""

PLAIN_LOGITS = 1 << 24
"""Attention logits that are held at a time where a kernel does not keep them to itself."""


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """Costs of a model's KV and weights in bytes.

    Attributes:
        name: what was asked for.
        family: ``model_type``.
        params: what a cache must know of it.
        max_positions: the longest sequence that it was made for.
        stored_bytes: weights as they are stored.
        weight_bytes: weights in memory, once loaded.
        dtype: their type in memory.
        counted: what the weights are, and how they were counted.
        n_heads: query heads.
        hidden_size: numbers per token between layers.
        inner_size: numbers per token inside of a layer's MLP, all its active experts together.
        vocab_size: logits per token.
    """

    name: str
    family: str
    params: ModelCacheParams
    max_positions: int
    stored_bytes: int
    weight_bytes: int
    dtype: str
    counted: str
    n_heads: int
    hidden_size: int
    inner_size: int
    vocab_size: int

    def group_bytes(self, kv: KvDtype) -> tuple[int, ...]:
        """Return the bytes of one token in each layer group, scales included."""
        return tuple(group.cell_bytes(kv) for group in self.params.groups)

    def token_bytes(self, kv: KvDtype) -> int:
        """Return the bytes of one token in all layers."""
        return sum(self.group_bytes(kv))

    def agent_cells(self, context: int) -> tuple[int, ...]:
        """Return the tokens that a sequence of ``context`` holds in each group.

        A window lets go of what is behind it.
        """
        return tuple(
            context if group.window is None else min(context, group.window + WINDOW_SLACK)
            for group in self.params.groups
        )

    def agent_bytes(self, context: int, kv: KvDtype) -> int:
        """Return the bytes of a sequence of ``context`` tokens, shared with nobody."""
        cells = self.agent_cells(context)
        return sum(n * size for n, size in zip(cells, self.group_bytes(kv), strict=True))

    def growth_bytes(self, context: int, kv: KvDtype) -> int:
        """Return the bytes that growing adds: one layer's old copy stands beside the new one."""
        cells = self.agent_cells(context)
        return max(
            n * size // len(group.layers)
            for n, size, group in zip(cells, self.group_bytes(kv), self.params.groups, strict=True)
        )

    def pool_cells(self, context: int, n_agents: int = 1) -> tuple[int, ...]:
        """Return the cells that pools allocate in each group where no budget is set: they double.

        Exact for one agent whose history came in steps of ``STEP_TOKENS``. Of several it is what
        they take at most: each has free cells behind its tail, so that it can grow in place.

        Args:
            context: tokens of each agent.
            n_agents: agents in one cache, sharing nothing.
        """
        cells = []
        for group in self.params.groups:
            one = context
            if group.window is not None:  # a step's tokens come before older ones go
                keep = group.window - 1 + WINDOW_SLACK
                one = max(
                    min(keep, at) + min(STEP_TOKENS, context - at)
                    for at in range(0, context, STEP_TOKENS)
                )
            gap = max(MIN_RUN, min(one // 2, MAX_GAP))
            need = n_agents * one + (n_agents - 1) * gap
            cells.append(grown_size(need, 0, MIN_CHUNK, max(self.max_positions, need)))
        return tuple(cells)

    def pool_bytes(self, context: int, kv: KvDtype, n_agents: int = 1) -> int:
        """Return the bytes that pools allocate for agents where no budget is set."""
        cells = self.pool_cells(context, n_agents)
        return sum(n * size for n, size in zip(cells, self.group_bytes(kv), strict=True))

    def n_agents(self, n_bytes: int, context: int, kv: KvDtype, *, has_budget: bool = True) -> int:
        """Return how many agents of ``context`` tokens, sharing nothing, fit in so many bytes.

        Args:
            n_bytes: for K and V.
            context: tokens of each.
            kv: how K and V are stored.
            has_budget: true if pools are granted what they need; else they double.
        """
        if has_budget:
            one = self.agent_bytes(context, kv) + self.growth_bytes(context, kv)
            return max(0, n_bytes) // one
        return most(
            max(0, n_bytes) // self.agent_bytes(context, kv),
            lambda n: self.peak_bytes(context, kv, n) <= n_bytes,
        )

    def peak_bytes(self, context: int, kv: KvDtype, n_agents: int = 1) -> int:
        """Return the bytes of pools without a budget, and of a layer's old copy as it doubles."""
        cells = self.pool_cells(context, n_agents)
        copies = [
            n // 2 * size // len(group.layers)
            for n, size, group in zip(cells, self.group_bytes(kv), self.params.groups, strict=True)
        ]
        return self.pool_bytes(context, kv, n_agents) + max(copies)

    def most_context(
        self, n_bytes: int, n_agents: int, kv: KvDtype, *, has_budget: bool = True
    ) -> int:
        """Return the longest context of the model's own at which so many agents fit."""
        return most(
            self.max_positions,
            lambda context: self.n_agents(n_bytes, context, kv, has_budget=has_budget) >= n_agents,
        )

    def scratch_bytes(self, context: int, n_tokens: int = 512, n_rows: int = 64) -> int:
        """Estimate from above what a forward takes besides weights and KV, and gives back: bytes.

        Args:
            context: tokens that its longest sequence has.
            n_tokens: tokens that go through the model.
            n_rows: of these, tokens whose logits are wanted.
        """
        n_heads, groups = self.n_heads, self.params.groups
        dim = max(max(group.head_dim, group.v_head_dim) for group in groups)
        inside = 8 * self.hidden_size + 4 * n_heads * dim + 4 * self.inner_size
        logits = min(PLAIN_LOGITS, n_tokens * n_heads * context)
        row = max(group.n_kv_heads * (group.head_dim + group.v_head_dim) for group in groups)
        gathered = 2 * 4 * context * row
        return (
            ALLOCATOR_BYTES
            + 4 * n_tokens * inside
            + 12 * n_rows * self.vocab_size
            + 10 * logits
            + gathered
        )


def most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to a limit that fits; 0 where none does.

    Where a number fits, all smaller ones have to fit too.
    """
    low, high = 0, max(0, limit)
    while low < high:
        n = (low + high + 1) // 2
        if fits(n):
            low = n
        else:
            high = n - 1
    return low
