"""One process, one limit: how its models, and the RAM of its store, share what it may hold."""

from __future__ import annotations

from dataclasses import dataclass

from kvcellar.bookkeeping.growth import ARRAY_BYTES, INDEX_BYTES
from kvcellar.budget import MemoryBudget, format_size
from kvcellar.engine import EngineConfig
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES, KvDtype, parse_kv_dtype
from kvcellar.models.sizing import size_model
from kvcellar.spec import ModelCacheSpec
from kvcellar.store import BLOCK_TOKENS
from kvcellar.store.config import GIB
from kvcellar.types import DEFAULT_CAPACITY

__all__ = ["MemoryPlan", "budget_of_host"]

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
        config: EngineConfig | None = None,
        backend: str = "torch",
        **_: object,
    ) -> int:
        """What a model is given, from its config: enough for ``capacity`` tokens, or all there is.

        Takes what ``open_host`` takes.

        Raises:
            ModelError: as ``size_model``.
        """
        spec = size_model(name, dtype=dtype, backend=backend)
        most = capacity or min(spec.max_positions, DEFAULT_CAPACITY)
        kv = _kv_of(spec, kv_dtype)
        kv_bytes = spec.growth_bytes(most, kv) + sum(
            most * (size + INDEX_BYTES + ARRAY_BYTES) for size in spec.group_bytes(kv)
        )
        reserve = _reserve(spec, most, kv, config)
        return min(self.models_bytes, spec.weight_bytes + reserve + kv_bytes)


def budget_of_host(
    spec: ModelCacheSpec,
    limit_bytes: int,
    *,
    capacity: int,
    kv_dtype: str | None = None,
    config: EngineConfig | None = None,
) -> MemoryBudget:
    """The budget of one host's cache: its weights are its base, its forwards its reserve.

    Raises:
        ConfigError: the weights and a forward alone take more, with the numbers.
    """
    reserve = _reserve(spec, capacity, _kv_of(spec, kv_dtype), config)
    return MemoryBudget(limit_bytes, base_bytes=spec.weight_bytes, reserve_bytes=reserve)


def _reserve(spec: ModelCacheSpec, capacity: int, kv: KvDtype, config: EngineConfig | None) -> int:
    """What a forward takes and gives back, and the blocks of a restore on their way in."""
    config = config or EngineConfig()
    context = min(capacity, spec.max_positions)
    forward = spec.scratch_bytes(context, config.max_num_batched_tokens, config.max_num_seqs)
    return forward + IN_FLIGHT * BLOCK_TOKENS * spec.token_bytes(kv)


def _kv_of(spec: ModelCacheSpec, kv_dtype: str | None) -> KvDtype:
    own = spec.dtype if spec.dtype in FLOAT_KV_DTYPES else "float32"
    return parse_kv_dtype(kv_dtype or own)
