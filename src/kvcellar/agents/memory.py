"""One process, one limit: how its models, and the RAM of its store, share what it may hold."""

from __future__ import annotations

from dataclasses import dataclass

from kvcellar.bookkeeping.growth import ARRAY_BYTES, INDEX_BYTES
from kvcellar.budget import MemoryBudget, format_size
from kvcellar.engine import EngineConfig
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES, KvDtype, parse_kv_dtype
from kvcellar.models.eagle3.finding import size_eagle3
from kvcellar.models.sizing import size_model
from kvcellar.spec import ModelCacheSpec
from kvcellar.store import BLOCK_TOKENS
from kvcellar.store.config import GIB
from kvcellar.types import DEFAULT_CAPACITY

__all__ = ["EAGLE3", "NGRAM", "NGRAM_BYTES", "MemoryPlan", "budgets_of_host", "head_of"]

NGRAM = "ngram"
"""As a drafter: what followed before, without a model."""

EAGLE3 = "eagle3"
"""As a drafter: a head that reads the model's own layers; ``eagle3:PATH`` names another one."""

NGRAM_BYTES = 512
"""About what a token takes that n-grams are remembered of: an entry per length, and itself."""

IN_FLIGHT = 8
"""Blocks of a restore that are read ahead of the engine."""

STORE_SHARE = 16
"""The store's RAM, and its queue of writes, each take one part in so many, or less."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a process that runs agents.

    Attributes:
        limit_bytes: of the whole process.
        process_bytes: what it holds without any model.
        warm_bytes: for the store's blocks in RAM.
        queue_bytes: for what waits to be written.
    """

    limit_bytes: int
    process_bytes: int
    warm_bytes: int
    queue_bytes: int

    @classmethod
    def divide(cls, limit_bytes: int, process_bytes: int) -> MemoryPlan:
        """Give the store its part; the rest is for models.

        Raises:
            ConfigError: nothing would be left for a model.
        """
        part = min(GIB, max(0, limit_bytes - process_bytes) // STORE_SHARE)
        plan = cls(limit_bytes, process_bytes, part, part)
        if plan.models_bytes <= 0:
            raise ConfigError(
                f"a memory budget of {format_size(limit_bytes)} leaves nothing for a model: the "
                f"process holds {format_size(process_bytes)} without any; give more"
            )
        return plan

    @property
    def models_bytes(self) -> int:
        """For all models in memory together: weights, forwards and KV."""
        return self.limit_bytes - self.process_bytes - self.warm_bytes - self.queue_bytes

    def size_of(
        self,
        name: str,
        *,
        capacity: int | None = None,
        kv_dtype: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        config: EngineConfig | None = None,
        speculate: str | None = None,
        backend: str = "torch",
        **_: object,
    ) -> int:
        """What a model is given, from its config: enough for ``capacity`` tokens, or all there is.

        Takes what ``open_host`` takes; whoever guesses for the model is counted with it.

        Raises:
            ModelError: as ``size_model``.
        """
        sizes = _sizes(name, speculate, capacity, kv_dtype, dtype, weights, config, backend)
        return min(self.models_bytes, sum(size.fixed_bytes + size.kv_bytes for size in sizes))


@dataclass(frozen=True, slots=True)
class _Size:
    """What one model takes: its weights, what it sets aside, and KV of so many tokens."""

    weight_bytes: int
    reserve_bytes: int
    kv_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Whatever is in the cache."""
        return self.weight_bytes + self.reserve_bytes


def budgets_of_host(
    name: str,
    limit_bytes: int,
    *,
    capacity: int | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    config: EngineConfig | None = None,
    speculate: str | None = None,
    backend: str = "torch",
) -> tuple[MemoryBudget, MemoryBudget | None]:
    """The budgets of one host's cache, and of the cache of a model that guesses for it, if any.

    A model's weights are its base, its forwards its reserve. What is left for KV is divided so that
    both caches hold the same tokens.

    Raises:
        ConfigError: the weights and a forward alone take more, with the numbers.
    """
    size, *others = _sizes(name, speculate, capacity, kv_dtype, dtype, weights, config, backend)
    guessing = sum(other.fixed_bytes for other in others)
    left = max(0, limit_bytes - size.fixed_bytes - guessing)
    shares = [left * other.kv_bytes // (size.kv_bytes + other.kv_bytes) for other in others]
    own = MemoryBudget(
        limit_bytes,
        base_bytes=size.weight_bytes + guessing + sum(shares),
        reserve_bytes=size.reserve_bytes,
    )
    if not others or not others[0].kv_bytes:
        return own, None
    (draft,), (share,) = others, shares
    return own, MemoryBudget(
        draft.fixed_bytes + share,
        base_bytes=draft.weight_bytes,
        reserve_bytes=draft.reserve_bytes,
    )


def _sizes(
    name: str,
    speculate: str | None,
    capacity: int | None,
    kv_dtype: str | None,
    dtype: str | None,
    weights: str | None,
    config: EngineConfig | None,
    backend: str,
) -> list[_Size]:
    """A model's, and that of whoever guesses for it."""
    config = config or EngineConfig()
    spec = size_model(name, dtype=dtype, backend=backend, weights=weights)
    most = capacity or min(spec.max_positions, DEFAULT_CAPACITY)
    n_rows = config.max_num_seqs
    if speculate is not None:
        n_rows = min(config.max_num_batched_tokens, n_rows * (1 + config.max_drafted))
    sizes = [_size_of(spec, most, kv_dtype, config, n_rows)]
    if speculate == NGRAM:
        sizes.append(_Size(0, 2 * most * NGRAM_BYTES, 0))
    elif speculate is not None and (head := head_of(speculate)) is not None:
        draft = size_eagle3(head or None, name, dtype=spec.dtype)
        sizes.append(_size_of(draft, most, None, config, n_rows))
    elif speculate is not None:
        draft = size_model(speculate, dtype=dtype, backend=backend, weights=weights)
        sizes.append(_size_of(draft, most, None, config, config.max_num_batched_tokens))
    return sizes


def head_of(speculate: str) -> str | None:
    """The head that a drafter's name asks for, "" for the bundled one; None where it asks for none.

    A folder or a model called ``eagle3`` is asked for by its path.
    """
    kind, _, path = speculate.partition(":")
    return path if kind == EAGLE3 else None


def _size_of(
    spec: ModelCacheSpec, capacity: int, kv_dtype: str | None, config: EngineConfig, n_rows: int
) -> _Size:
    """Besides weights and KV: a forward, and the blocks of a restore on their way in."""
    kv = _kv_of(spec, kv_dtype)
    context = min(capacity, spec.max_positions)
    forward = spec.scratch_bytes(context, config.max_num_batched_tokens, n_rows)
    kv_bytes = spec.growth_bytes(capacity, kv) + sum(
        capacity * (size + INDEX_BYTES + ARRAY_BYTES) for size in spec.group_bytes(kv)
    )
    in_flight = IN_FLIGHT * BLOCK_TOKENS * spec.token_bytes(kv)
    return _Size(spec.weight_bytes, forward + in_flight, kv_bytes)


def _kv_of(spec: ModelCacheSpec, kv_dtype: str | None) -> KvDtype:
    own = spec.dtype if spec.dtype in FLOAT_KV_DTYPES else "float32"
    return parse_kv_dtype(kv_dtype or own)
