"""Loads the models of commands that run agents, within the memory of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcellar.cli.session import memory_plan
from kvcellar.cli.terminal import ProgressFn, print_note, shown_warnings

if TYPE_CHECKING:
    from kvcellar.agents import MemoryPlan, ModelHost
    from kvcellar.engine import EngineConfig
    from kvcellar.models import LoadOptions
    from kvcellar.store import StoreConfig


@dataclass(slots=True)
class Hosting:
    """Loader of the models of one process.

    Attributes:
        loading: options of all models.
        config: policy of their engines.
        plan: how models and store share the process's memory; None where nothing bounds it.
        capacities: tokens of the cache, per model that has to share memory with others.
        kv_dtype_of: how K and V of a model are stored where nobody said it.
    """

    loading: LoadOptions
    config: EngineConfig | None = None
    plan: MemoryPlan | None = None
    capacities: Mapping[str, int | None] = field(default_factory=dict)
    kv_dtype_of: Callable[[str], str | None] = lambda _: None

    @classmethod
    def of(
        cls, loading: LoadOptions, memory: str | None, config: EngineConfig | None = None
    ) -> Hosting:
        """Divide the memory that a command's option gives; without it nothing is bounded.

        Raises:
            ConfigError: it is no size, or too small for any model.
        """
        return cls(loading, config, memory_plan(memory, loading))

    def share_among(self, names: Sequence[str]) -> None:
        """Have several models share the memory so that all of them stay in it, where they can."""
        if self.plan is not None and self.loading.capacity is None:
            self.capacities = self.plan.shared_capacities(names, self.loading, self.config)

    def options_of(self, name: str) -> LoadOptions:
        """Return how one model is loaded, inside of its share of the memory."""
        options = replace(
            self.loading,
            model=name,
            capacity=self.capacities.get(name, self.loading.capacity),
            kv_dtype=self.loading.kv_dtype or self.kv_dtype_of(name),
        )
        if self.plan is None:
            return options
        return replace(options, memory_bytes=self.plan.size_of(options, self.config))

    def size_of(self, name: str) -> int:
        """Return the bytes that one model may hold, for a process that is bounded."""
        size_bytes = self.options_of(name).memory_bytes
        assert size_bytes is not None
        return size_bytes

    @property
    def registry(self) -> dict[str, Any]:
        """The bounds of a ``ModelRegistry``, as it takes them."""
        if self.plan is None:
            return {}
        return {"budget_bytes": self.plan.models_bytes, "size_of": self.size_of}

    @property
    def store(self) -> StoreConfig:
        """Settings of the store beside these models."""
        from kvcellar.store import StoreConfig

        if self.plan is None:
            return StoreConfig()
        return StoreConfig(warm_bytes=self.plan.warm_bytes, queue_bytes=self.plan.queue_bytes)

    def context_of(self, name: str) -> tuple[int, int]:
        """Return the longest conversation that a model will take and what it was made for."""
        from kvcellar.agents import planned_context

        return planned_context(self.options_of(name), self.config)

    def check(self, name: str) -> None:
        """Find what would keep a model from being loaded; no weight is read.

        Raises:
            ModelError, BackendError, ConfigError: as ``open_host``.
        """
        from kvcellar.agents import check_host

        check_host(self.options_of(name), self.config)

    def open(self, name: str, bar: AbstractContextManager[ProgressFn]) -> ModelHost:
        """Load a model and start its engine; what was found on the way is told behind the bar."""
        from kvcellar.agents import open_host

        options = self.options_of(name)
        with shown_warnings(), bar as report:
            opened = open_host(options, config=self.config, progress=report)
        for found in opened.template.findings if opened.template is not None else ():
            print_note(f"chat template: {found}")
        if opened.resumes:
            print_note(opened.resumes)
        return opened
