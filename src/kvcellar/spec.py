"""A model's cache facts, read from the model's own config, and what they cost in bytes.

Windows and layer types are never written down here: a ``config.json`` is handed to the config
class of transformers, whose rules are the ones that the model runs by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.bookkeeping.cells import MAX_GAP, MIN_RUN
from kvcellar.bookkeeping.growth import STEP_TOKENS, grown_size
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES, KvDtype
from kvcellar.types import MIN_CHUNK, LayerGroup, ModelCacheParams

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
    """What a cache must know of a model, from the model's own config.

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
    family = getattr(text, "model_type", None)
    check_family(family)

    def number(name: str) -> int:
        value = getattr(text, name, None)
        if value is None:
            raise ModelError(_missing(str(family), name))
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"the {family} config has {name}={value!r}; it must be at least 1; check the file"
            )
        return value

    n_layers = number("num_hidden_layers")
    n_heads = number("num_attention_heads")
    n_kv_heads = number("num_key_value_heads")
    if getattr(text, "head_dim", None) is not None:
        head_dim = number("head_dim")
    elif number("hidden_size") % n_heads:
        raise ModelError(
            f"the {family} config has no head_dim, and its hidden_size {text.hidden_size} is no "
            f"multiple of its num_attention_heads {n_heads}; check the file"
        )
    else:
        head_dim = number("hidden_size") // n_heads
    v_head_dim = number("v_head_dim") if getattr(text, "v_head_dim", None) is not None else head_dim
    if n_heads % n_kv_heads:
        raise ModelError(
            f"the {family} config has {n_heads} query heads and {n_kv_heads} KV heads; "
            f"num_key_value_heads must divide num_attention_heads; check the file"
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelError(
            f"the {family} config shares K and V among {text.num_kv_shared_layers} layers, which "
            f"caches here cannot do; choose another model"
        )
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelError(
            f"the {family} config asks for bidirectional attention, where a token sees later ones "
            f"and nothing can be cached; choose a causal model"
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
        return ModelCacheParams(n_layers, n_kv_heads, head_dim, v_head_dim, groups)
    except ConfigError as error:
        raise ModelError(f"the {family} config cannot work: {error}; check the file") from error


def _windows(text: Any, n_layers: int) -> list[int | None]:
    """The window of every layer, None for full attention.

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
    """The longest sequence that a model was made for, from the config of its text part.

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
    """The config object of transformers for a ``config.json``: of its text part, if it has one.

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
    """What a model's KV and weights cost.

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
        """Bytes of one token in each layer group, scales included."""
        return tuple(group.cell_bytes(kv) for group in self.params.groups)

    def token_bytes(self, kv: KvDtype) -> int:
        """Bytes of one token in all layers."""
        return sum(self.group_bytes(kv))

    def agent_cells(self, context: int, window_slack: int = 64) -> tuple[int, ...]:
        """Tokens that a sequence of ``context`` holds in each group: a window lets go of the rest.

        Args:
            context: its length.
            window_slack: tokens kept behind each window.
        """
        return tuple(
            context if group.window is None else min(context, group.window + window_slack)
            for group in self.params.groups
        )

    def agent_bytes(self, context: int, kv: KvDtype, window_slack: int = 64) -> int:
        """Bytes of a sequence of ``context`` tokens, shared with nobody."""
        cells = self.agent_cells(context, window_slack)
        return sum(n * size for n, size in zip(cells, self.group_bytes(kv), strict=True))

    def growth_bytes(self, context: int, kv: KvDtype, window_slack: int = 64) -> int:
        """What an agent adds while pools grow: one layer's old copy stands beside the new one."""
        cells = self.agent_cells(context, window_slack)
        return max(
            n * size // len(group.layers)
            for n, size, group in zip(cells, self.group_bytes(kv), self.params.groups, strict=True)
        )

    def pool_cells(
        self, context: int, n_agents: int = 1, window_slack: int = 64
    ) -> tuple[int, ...]:
        """Cells that pools allocate in each group where no budget is set: they double.

        Exact for one agent whose history came in steps of ``STEP_TOKENS``. Of several it is what
        they take at most: each has free cells behind its tail, so that it can grow in place.

        Args:
            context: tokens of each agent.
            n_agents: agents in one cache, sharing nothing.
            window_slack: tokens kept behind each window.
        """
        cells = []
        for group in self.params.groups:
            one = context
            if group.window is not None:  # a step's tokens come before older ones go
                keep = group.window - 1 + window_slack
                one = max(
                    min(keep, at) + min(STEP_TOKENS, context - at)
                    for at in range(0, context, STEP_TOKENS)
                )
            gap = max(MIN_RUN, min(one // 2, MAX_GAP))
            need = n_agents * one + (n_agents - 1) * gap
            cells.append(grown_size(need, 0, MIN_CHUNK, max(self.max_positions, need)))
        return tuple(cells)

    def pool_bytes(self, context: int, kv: KvDtype, n_agents: int = 1) -> int:
        """Bytes that pools allocate for agents where no budget is set."""
        cells = self.pool_cells(context, n_agents)
        return sum(n * size for n, size in zip(cells, self.group_bytes(kv), strict=True))

    def n_agents(self, n_bytes: int, context: int, kv: KvDtype, *, has_budget: bool = True) -> int:
        """How many agents of ``context`` tokens, sharing nothing, fit in so many bytes.

        Args:
            n_bytes: for K and V.
            context: tokens of each.
            kv: how K and V are stored.
            has_budget: whether pools are granted what they need; else they double.
        """
        if has_budget:
            one = self.agent_bytes(context, kv) + self.growth_bytes(context, kv)
            return max(0, n_bytes) // one
        return most(
            max(0, n_bytes) // self.agent_bytes(context, kv),
            lambda n: self.peak_bytes(context, kv, n) <= n_bytes,
        )

    def peak_bytes(self, context: int, kv: KvDtype, n_agents: int = 1) -> int:
        """Pools without a budget, and the old copy of a layer that has just doubled."""
        cells = self.pool_cells(context, n_agents)
        copies = [
            n // 2 * size // len(group.layers)
            for n, size, group in zip(cells, self.group_bytes(kv), self.params.groups, strict=True)
        ]
        return self.pool_bytes(context, kv, n_agents) + max(copies)

    def most_context(
        self, n_bytes: int, n_agents: int, kv: KvDtype, *, has_budget: bool = True
    ) -> int:
        """The longest context at which so many agents fit, at most what the model was made for."""
        return most(
            self.max_positions,
            lambda context: self.n_agents(n_bytes, context, kv, has_budget=has_budget) >= n_agents,
        )

    def scratch_bytes(self, context: int, n_tokens: int = 512, n_rows: int = 64) -> int:
        """What a forward takes besides weights and KV, and gives back: an upper estimate.

        Args:
            context: tokens that its longest sequence has.
            n_tokens: tokens that go through the model.
            n_rows: of these, tokens whose logits are wanted.
        """
        n_heads, dim = self.n_heads, self.params.head_dim
        inside = 8 * self.hidden_size + 4 * n_heads * dim + 4 * self.inner_size
        logits = min(PLAIN_LOGITS, n_tokens * n_heads * context)
        gathered = 2 * 4 * context * self.params.n_kv_heads * (dim + self.params.v_head_dim)
        return (
            ALLOCATOR_BYTES
            + 4 * n_tokens * inside
            + 12 * n_rows * self.vocab_size
            + 10 * logits
            + gathered
        )


def most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to a limit that fits, where smaller ones fit too; 0 where none does."""
    low, high = 0, max(0, limit)
    while low < high:
        n = (low + high + 1) // 2
        if fits(n):
            low = n
        else:
            high = n - 1
    return low


# Models that no config says enough of ------------------------------------------------------------

SPEC_FIELDS: dict[str, str] = {
    "n_layers": "attention layers",
    "n_kv_heads": "KV heads per layer",
    "head_dim": "length of a K row",
    "v_head_dim": "length of a V row; as head_dim where it is left out",
    "groups": "layer groups: objects of layers (a list of ids, or how many), window (or null), "
    "n_kv_heads, head_dim, v_head_dim",
    "max_positions": "the longest sequence",
    "weight_bytes": "weights in memory",
    "stored_bytes": "weights in files; as weight_bytes where it is left out",
    "dtype": "type of the weights in memory",
    "n_heads": "query heads",
    "hidden_size": "numbers per token between layers",
    "inner_size": "numbers per token inside an MLP",
    "vocab_size": "logits per token",
}
"""Fields of a spec file and what they mean."""

_NEEDED = ("n_layers", "n_kv_heads", "head_dim", "max_positions", "weight_bytes")
_GROUP_FIELDS = ("layers", "window", "n_kv_heads", "head_dim", "v_head_dim")


def spec_from_file(path: Path, base: ModelCacheSpec | None = None) -> ModelCacheSpec:
    """A spec from a JSON object of its fields, over those of ``base`` where there is one.

    Raises:
        ConfigError: no JSON object, unknown or impossible fields, or too few without a base; the
            message names the file and the field.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; write one object") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}; write one object of fields")
    unknown = sorted(set(raw) - set(SPEC_FIELDS))
    if unknown:
        raise ConfigError(
            f"{path} has the field {unknown[0]!r}, which a spec does not have; there are: "
            f"{', '.join(SPEC_FIELDS)}"
        )
    missing = [name for name in _NEEDED if name not in raw and base is None]
    if missing:
        raise ConfigError(
            f"{path} has no {missing[0]} ({SPEC_FIELDS[missing[0]]}) and there is no model's "
            f"config to take it from; add it, or name a model"
        )

    def number(name: str, there: Mapping[str, Any], other: int, where: str = "") -> int:
        value = there.get(name, other)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{path} has {where}{name}={value!r}; it must be a whole number >= 1")
        return value

    n_kv_heads = number("n_kv_heads", raw, base.params.n_kv_heads if base else 0)
    n_layers = number("n_layers", raw, base.params.n_layers if base else 0)
    head_dim = number("head_dim", raw, base.params.head_dim if base else 0)
    v_head_dim = number("v_head_dim", raw, base.params.v_head_dim if base else head_dim)
    is_reshaped = {"n_layers", "n_kv_heads", "head_dim", "v_head_dim", "groups"} & set(raw)
    if "groups" in raw:
        groups = _groups_of_file(path, raw["groups"], number, n_kv_heads, head_dim, v_head_dim)
    elif base is not None and "n_layers" not in raw:
        groups = tuple(
            LayerGroup(g.layers, n_kv_heads, head_dim, v_head_dim, g.window, g.softcap)
            for g in base.params.groups
        )
    else:
        groups = ()
    try:
        params = (
            ModelCacheParams(n_layers, n_kv_heads, head_dim, v_head_dim, groups)
            if is_reshaped or base is None
            else base.params
        )
    except ConfigError as error:
        raise ConfigError(f"{path} cannot work: {error}") from error
    dtype = raw.get("dtype", base.dtype if base else "bfloat16")
    if dtype not in FLOAT_KV_DTYPES:
        raise ConfigError(f"{path} has dtype={dtype!r}; choose one of {', '.join(FLOAT_KV_DTYPES)}")
    weight_bytes = number("weight_bytes", raw, base.weight_bytes if base else 0)
    stored = base.stored_bytes if base and "weight_bytes" not in raw else weight_bytes
    n_heads = number("n_heads", raw, base.n_heads if base else n_kv_heads)
    if n_heads % n_kv_heads:
        raise ConfigError(
            f"{path}: {n_heads} query heads (n_heads) are no multiple of {n_kv_heads} KV heads "
            f"(n_kv_heads)"
        )
    hidden = number("hidden_size", raw, base.hidden_size if base else n_heads * head_dim)
    return ModelCacheSpec(
        name=base.name if base else str(path),
        family=base.family if base else "custom",
        params=params,
        max_positions=number("max_positions", raw, base.max_positions if base else 0),
        stored_bytes=number("stored_bytes", raw, stored),
        weight_bytes=weight_bytes,
        dtype=dtype,
        counted=(f"{base.counted}; " if base and "weight_bytes" not in raw else "")
        + f"{', '.join(raw) or 'nothing'} from {path.name}",
        n_heads=n_heads,
        hidden_size=hidden,
        inner_size=number("inner_size", raw, base.inner_size if base else 4 * hidden),
        vocab_size=number("vocab_size", raw, base.vocab_size if base else 262_144),
    )


def _groups_of_file(
    path: Path, raw: Any, number: Any, n_kv_heads: int, head_dim: int, v_head_dim: int
) -> tuple[LayerGroup, ...]:
    """The ``groups`` of a spec file; layers that are counted follow those of the group before."""
    if not isinstance(raw, list) or not raw or not all(isinstance(part, dict) for part in raw):
        raise ConfigError(f"{path} has groups={raw!r}; write a list of objects")
    groups: list[LayerGroup] = []
    start = 0
    for index, part in enumerate(raw):
        where = f"groups[{index}]."
        unknown = sorted(set(part) - set(_GROUP_FIELDS))
        if unknown:
            raise ConfigError(
                f"{path} has {where}{unknown[0]}, which a group does not have; there are: "
                f"{', '.join(_GROUP_FIELDS)}"
            )
        layers = part.get("layers")
        if isinstance(layers, int) and not isinstance(layers, bool) and layers > 0:
            layers = list(range(start, start + layers))
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise ConfigError(
                f"{path} has {where}layers={layers!r}; write a list of layer ids, or how many"
            )
        start = max([start, *(layer + 1 for layer in layers)])
        window = None if part.get("window") is None else number("window", part, 0, where)
        try:
            groups.append(
                LayerGroup(
                    tuple(layers),
                    number("n_kv_heads", part, n_kv_heads, where),
                    number("head_dim", part, head_dim, where),
                    number("v_head_dim", part, v_head_dim, where),
                    window,
                )
            )
        except ConfigError as error:
            raise ConfigError(f"{path} has {where[:-1]} that cannot work: {error}") from error
    return tuple(groups)
