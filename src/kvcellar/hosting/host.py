"""A model in memory with the engine that runs it: opened by options, closed as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kvcellar.budget import MemoryBudget, format_size
from kvcellar.cache_config import CacheConfig, make_config
from kvcellar.engine import Engine, EngineConfig, EngineService
from kvcellar.engine.embedding import Embedder
from kvcellar.engine.picture_rows import PictureRows
from kvcellar.engine.speculate import (
    Drafter,
    DraftModel,
    Eagle3Drafter,
    FeatureReader,
    NgramDrafter,
)
from kvcellar.errors import ConfigError
from kvcellar.home import default_home
from kvcellar.hosting.conversation import AgentTokenizer
from kvcellar.hosting.costs import Costs
from kvcellar.hosting.fair_lock import Gate
from kvcellar.hosting.memory import NGRAM, Capacity, budgets_of_host, choose_capacity, head_of
from kvcellar.hosting.pictures import HostLooks
from kvcellar.hosting.templates import TemplateReport, check_template
from kvcellar.models import LoadedModel, LoadOptions, check_model, load_model
from kvcellar.models.adapter_names import adapted
from kvcellar.models.eagle3.finding import size_eagle3
from kvcellar.models.files.pooling import Pooling, pooling_of
from kvcellar.models.model import loader_of
from kvcellar.models.options import CACHES, ProgressFn, no_progress
from kvcellar.models.runner import rope_border_of
from kvcellar.models.sizes.sizing import size_model
from kvcellar.models.sizes.snapshots import slots_bytes, what_resumes
from kvcellar.models.text.rendering import prepare_renderer
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.registry import make_tree_session
from kvcellar.sight import FULL
from kvcellar.space import LONG, SHARED, Space
from kvcellar.store import ModelKey, RowLayout

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
        space: of all its histories in the engine's cache.
        embedder: makes vectors of texts with the same weights; None: nobody does.
        pooling: how these vectors are pooled where a request does not say.
        shelf: pictures by name, whoever sent them.
        looks: what the model makes of them; None: it reads text alone.
        no_pictures: why it does, where one might think otherwise; else empty.
        adapters: the same model with each of its adapters, by the adapter's name: hosts with a name
            and key of their own and this one's engine.
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
    space: Space = SHARED
    embedder: Embedder | None = None
    pooling: Pooling = "mean"
    shelf: PictureShelf = field(default_factory=PictureShelf)
    looks: HostLooks | None = None
    no_pictures: str = ""
    adapters: Mapping[str, ModelHost] = field(default_factory=dict)
    _on_close: ExitStack = field(default_factory=ExitStack)

    @property
    def resumes(self) -> str:
        """From where conversations go on, for people; empty where that is from everywhere."""
        return what_resumes(self.engine.cache.config, self.engine.config.max_num_seqs)

    @property
    def reads_pictures(self) -> bool:
        """True if pictures in messages are read; else the model is told in a line of each."""
        return self.looks is not None

    def take_shelf(self, shelf: PictureShelf) -> None:
        """Find pictures on another shelf from now on, and with each adapter too."""
        for host in (self, *self.adapters.values()):
            host.shelf = shelf
            if host.looks is not None:
                host.looks.shelf = shelf
                shelf.most_bytes = max(shelf.most_bytes, host.looks.room)

    @property
    def context(self) -> int:
        """The longest conversation that it can read, in tokens.

        The least of what the model was made for and of what its cache can hold of one sequence.
        What a tokenizer says of lengths is not asked: many say nothing, or 10^30.
        """
        capacity = self.engine.cache.capacity
        return capacity if self.max_positions is None else min(self.max_positions, capacity)

    def isolated(self, salt: str) -> ModelHost:
        """Return the same model for those who share a salt: their K and V are their own."""
        if salt == self.space.salt:
            return self
        space = self.space._replace(salt=salt)
        return replace(self, key=self.key.salted(salt), space=space)

    def reading(self, n_tokens: int) -> ModelHost:
        """Return the same model as it reads texts of so many tokens, from their first one on.

        Beyond the length that RoPE of some kinds was made for their K and V are others.
        """
        if not 0 < rope_border_of(self.engine.runner) < n_tokens:
            return self
        key = self.key.for_length(n_tokens)
        return replace(self, key=key, space=self.space._replace(rope=LONG))

    async def between_steps(self, function: Callable[[Engine], T]) -> T:
        """Call a function in the engine's thread, between two steps.

        Raises:
            EngineClosedError: the engine has stopped.
        """
        return await asyncio.wrap_future(self.service.run(function))

    def prepare(self, report: ProgressFn) -> None:
        """Have what the first requests need be compiled and recorded, and wait for it.

        Args:
            report: called in the engine's thread with how much is done, 0 to 1, and what comes now.

        Raises:
            EngineClosedError: the engine has stopped.
        """
        self.service.run(lambda engine: engine.prepare(report)).result()

    def called(self, name: str) -> None:
        """Take another name, and have it with each adapter take one that follows from it."""
        self.name = name
        for adapter, host in self.adapters.items():
            host.name = adapted(name, adapter)

    def close(self) -> None:
        """End its engine and let go of its cache and weights. May be called twice."""
        self.service.close()
        self._on_close.close()


def open_host(
    model: str | Path | LoadOptions,
    /,
    *,
    config: EngineConfig | None = None,
    progress: ProgressFn | None = None,
    **settings: Any,
) -> ModelHost:
    """Load a model and start an engine for it.

    Args:
        model: options, or the model alone.
        config: policy of the engine.
        progress: called while loading and hashing.
        settings: fields of ``LoadOptions``, in place of the options' own.

    Raises:
        ModelError, BackendError, ConfigError: as ``load_model``, or ``memory_bytes`` do not hold
            the model; nothing is left loaded.
        StoreError: its files cannot be hashed.
    """
    options = LoadOptions.of(model, **settings)
    _check_cache(options)
    report = progress or no_progress
    chosen = None
    budgets: tuple[MemoryBudget | None, MemoryBudget | None] = None, None
    if options.memory_bytes is not None:
        chosen = choose_capacity(options, config)
        budgets = budgets_of_host(replace(options, capacity=chosen.cells), config)
    prepare_renderer()  # it takes as long to begin as a small model to load
    loaded = load_model(
        options, progress=lambda part, what: report(0.8 * part, f"{options.name}: {what}")
    )
    chosen = chosen or choose_capacity(options, config)  # loading says what is wrong with a model
    n_running = (config or EngineConfig()).max_num_seqs
    cache_config = options.config_for(loaded.params, chosen.cells, budgets[0], n_running)
    fingerprint = loaded.fingerprint(
        cache_file=default_home() / "fingerprints.json",
        on_progress=lambda part, what: report(0.8 + 0.2 * part, f"{options.name}: {what}"),
        rope_length=loaded.rope_length_for(cache_config),
    )
    layout = RowLayout.from_config(cache_config)
    of_states = slots_bytes(loaded.params, cache_config.n_slots)
    cache_bytes = layout.rows_bytes(cache_config.capacity) + of_states
    with ExitStack() as stack:
        shelf = PictureShelf()
        looks = None if loaded.pictures is None else HostLooks(loaded.pictures, shelf)
        rows = None if looks is None else PictureRows(looks.encode, looks.room)
        if rows is not None:
            stack.callback(rows.close)
        engine = _start_engine(options, loaded, cache_config, budgets[1], config, rows, stack)
        has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
        service = EngineService(engine)
        if looks is not None:
            looks.alone = lambda load: service.run(lambda _: load()).result()
        border = rope_border_of(engine.runner)

        def key_of(of_kv: str) -> ModelKey:
            key = ModelKey(of_kv, layout)
            return key.turning(border) if border else key

        host = ModelHost(
            name=options.name,
            engine=engine,
            service=service,
            tokenizer=loaded.tokenizer,
            key=key_of(fingerprint.of_kv),
            eos_token_ids=loaded.eos_token_ids,
            size_bytes=options.memory_bytes or loaded.size_bytes + cache_bytes,
            max_positions=loaded.max_positions,
            sampling=loaded.sampling,
            weights=loaded.held_as,
            capacity=_granted(chosen, engine.cache.capacity, options.memory_bytes),
            template=check_template(loaded.tokenizer) if has_template else None,
            embedder=Embedder(service, int(loaded.config.hidden_size)),
            pooling=pooling_of(loaded.path),
            shelf=shelf,
            looks=looks,
            no_pictures=loaded.no_pictures,
            _on_close=stack.pop_all(),
        )
    host.adapters = {
        name: replace(
            host,
            name=adapted(host.name, name),
            key=key_of(fingerprint.adapted(one.digest).of_kv),
            space=Space(name),
            embedder=Embedder(service, int(loaded.config.hidden_size), name),
            _on_close=ExitStack(),
        )
        for name, one in loaded.adapters.items()
    }
    return host


def _start_engine(
    options: LoadOptions,
    model: LoadedModel,
    cache_config: CacheConfig,
    draft_budget: MemoryBudget | None,
    config: EngineConfig | None,
    rows: PictureRows | None,
    stack: ExitStack,
) -> Engine:
    """Open the sessions of a model and of whoever guesses for it, and make an engine for them."""
    has_trees = options.cache == "cells" and options.speculate is not None
    make_session = CACHES["tree" if has_trees else options.cache]
    session = stack.enter_context(make_session(model.backend, cache_config))
    drafter = _make_drafter(options, model, cache_config, draft_budget, stack)
    layers = drafter.feature_layers if isinstance(drafter, FeatureReader) else ()
    return Engine(
        model.bind(session, feature_layers=layers),
        session.cache,
        model.tokenizer,
        eos_token_ids=model.eos_token_ids,
        config=config,
        rows=rows,
        drafter=drafter,
        max_positions=model.max_positions,
    )


def _granted(chosen: Capacity, cells: int, memory_bytes: int | None) -> Capacity:
    """Return the capacity that a cache has, which a budget may have made smaller."""
    if memory_bytes is None or cells >= chosen.cells:
        return chosen
    return Capacity(cells, f"what {format_size(memory_bytes)} allow of {chosen.cells}")


def check_host(options: LoadOptions, config: EngineConfig | None = None) -> None:
    """Find what would keep a host from being opened, as far as files, packages and devices tell.

    No weight is read, and nothing is left open. Of a model on the Hugging Face hub that is not here
    yet only the config is downloaded and checked.

    Raises:
        ModelError, BackendError, ConfigError: as ``open_host``.
    """
    _check_cache(options)
    check_model(options)
    spec = size_model(options)
    cells = spec.max_positions if options.capacity is None else options.capacity
    config = config or EngineConfig()
    cache_config = options.config_for(spec.params, cells, n_running=config.max_num_seqs)
    block_size = cache_config.block_size if options.cache == "paged" else 1
    config.make_index((FULL,), block_size)
    if options.memory_bytes is not None:
        chosen = choose_capacity(options, config)
        budgets_of_host(replace(options, capacity=chosen.cells), config)
    if options.speculate in (None, NGRAM):
        return
    assert options.speculate is not None
    head = head_of(options.speculate)
    if head is None:
        check_model(_guessing(options))
    else:
        size_eagle3(head or None, options.model, dtype=spec.dtype)


def _guessing(options: LoadOptions) -> LoadOptions:
    """Return options of the smaller model that guesses, which one process has whole."""
    weights = options.weights if options.tp == 1 else None
    return replace(options, model=str(options.speculate), weights=weights, tp=1, speculate=None)


def _check_cache(options: LoadOptions) -> None:
    """Refuse a cache for one sequence: an engine runs many.

    Raises:
        ConfigError: it is one.
    """
    if options.cache == "contiguous":
        raise ConfigError(
            "a contiguous cache holds one sequence, and an engine runs many; choose cells or paged"
        )


def _make_drafter(
    options: LoadOptions,
    target: LoadedModel,
    config: CacheConfig,
    budget: MemoryBudget | None,
    stack: ExitStack,
) -> Drafter | None:
    """Make whoever guesses: nobody, n-grams, or a head or a smaller model with its own cache.

    Where memory is limited n-grams are remembered of no more tokens than the cache has cells, and
    of as many that have ended.

    Raises:
        ConfigError: its vocabulary is another one, or the head is another model's.
        ModelError: there is no such head or model.
    """
    name = options.speculate
    if name is None:
        return None
    if name == NGRAM:
        return NgramDrafter() if config.budget is None else NgramDrafter(max_tokens=config.capacity)
    path = head_of(name)
    if path is not None:
        torch_loader: Any = loader_of("torch")  # the backend that has such heads
        head = torch_loader.load_eagle3(path or None, target)
        own = make_config(head.params, config.capacity, budget=budget)
        session = stack.enter_context(make_tree_session("torch", own))
        return Eagle3Drafter(head.bind(session), session.cache)
    asked = replace(_guessing(options), kv_dtype=None, chat_template=None, adapters={})
    model = load_model(asked)
    if target.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise ConfigError(
            f"{name!r} cannot draft for {target.name!r}: their vocabularies differ; choose a model "
            f"of the same family"
        )
    own = make_config(model.params, config.capacity, budget=budget)
    session = stack.enter_context(make_tree_session(model.backend, own))
    return DraftModel(model.bind(session), session.cache, target.vocab_size)
