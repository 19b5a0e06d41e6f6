"""Models that a server offers, and the state of each: loading, ready, leaving."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcellar.agents import ModelHost, ModelRegistry
from kvcellar.engine.embedding import TextEmbedder
from kvcellar.errors import KVCellarError
from kvcellar.hosting.text_limits import longest_token
from kvcellar.server.errors import ApiError, as_api_error

LONG_STEP_S = 60.0
"""How long a step takes, at least, of which it is said how long."""

LoadFn = Callable[[str, Callable[[float, str], None]], ModelHost]
"""From a path, and whom to tell how far it is, to a running host."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model at one moment.

    Attributes:
        name: what clients call it.
        state: ``absent``, ``loading``, ``ready``, ``leaving`` or ``failed``: it could not be
            loaded, or its engine has stopped.
        since_s: seconds since 1970.
        detail: how far loading is, what went wrong, or for how long a step has not ended.
        fraction: of loading, 0 to 1.
    """

    name: str
    state: str
    since_s: float
    detail: str = ""
    fraction: float = 0.0


class ServedModels:
    """The names that clients may use, and the registry behind them.

    A client can name a model and nothing else: what a name stands for was said at the start, so no
    request ever becomes a path. In the registry, and for agents, a model goes by what it stands
    for, as it does for commands.
    """

    def __init__(
        self,
        offered: Mapping[str, str],
        load: LoadFn,
        *,
        takes_any: bool = False,
        budget_bytes: int | None = None,
        idle_ttl_s: float | None = None,
        size_of: Callable[[str], int] | None = None,
        split: Callable[[str], tuple[str, str]] = lambda name: (name, ""),
        context_of: Callable[[str], tuple[int, int]] | None = None,
        embedding_models: Mapping[str, TextEmbedder] | None = None,
        loading: Mapping[str, Any] | None = None,
    ) -> None:
        """Create models of which none is loaded.

        Args:
            offered: name -> what ``load`` takes; the first is the default.
            load: opens a host.
            takes_any: let unknown names stand for the default.
            budget_bytes: as ``ModelRegistry``.
            idle_ttl_s: as ``ModelRegistry``.
            size_of: as ``ModelRegistry``.
            split: as ``ModelRegistry``.
            context_of: what ``context`` says of a model that was never loaded.
            embedding_models: by name, those that make vectors alone; in memory.
            loading: options that the models are loaded with, by the names that commands have for
                them.
        """
        self.loading = dict(loading or {})
        self.embedding_models = dict(embedding_models or {})
        self._context_of = context_of
        self._split = split
        self.offered = dict(offered)
        self.default = next(iter(self.offered.values()))
        self._names = {path: name for name, path in reversed(self.offered.items())}
        self._load = load
        self._takes_any = takes_any
        self._lock = threading.Lock()
        now = time.time()
        self._states = {  # the default first
            path: ModelState(self._names[path], "absent", now) for path in self.offered.values()
        }
        self._contexts: dict[str, tuple[int, int | None]] = {}
        self._longest_tokens: dict[str, int] = {}
        self._sees = False
        self.created_s = int(now)
        self.n_loads = 0
        self.registry = ModelRegistry(
            self._open,
            budget_bytes=budget_bytes,
            idle_ttl_s=idle_ttl_s,
            size_of=size_of,
            split=split,
        )
        self.registry.before_unload(self._leave)
        self.registry.after_unload(self._left)

    def resolve(self, name: str | None) -> str:
        """Return what the registry calls the model that is meant.

        Raises:
            ApiError: 404, there is none of that name.
        """
        if name is None:
            return self.default
        if name in self.offered:
            return self.offered[name]
        if self._takes_any:
            return self.default
        raise ApiError(
            404,
            f"model {name[:80]!r} is not served; there are: {', '.join(self.offered)}",
            "model_not_found",
            param="model",
        )

    def parent(self, name: str) -> str | None:
        """Return what clients call the model that an adapter of a name is beside; None: no adapter.

        Args:
            name: what clients call it.
        """
        model, adapter = self._split(self.offered.get(name, name))
        return self.public(model) if adapter else None

    def files_of(self, path: str) -> str:
        """Return the model whose files are loaded for a name, without its adapter."""
        return self._split(path)[0]

    def public(self, path: str) -> str:
        """Return what clients call a model."""
        return self._names.get(path, path)

    def context(self, path: str) -> tuple[int, int | None] | None:
        """(the longest conversation that a model takes here, what it was made for), in tokens.

        None: it was never loaded, and its files do not say. May read these: not for an event loop.
        """
        path = self._split(path)[0]
        if path not in self._contexts and self._context_of is not None:
            with contextlib.suppress(KVCellarError):
                self._contexts.setdefault(path, self._context_of(path))
        return self._contexts.get(path)

    def longest_prompt(self) -> tuple[int, int] | None:
        """(the most bytes of text that any model can take, the context of that model).

        None: one of them was never loaded, so nobody knows, or one reads pictures, too.
        """
        known = {self._split(path)[0] for path in self._states}
        if self._sees or self._longest_tokens.keys() != known:
            return None
        found = {path: self._contexts[path][0] for path in self._longest_tokens}
        return max((n * self._longest_tokens[path], n) for path, n in found.items())

    def states(self) -> list[ModelState]:
        """Return the states of all models."""
        loaded = {host.name: host for host in self.hosts()}
        with self._lock:
            for path, state in self._states.items():
                host = loaded.get(self._split(path)[0])
                if state.state == "leaving" and host is None:
                    self._states[path] = ModelState(state.name, "absent", time.time())
                elif state.state == "ready" and host is not None and host.service.failure:
                    reason = str(as_api_error(host.service.failure))
                    self._states[path] = ModelState(state.name, "failed", time.time(), reason)
            return [
                _with_long_step(state, loaded.get(self._split(path)[0]))
                for path, state in self._states.items()
            ]

    @property
    def swapping(self) -> bool:
        """True while a model is on its way in or out."""
        return any(state.state in ("loading", "leaving") for state in self.states())

    def hosts(self) -> list[ModelHost]:
        """Return the hosts that are in memory."""
        found = [self.registry.host(name) for name in self.registry.names]
        return [host for host in found if host is not None]

    def _open(self, path: str) -> ModelHost:
        if path not in self._names:
            raise ApiError(
                404,
                f"model {path[:80]!r} is not served here; an agent that was made with it needs a "
                f"server that was started with it",
                "model_not_found",
            )
        self._set(path, "loading")
        try:
            host = self._load(
                path, lambda part, what: self._set(path, "loading", what, min(1.0, part))
            )
        except Exception as error:
            self._set(path, "failed", str(error))
            raise
        host.called(path)
        self._contexts[path] = host.context, host.max_positions
        self._sees |= host.reads_pictures
        if host.tokenizer is not None:
            self._longest_tokens[path] = longest_token(host.tokenizer)
        self.n_loads += 1
        # A loaded model is half a million objects, and a full collection that walks over them holds
        # all streams for a quarter of a second. They stay, so it need not.
        gc.collect()
        gc.freeze()
        self._set(path, "ready")
        return host

    def _leave(self, host: ModelHost) -> None:
        gc.unfreeze()  # what of it refers to itself can be collected
        self._set(host.name, "leaving")

    def _left(self) -> None:
        """Collect what is left of a model, and let the others be passed over again."""
        gc.collect()
        if self.registry.names:
            gc.freeze()

    def _set(self, path: str, state: str, detail: str = "", fraction: float = 0.0) -> None:
        for offered, name in self._names.items():
            if offered != path and self._split(offered)[0] != path:
                continue
            with self._lock:
                before = self._states[offered]
                since = before.since_s if before.state == state else time.time()
                self._states[offered] = ModelState(name, state, since, detail, fraction)

    def as_json(self) -> list[dict[str, Any]]:
        """Return each model's state as ``/health`` tells it."""
        return [
            {
                "name": state.name,
                "state": state.state,
                "since_s": round(state.since_s, 3),
                "detail": state.detail,
                "fraction": round(state.fraction, 3),
            }
            for state in self.states()
        ]


def _with_long_step(state: ModelState, host: ModelHost | None) -> ModelState:
    """Return a state that says it where the engine has computed one step for long."""
    if state.state != "ready" or host is None or host.service.step_s < LONG_STEP_S:
        return state
    return replace(
        state, detail=f"its engine has computed one step for {host.service.step_s:.0f} s"
    )
