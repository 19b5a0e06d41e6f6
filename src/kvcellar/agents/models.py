"""Models in memory: loaded when an agent needs them, unloaded when idle or for want of room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvcellar.agents.conversation import AgentTokenizer
from kvcellar.agents.costs import Costs
from kvcellar.agents.gate import Gate
from kvcellar.agents.memory import NGRAM, Capacity, budgets_of_host, choose_capacity, head_of
from kvcellar.agents.templates import TemplateReport, check_template
from kvcellar.budget import MemoryBudget, format_size
from kvcellar.engine import Engine, EngineConfig, EngineService
from kvcellar.engine.speculate import (
    Drafter,
    DraftModel,
    Eagle3Drafter,
    FeatureReader,
    NgramDrafter,
)
from kvcellar.errors import ConfigError
from kvcellar.home import default_home
from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.models import LoadedModel, check_model, load_model
from kvcellar.models.eagle3.finding import size_eagle3
from kvcellar.models.loading import ProgressFn
from kvcellar.models.rendering import prepare_renderer
from kvcellar.models.sizing import size_model
from kvcellar.registry import CacheSession, make_paged_session, make_seq_session, make_tree_session
from kvcellar.store import Layout, ModelKey
from kvcellar.types import CacheConfig, make_config

__all__ = ["ModelHost", "ModelRegistry", "check_host", "open_host"]

log = logging.getLogger("kvcellar.agents")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ModelHost:
    """A model in memory, the engine that runs it, and what the store knows it by.

    Attributes:
        name: what it was asked for by.
        engine: only to be used between its steps: through ``service``.
        service: the engine's thread.
        tokenizer: None for models that take tokens alone.
        key: whose KV it computes, in the store.
        eos_token_ids: tokens with which it ends an answer.
        size_bytes: weights and the most that its cache may hold; 0 where nobody counts.
        max_positions: the longest sequence that the model was made for; None: not known.
        sampling: the model's own settings of sampling, as ``LoadedModel`` has them.
        weights: how it holds them, for people.
        capacity: how many cells its cache may have and why; None: not known.
        costs: what restoring and recomputing take here.
        template: what its chat template does to old turns; None without one.
        restoring: one restore at a time: the second of two forks finds what the first brought.
    """

    name: str
    engine: Engine
    service: EngineService
    tokenizer: AgentTokenizer | None
    key: ModelKey
    eos_token_ids: frozenset[int] = frozenset()
    size_bytes: int = 0
    max_positions: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    weights: str = ""
    capacity: Capacity | None = None
    costs: Costs = field(default_factory=Costs)
    template: TemplateReport | None = None
    restoring: Gate = field(default_factory=Gate)
    _on_close: ExitStack = field(default_factory=ExitStack)

    @property
    def context(self) -> int:
        """The longest conversation that it can read, in tokens.

        The least of what the model was made for and of what its cache can hold of one sequence.
        What a tokenizer says of lengths is not asked: many say nothing, or 10^30.
        """
        capacity = self.engine.cache.capacity
        return capacity if self.max_positions is None else min(self.max_positions, capacity)

    async def between_steps(self, function: Callable[[Engine], T]) -> T:
        """Call a function in the engine's thread, between two steps.

        Raises:
            EngineClosedError: the engine has stopped.
        """
        return await asyncio.wrap_future(self.service.run(function))

    def close(self) -> None:
        """End its engine and let go of its cache and weights. May be called twice."""
        self.service.close()
        self._on_close.close()


def open_host(
    name: str,
    *,
    capacity: int | None = None,
    kv_dtype: str | None = None,
    backend: str = "torch",
    dtype: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    config: EngineConfig | None = None,
    memory_bytes: int | None = None,
    block_size: int = 1,
    speculate: str | None = None,
    chat_template: str | None = None,
    progress: ProgressFn | None = None,
) -> ModelHost:
    """Load a model and start an engine for it.

    Args:
        name: as ``load_model`` takes it.
        capacity: cells of its cache, of all conversations together; one may have as many as the
            model has positions. None: the model's context where memory allows it, else what memory
            allows.
        kv_dtype: how K and V are stored; None: as the weights.
        backend: who runs it.
        dtype: type of the weights in memory.
        weights: how linear layers hold theirs, as ``load_model`` takes it.
        device: where it runs.
        config: policy of the engine.
        memory_bytes: what it may hold: weights, forwards and KV; None: its KV grows up to the
            capacity. On CPUs only.
        block_size: cells that are shared and freed together; above 1 its cache is of pages.
        speculate: who guesses tokens that are verified where that saves time: ``ngram`` (what
            followed before), ``eagle3:PATH`` (a head that reads the model's own layers; the
            bundled model brings one: ``eagle3``), or a smaller model of the same vocabulary, as
            ``load_model`` takes it; None: nobody.
        chat_template: text of a template in place of the checkpoint's own.
        progress: called while loading and hashing.

    Raises:
        ModelError, BackendError, ConfigError: as ``load_model``, or ``memory_bytes`` do not hold
            the model; nothing is left loaded.
        StoreError: its files cannot be hashed.
    """
    report = progress or (lambda fraction, what: None)

    def choose() -> Capacity:
        if capacity is not None:
            return Capacity(capacity, "as asked")
        return choose_capacity(
            name,
            memory_bytes,
            kv_dtype=kv_dtype,
            dtype=dtype,
            weights=weights,
            config=config,
            speculate=speculate,
            backend=backend,
            device=device,
        )

    chosen = None
    budget = draft_budget = None
    if memory_bytes is not None:
        chosen = choose()
        budget, draft_budget = budgets_of_host(
            name,
            memory_bytes,
            capacity=chosen.cells,
            kv_dtype=kv_dtype,
            dtype=dtype,
            weights=weights,
            config=config,
            speculate=speculate,
            backend=backend,
        )
    prepare_renderer()  # it takes as long to begin as a small model to load
    model = load_model(
        name,
        backend=backend,
        dtype=dtype,
        weights=weights,
        device=device,
        chat_template=chat_template,
        progress=lambda part, what: report(0.8 * part, f"{name}: {what}"),
    )
    chosen = chosen or choose()  # what is wrong with a model is said by loading it
    fingerprint = model.fingerprint(
        cache_file=default_home() / "fingerprints.json",
        on_progress=lambda part, what: report(0.8 + 0.2 * part, f"{name}: {what}"),
    )
    cache_config = make_config(
        model.params,
        chosen.cells,
        kv_dtype or (model.dtype if model.dtype in FLOAT_KV_DTYPES else "float32"),
        budget=budget,
        block_size=block_size,
    )
    layout = Layout.from_config(cache_config)
    with ExitStack() as stack:
        make_session: Callable[[str, CacheConfig], CacheSession[Any]] = make_seq_session
        if block_size > 1:
            make_session = make_paged_session
        elif speculate is not None:
            make_session = make_tree_session
        session = stack.enter_context(make_session(backend, cache_config))
        drafter = _make_drafter(
            speculate, model, cache_config, draft_budget, backend, dtype, weights, device, stack
        )
        layers = drafter.feature_layers if isinstance(drafter, FeatureReader) else ()
        runner = model.bind(session, feature_layers=layers)
        engine = Engine(
            runner,
            session.cache,
            model.tokenizer,
            eos_token_ids=model.eos_token_ids,
            config=config,
            drafter=drafter,
            max_positions=model.max_positions,
        )
        cells = session.cache.capacity
        if memory_bytes is not None and cells < chosen.cells:
            allowed = f"what {format_size(memory_bytes)} allow of {chosen.cells}"
            chosen = Capacity(cells, allowed)
        template = None
        if getattr(model.tokenizer, "chat_template", None):
            template = check_template(model.tokenizer)
        return ModelHost(
            name=name,
            engine=engine,
            service=EngineService(engine),
            tokenizer=model.tokenizer,
            key=ModelKey(fingerprint.of_kv, layout),
            eos_token_ids=model.eos_token_ids,
            size_bytes=memory_bytes or model.size_bytes + layout.rows_bytes(cache_config.capacity),
            max_positions=model.max_positions,
            sampling=model.sampling,
            weights=model.weights or model.dtype,
            capacity=chosen,
            template=template,
            _on_close=stack.pop_all(),
        )


def check_host(
    name: str,
    *,
    capacity: int | None = None,
    kv_dtype: str | None = None,
    backend: str = "torch",
    dtype: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    config: EngineConfig | None = None,
    memory_bytes: int | None = None,
    block_size: int = 1,
    speculate: str | None = None,
) -> None:
    """Find what would keep a host from being opened, as far as files, packages and devices tell.

    Takes what ``open_host`` takes. No weight is read, and nothing is left open. Of a model on the
    Hugging Face hub that is not here yet only the config is downloaded and checked.

    Raises:
        ModelError, BackendError, ConfigError: as ``open_host``.
    """
    loading: dict[str, Any] = {
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "device": device,
    }
    check_model(name, **loading)
    spec = size_model(name, backend=backend, dtype=dtype, weights=weights)
    cells = spec.max_positions if capacity is None else capacity
    make_config(spec.params, cells, kv_dtype or "float32", block_size=block_size)
    if memory_bytes is not None:
        budgets_of_host(
            name,
            memory_bytes,
            capacity=capacity,
            kv_dtype=kv_dtype,
            dtype=dtype,
            weights=weights,
            config=config,
            speculate=speculate,
            backend=backend,
        )
    if speculate in (None, NGRAM):
        return
    assert speculate is not None
    head = head_of(speculate)
    if head is None:
        check_model(speculate, **loading)
    else:
        size_eagle3(head or None, name, dtype=spec.dtype)


def _make_drafter(
    name: str | None,
    target: LoadedModel,
    config: CacheConfig,
    budget: MemoryBudget | None,
    backend: str,
    dtype: str | None,
    weights: str | None,
    device: str | None,
    stack: ExitStack,
) -> Drafter | None:
    """Who guesses: nobody, n-grams, or a head or a smaller model with a cache of its own.

    Where memory is limited n-grams are remembered of no more tokens than the cache has cells, and
    of as many that have ended.

    Raises:
        ConfigError: its vocabulary is another one, or the head is another model's.
        ModelError: there is no such head or model.
    """
    if name is None:
        return None
    if name == NGRAM:
        return NgramDrafter() if config.budget is None else NgramDrafter(max_tokens=config.capacity)
    path = head_of(name)
    if path is not None:
        from kvcellar.backends.torch.eagle3.loading import load_eagle3

        head = load_eagle3(path or None, target)
        own = make_config(head.params, config.capacity, head.kv_dtype, budget=budget)
        session = stack.enter_context(make_tree_session("torch", own))
        return Eagle3Drafter(head.bind(session), session.cache)
    model = load_model(name, backend=backend, dtype=dtype, weights=weights, device=device)
    if target.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise ConfigError(
            f"{name!r} cannot draft for {target.name!r}: their vocabularies differ; choose a model "
            f"of the same family"
        )
    kv_dtype = model.dtype if model.dtype in FLOAT_KV_DTYPES else "float32"
    own = make_config(model.params, config.capacity, kv_dtype, budget=budget)
    session = stack.enter_context(make_tree_session(backend, own))
    return DraftModel(model.bind(session), session.cache, target.vocab_size)


@dataclass(slots=True, eq=False)
class _Loaded:
    host: ModelHost
    n_users: int = 0
    used_s: float = 0.0


class ModelRegistry:
    """Which models are in memory. For callers on any event loop and thread.

    A model is loaded when somebody uses it. Where a budget has no room for it, idle models go, the
    least recently used first; where none is idle, it waits for one. Before a model goes, whoever
    has something in its cache is told.
    """

    def __init__(
        self,
        load: Callable[[str], ModelHost] = open_host,
        *,
        budget_bytes: int | None = None,
        idle_ttl_s: float | None = None,
        size_of: Callable[[str], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing loaded.

        Args:
            load: from a name to a running host; called in a thread of its own.
            budget_bytes: what all hosts together may hold; None: no limit.
            idle_ttl_s: seconds without use after which a model goes; None: never.
            size_of: bytes of a model before it is loaded; None: what it had when it was loaded
                last, or nothing.
            clock: seconds.
        """
        if idle_ttl_s is not None and not idle_ttl_s > 0:
            raise ConfigError(f"idle_ttl_s must be above 0 seconds, got {idle_ttl_s}")
        self._load = load
        self._budget_bytes = budget_bytes
        self._idle_ttl_s = idle_ttl_s
        self._size_of = size_of
        self._clock = clock
        self._loaded: dict[str, _Loaded] = {}
        self._sizes: dict[str, int] = {}
        self._before_unload: list[Callable[[ModelHost], None]] = []
        self._gate = Gate()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sweeper: threading.Thread | None = None
        if idle_ttl_s is not None:
            self._sweeper = threading.Thread(
                target=self._sweep, args=(idle_ttl_s,), name="kvcellar-models", daemon=True
            )
            self._sweeper.start()

    def before_unload(self, call: Callable[[ModelHost], None]) -> None:
        """Have a function called with each host that is about to go, while it still runs."""
        self._before_unload.append(call)

    @property
    def names(self) -> list[str]:
        """The models that are in memory."""
        with self._lock:
            return list(self._loaded)

    def host(self, name: str) -> ModelHost | None:
        """The host of a model that is in memory; None where it is not. Loads nothing."""
        with self._lock:
            entry = self._loaded.get(name)
            return entry.host if entry else None

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ModelHost]:
        """The host of a model, loaded if need be; it stays while the block lasts.

        Raises:
            ModelError, BackendError, ConfigError: from loading; nothing was loaded.
            ConfigError: the budget cannot hold it even alone; nothing was unloaded.
        """
        entry = await self._enter(name)
        try:
            yield entry.host
        finally:
            with self._lock:
                entry.n_users -= 1
                entry.used_s = self._clock()

    async def unload(self, name: str) -> bool:
        """Let go of a model; false where it is not in memory or somebody uses it."""
        async with self._gate:
            return await asyncio.to_thread(self._unload, name)

    def close(self) -> None:
        """Let go of all models, used or not, and of the thread that looks for idle ones."""
        self._stop.set()
        if self._sweeper is not None:
            self._sweeper.join()
        for name in self.names:
            self._unload(name, is_forced=True)

    async def _enter(self, name: str) -> _Loaded:
        with self._lock:
            entry = self._loaded.get(name)
            if entry is not None:
                entry.n_users += 1
                return entry
        async with self._gate:
            with self._lock:
                entry = self._loaded.get(name)
                if entry is not None:
                    entry.n_users += 1
                    return entry
            await self._make_room(name)
            host = await asyncio.to_thread(self._load, name)
            entry = _Loaded(host, 1, self._clock())
            with self._lock:
                self._loaded[name] = entry
                self._sizes[name] = host.size_bytes
            return entry

    async def _make_room(self, name: str) -> None:
        if self._budget_bytes is None:
            return
        size = self._size_of(name) if self._size_of else self._sizes.get(name, 0)
        if size > self._budget_bytes:
            raise ConfigError(
                f"model {name!r} needs {format_size(size)} and all models together may hold "
                f"{format_size(self._budget_bytes)}; give more, or a smaller capacity"
            )
        while True:
            with self._lock:
                held = sum(entry.host.size_bytes for entry in self._loaded.values())
                idle = [(e.used_s, n) for n, e in self._loaded.items() if not e.n_users]
            if held + size <= self._budget_bytes:
                return
            if idle:
                await asyncio.to_thread(self._unload, min(idle)[1])
            else:
                await asyncio.sleep(0.02)

    def _unload(self, name: str, *, is_forced: bool = False, idle_since: float = 0.0) -> bool:
        with self._lock:
            entry = self._loaded.get(name)
            if entry is None or (entry.n_users and not is_forced):
                return False
            if idle_since and entry.used_s > idle_since:
                return False
            del self._loaded[name]
        for call in self._before_unload:
            with contextlib.suppress(Exception):  # a store that is full must not keep it here
                call(entry.host)
        entry.host.close()
        return True

    def _sweep(self, ttl_s: float) -> None:
        while not self._stop.wait(min(ttl_s / 4, 10.0)):
            since = self._clock() - ttl_s
            for name in self.names:
                try:
                    self._unload(name, idle_since=max(since, 1e-9))
                except Exception as error:  # the others are looked after all the same
                    log.error("model %r could not be let go of", name, exc_info=error)


def model_notes(host: ModelHost) -> tuple[str, ...]:
    """What a user of a model should know when it is loaded."""
    if host.template is None or host.template.is_prefix_stable:
        return ()
    return tuple(f"chat template of {host.name!r}: {found}" for found in host.template.findings)
