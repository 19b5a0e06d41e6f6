"""Models of one process, each loaded within its share of the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcellar.budget import MemoryBudget, parse_size, resident_bytes
from kvcellar.engine import EngineConfig
from kvcellar.errors import ConfigError, ModelError
from kvcellar.hosting.host import ModelHost, check_host, open_host
from kvcellar.hosting.memory import (
    Capacity,
    MemoryPlan,
    budgets_of_host,
    choose_capacity,
    planned_context,
    process_bytes_of,
)
from kvcellar.models import LoadOptions
from kvcellar.models.adapter_names import MARK, NAME
from kvcellar.models.loading import accelerator_memory
from kvcellar.models.options import ProgressFn
from kvcellar.registry import load_backend
from kvcellar.store import StoreConfig


def limit_of(memory: str | None, loading: LoadOptions) -> int | None:
    """Return the bytes that the whole process may hold; None: any number.

    They are those of the card where the models run on one that says what it has, else of main
    memory.

    Args:
        memory: a size as a text, such as ``8GB``; None: no limit.
        loading: options of the models.

    Raises:
        ConfigError: it is no size, or nobody knows what K and V take where they are.
    """
    limit_bytes = None if memory is None else parse_size(memory)
    if limit_bytes is None or loading.device in (None, "cpu"):
        return limit_bytes
    if accelerator_memory(loading) is None:
        raise ConfigError(
            f"--memory bounds what the process holds in main memory or on a card of CUDA, and KV "
            f"on {loading.device!r} is neither; leave one of the two out, or give a --capacity"
        )
    return limit_bytes


@dataclass(slots=True)
class Hosting:
    """Loader of the models of one process.

    Attributes:
        loading: options of all models.
        config: policy of their engines.
        plan: how models and store share the process's memory; None where nothing bounds it.
        capacities: tokens of the cache, per model that has to share memory with others.
        adapters: folders by name, per model; None: those of ``loading``, beside every model.
        devices: where a model runs, per model that has a device of its own.
        kv_dtype_of: how K and V of a model are stored where nobody said it.
    """

    loading: LoadOptions
    config: EngineConfig | None = None
    plan: MemoryPlan | None = None
    capacities: Mapping[str, int | None] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[str, str | Path]] | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    kv_dtype_of: Callable[[str], str | None] = lambda _: None

    @classmethod
    def within(
        cls,
        limit_bytes: int | None,
        loading: LoadOptions,
        config: EngineConfig | None = None,
        models: Sequence[LoadOptions] = (),
    ) -> Hosting:
        """Divide what the process may hold; a backend that is named is loaded, and no model.

        Args:
            limit_bytes: of the whole process; None: nothing bounds it.
            loading: how models are loaded.
            config: policy of their engines.
            models: options of all that will be loaded, where they are known.

        Raises:
            ConfigError: a card has less.
            BackendError: there is no such backend.
        """
        if limit_bytes is None:
            return cls(loading, config)
        if loading.backend is not None:
            load_backend(loading.backend)
        card = accelerator_memory(loading)
        if card is None:
            estimate, held = process_bytes_of(models), resident_bytes()
            process_bytes = max(estimate, held)  # what loading brings counts, too
            plan = MemoryPlan.divide(limit_bytes, process_bytes, is_measured=held > estimate)
            return cls(loading, config, plan)
        plan = MemoryPlan.of_card(limit_bytes, card)
        card.bound(limit_bytes)
        return cls(loading, config, plan)

    def share_among(self, names: Sequence[str]) -> None:
        """Have several models share the memory so that all of them stay in it, where they can."""
        if self.plan is not None and self.loading.capacity is None:
            self.capacities = self.plan.shared_capacities(names, self.loading, self.config)

    def options_of(self, name: str) -> LoadOptions:
        """Return how one model is loaded, inside of its share of the memory."""
        options = replace(
            self.loading,
            model=name,
            adapters=self._adapters_of(name),
            device=self.devices.get(name, self.loading.device),
            capacity=self.capacities.get(name, self.loading.capacity),
            kv_dtype=self.loading.kv_dtype or self.kv_dtype_of(name),
        )
        if self.plan is None:
            return options
        return replace(options, memory_bytes=self.plan.size_of(options, self.config))

    def _adapters_of(self, model: str) -> Mapping[str, str | Path]:
        return self.loading.adapters if self.adapters is None else self.adapters.get(model, {})

    def split(self, name: str) -> tuple[str, str]:
        """Return the model that a name stands for, and the adapter; empty: none."""
        model, _, adapter = name.rpartition(MARK)
        return (model, adapter) if model and adapter in self._adapters_of(model) else (name, "")

    def size_of(self, name: str) -> int:
        """Return the bytes that one model may hold, for a process that is bounded."""
        size_bytes = self.options_of(name).memory_bytes
        assert size_bytes is not None
        return size_bytes

    @property
    def registry(self) -> dict[str, Any]:
        """The bounds of a ``ModelRegistry`` and its names, as it takes them."""
        if self.plan is None:
            return {"split": self.split}
        bounds = {"budget_bytes": self.plan.models_bytes, "size_of": self.size_of}
        return {"split": self.split, **bounds}

    @property
    def store(self) -> StoreConfig:
        """Settings of the store beside these models."""
        if self.plan is None:
            return StoreConfig()
        return StoreConfig(warm_bytes=self.plan.warm_bytes, queue_bytes=self.plan.queue_bytes)

    def context_of(self, name: str) -> tuple[int, int]:
        """Return the longest conversation that a model will take and what it was made for."""
        return planned_context(self.options_of(name), self.config)

    def check(self, name: str) -> None:
        """Find what would keep a model from being loaded; no weight is read.

        Raises:
            ModelError, BackendError, ConfigError: as ``open_host``.
        """
        check_host(self.options_of(name), self.config)

    def open(self, name: str, progress: ProgressFn | None = None) -> ModelHost:
        """Load a model and start its engine.

        Raises:
            ModelError, BackendError, ConfigError, StoreError: as ``open_host``.
        """
        try:
            return open_host(self.options_of(name), config=self.config, progress=progress)
        except ModelError as error:
            model, _, adapter = name.rpartition(MARK)
            if not model or not NAME.fullmatch(adapter) or Path(name).expanduser().exists():
                raise
            raise ModelError(
                f"{error}; or, for the model {model} with an adapter, load it beside it: "
                f"--adapter {adapter}=FOLDER"
            ) from error


def budget_of_one(
    options: LoadOptions, limit_bytes: int | None, n_sequences: int
) -> tuple[Capacity | None, MemoryBudget | None]:
    """Return the capacity and the budget of the cache of one model, alone in a process.

    Memory is shared out as among agents, so that a limit that does for one command does for all.
    A backend that is named is loaded for that; both are None where nothing bounds the process.

    Args:
        options: of the model.
        limit_bytes: what the process may hold; None: any number.
        n_sequences: conversations of the model's context, for the default capacity.

    Raises:
        ConfigError: the model does not fit, or a card has less.
        BackendError: there is no such backend.
    """
    plan = Hosting.within(limit_bytes, options, models=[options]).plan
    if plan is None:
        return None, None
    plan.size_of(options)  # refuses what does not fit
    inside = replace(options, memory_bytes=plan.models_bytes)
    chosen = choose_capacity(inside, most_sequences=n_sequences)
    budget, _ = budgets_of_host(replace(inside, capacity=chosen.cells))
    return chosen, budget
