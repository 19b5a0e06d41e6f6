"""How commands that run agents load models, and what each of them may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcellar.cli.session import memory_plan
from kvcellar.cli.terminal import ProgressFn, print_note, shown_warnings

if TYPE_CHECKING:
    from kvcellar.agents import MemoryPlan, ModelHost
    from kvcellar.store import StoreConfig

__all__ = ["Hosting"]


@dataclass(slots=True)
class Hosting:
    """How the models of one process are loaded.

    Attributes:
        loading: settings of all models, as ``open_host`` takes them.
        plan: how models and store share the process's memory; None where nothing bounds it.
        capacities: tokens of the cache, per model that has to share memory with others.
        kv_dtype_of: how K and V of a model are stored where nobody said it.
    """

    loading: Mapping[str, Any]
    plan: MemoryPlan | None = None
    capacities: Mapping[str, int | None] = field(default_factory=dict)
    kv_dtype_of: Callable[[str], str | None] = lambda _: None

    @classmethod
    def of(cls, loading: Mapping[str, Any], memory: str | None) -> Hosting:
        """Divide the memory that a command's option gives; without it nothing is bounded.

        Raises:
            ConfigError: it is no size, or too small for any model.
        """
        return cls(loading, memory_plan(memory, dict(loading)))

    def share_among(self, names: Sequence[str]) -> None:
        """Have several models share the memory so that all of them stay in it, where they can."""
        if self.plan is not None and self.loading.get("capacity") is None:
            self.capacities = self.plan.shared_capacities(names, **self.loading)

    def settings_of(self, name: str) -> dict[str, Any]:
        """Return how one model is loaded, as ``open_host`` takes it."""
        settings = dict(self.loading)
        settings["capacity"] = self.capacities.get(name, settings.get("capacity"))
        settings["kv_dtype"] = settings.get("kv_dtype") or self.kv_dtype_of(name)
        return settings

    def size_of(self, name: str) -> int:
        """Return the bytes that one model may hold, for a process that is bounded."""
        assert self.plan is not None
        return self.plan.size_of(name, **self.settings_of(name))

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

        return planned_context(name, self._limit(name), **self._without_template(name))

    def check(self, name: str) -> None:
        """Find what would keep a model from being loaded; no weight is read.

        Raises:
            ModelError, BackendError, ConfigError: as ``open_host``.
        """
        from kvcellar.agents import check_host

        check_host(name, memory_bytes=self._limit(name), **self._without_template(name))

    def open(self, name: str, bar: AbstractContextManager[ProgressFn]) -> ModelHost:
        """Load a model and start its engine; what was found on the way is told behind the bar."""
        from kvcellar.agents import open_host

        limit = self._limit(name)
        with shown_warnings(), bar as report:
            opened = open_host(name, progress=report, memory_bytes=limit, **self.settings_of(name))
        for found in opened.template.findings if opened.template is not None else ():
            print_note(f"chat template: {found}")
        return opened

    def _limit(self, name: str) -> int | None:
        return None if self.plan is None else self.size_of(name)

    def _without_template(self, name: str) -> dict[str, Any]:
        settings = self.settings_of(name)
        settings.pop("chat_template", None)  # it was read already, and the model is not there yet
        return settings
