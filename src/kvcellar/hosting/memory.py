"""One process, one limit: how its models, and the RAM of its store, share what it may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcellar.bookkeeping.cells.exact import exact_bytes
from kvcellar.bookkeeping.cells.growth import ARRAY_BYTES, INDEX_BYTES, STEP_TOKENS
from kvcellar.bookkeeping.cells.pool import MIN_RUN
from kvcellar.budget import MemoryBudget, format_size, machine_bytes, round_up
from kvcellar.cache_config import MIN_CHUNK
from kvcellar.engine.config import EngineConfig
from kvcellar.errors import ConfigError, KVCellarError
from kvcellar.kv_dtype import KvDtype, parse_kv_dtype
from kvcellar.models.adapters import adapters_bytes
from kvcellar.models.backend_choice import NATIVE, choose_backend
from kvcellar.models.eagle3.finding import size_eagle3
from kvcellar.models.loading import accelerator_memory
from kvcellar.models.model import DeviceMemory
from kvcellar.models.options import LoadOptions
from kvcellar.models.sizes.sizing import size_model
from kvcellar.models.sizes.snapshots import SHARE, slots_bytes, slots_for
from kvcellar.spec import NATIVE_PROCESS_BYTES, PROCESS_BYTES, ModelCacheSpec, most
from kvcellar.store import BLOCK_TOKENS
from kvcellar.store.config import GIB

NGRAM = "ngram"
"""As a drafter: what followed before, without a model."""

EAGLE3 = "eagle3"
"""As a drafter: a head that reads the model's own layers; ``eagle3:PATH`` names another one."""

NGRAM_BYTES = 512
"""About what a token takes that n-grams are remembered of: an entry per length, and itself."""

CARD_WORKSPACE = 128 << 20
"""Bytes that a card's libraries, the parts of split attention, and weights in few bits that are
unpacked for a product take beside a forward's own."""

SAMPLING_BYTES, SAMPLED_ROWS = 13, 64
"""Bytes that sampling on a card takes more of each logit, of so many rows at a time."""

IN_FLIGHT = 8
"""Blocks of a restore that are read ahead of the engine."""

MACHINE_SHARE = 8
"""One part in so many of a machine's memory is left to others where no limit is given."""

SHARED_CONTEXT = 8192
"""Tokens below which models that are offered together rather take turns than share memory."""

STORE_SHARE = 16
"""The store's RAM, and its queue of writes, each take one part in so many, or less."""


MEASURED_SHARE = 16
"""A limit is advised for one part in so many more than the process was measured to hold: the
measure differs from run to run."""


def _store_part(models_bytes: int) -> int:
    """Return what the store has each for its two uses where models have so many bytes."""
    return min(GIB, models_bytes // (STORE_SHARE - 2) + 1)


def process_bytes_of(models: Sequence[LoadOptions]) -> int:
    """Estimate what a process holds without models: less where native runs all that there are.

    Args:
        models: options of all that will be loaded; none: they are not known.
    """
    if models and all(_is_native(options) for options in models):
        return NATIVE_PROCESS_BYTES
    return PROCESS_BYTES


def _is_native(options: LoadOptions) -> bool:
    try:
        return choose_backend(options).backend == NATIVE
    except KVCellarError:  # whoever loads it says it
        return False


def least_cells(capacity: int) -> int:
    """Return the fewest cells that a cache of so many at most is opened with."""
    return min(capacity, MIN_CHUNK)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a process that runs agents, in main memory or on a card.

    Attributes:
        limit_bytes: of the whole process.
        process_bytes: what it holds without any model.
        warm_bytes: for the store's blocks in RAM.
        queue_bytes: for what waits to be written.
        is_of_card: true if the first two are of a card, where the store has nothing.
        is_measured: true if ``process_bytes`` is what one process held, not an estimate.
    """

    limit_bytes: int
    process_bytes: int
    warm_bytes: int
    queue_bytes: int
    is_of_card: bool = False
    is_measured: bool = False

    @classmethod
    def divide(
        cls, limit_bytes: int, process_bytes: int, *, is_measured: bool = False
    ) -> MemoryPlan:
        """Give the store its part; the rest, which may be nothing, is for models."""
        part = min(GIB, max(0, limit_bytes - process_bytes) // STORE_SHARE)
        return cls(limit_bytes, process_bytes, part, part, is_measured=is_measured)

    @classmethod
    def of_card(cls, limit_bytes: int, card: DeviceMemory) -> MemoryPlan:
        """Give models what a process may hold of a card; the store keeps its own in main memory.

        Raises:
            ConfigError: the card has less.
        """
        if limit_bytes > card.total_bytes:
            raise ConfigError(
                f"a memory budget of {format_size(limit_bytes)} is more than the card's "
                f"{format_size(card.total_bytes)}; give less, or leave it out"
            )
        return cls(limit_bytes, card.held_bytes, GIB, GIB, is_of_card=True, is_measured=True)

    @property
    def models_bytes(self) -> int:
        """For all models in memory together: weights, forwards and KV."""
        return max(0, self.limit_bytes - self.process_bytes - self.store_bytes)

    @property
    def store_bytes(self) -> int:
        """The store's part of the limit."""
        return 0 if self.is_of_card else self.warm_bytes + self.queue_bytes

    def size_of(self, options: LoadOptions, config: EngineConfig | None = None) -> int:
        """Return the bytes that a model is given: enough for its capacity, or all there is.

        Without a capacity it is enough for the model's context. Whoever guesses for the model is
        counted with it. Nothing is loaded.

        Raises:
            ConfigError: weights, forwards and the least KV take more, with what would do.
            ModelError: as ``size_model``.
        """
        context, sizes = _sizer(options, config)
        n_cells = least_cells(options.capacity or context)
        lack = self.lack_of(size_model(options), _sum_of(sizes(n_cells)), n_cells)
        if lack:
            raise ConfigError(lack)
        return min(self.models_bytes, _sum_of(sizes(options.capacity or context)))

    def lack_of(self, spec: ModelCacheSpec, least_bytes: int, n_cells: int) -> str:
        """Say that a model does not fit, and what would do; empty where it fits.

        Every command that is given a limit says no by this, and what it advises is enough.

        Args:
            spec: the model's costs.
            least_bytes: its weights, forwards and KV of ``n_cells`` tokens, all that is loaded
                with it included.
            n_cells: the fewest tokens that are worth loading it for.
        """
        if least_bytes <= self.models_bytes:
            return ""
        besides = least_bytes - spec.weight_bytes
        limit = self.limit_for(least_bytes)
        store = (
            "" if self.is_of_card else (f", the store {format_size(2 * _store_part(least_bytes))}")
        )
        of = " of the card" if self.is_of_card else ""
        return (
            f"a memory budget of {format_size(self.limit_bytes)} does not hold the model: its "
            f"weights are {format_size(spec.weight_bytes)} in {spec.held_in}, forwards and KV of "
            f"{n_cells} tokens take {format_size(besides)}{store}, and the process "
            f"{format_size(self.process_bytes)}{of} besides; give at least {round_up(limit)}, or "
            f"choose a smaller model"
        )

    def limit_for(self, models_bytes: int) -> int:
        """Return the limit of the whole process with which models have so many bytes.

        What the process holds is taken for somewhat more where it was measured: it is another
        number next time.
        """
        process = self.process_bytes
        if self.is_measured:
            process += process // MEASURED_SHARE
        if self.is_of_card:
            return process + models_bytes
        return process + models_bytes + 2 * _store_part(models_bytes)

    def shared_capacities(
        self, names: Sequence[str], options: LoadOptions, config: EngineConfig | None = None
    ) -> dict[str, int | None]:
        """Return the most cells for each of several models, so that all of them stay in memory.

        None: its whole context. Where not even ``SHARED_CONTEXT`` would fit, they have so many and
        take turns.

        Args:
            names: the models.
            options: how each of them is loaded.
            config: policy of each engine.

        Raises:
            ModelError: as ``size_model``.
        """
        sizers = [_sizer(replace(options, model=name), config) for name in names]

        def fits(capacity: int) -> bool:
            needs = sum(_sum_of(sizes(min(context, capacity))) for context, sizes in sizers)
            return needs <= self.models_bytes

        longest = max(context for context, _ in sizers)
        if len(names) == 1 or fits(longest):
            return dict.fromkeys(names)
        cells = max(_in_round_numbers(most(longest, fits)), SHARED_CONTEXT)
        both = zip(names, sizers, strict=True)
        return {name: min(context, cells) for name, (context, _) in both}


@dataclass(frozen=True, slots=True)
class _Size:
    """Bytes of one model: its weights, what it sets aside, and KV and states of so many tokens."""

    weight_bytes: int
    reserve_bytes: int
    kv_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Weights plus reserve; independent of what the cache holds."""
        return self.weight_bytes + self.reserve_bytes


def budgets_of_host(
    options: LoadOptions, config: EngineConfig | None = None
) -> tuple[MemoryBudget, MemoryBudget | None]:
    """Return the budgets of one host's cache, and of the cache of a model that guesses for it.

    A model's weights are its base, its forwards its reserve. What is left for KV is divided so that
    both caches hold the same tokens.

    Args:
        options: of the host, with ``memory_bytes``.
        config: policy of its engine.

    Raises:
        ConfigError: the weights and a forward alone take more, with the numbers.
    """
    limit_bytes = options.memory_bytes
    assert limit_bytes is not None, "a host without a limit has no budget"
    context, sizes = _sizer(options, config)
    size, *others = sizes(options.capacity or context)
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


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of cells that a cache is given, with the reason.

    Attributes:
        cells: tokens of all sequences together.
        why: the reason, for people.
    """

    cells: int
    why: str

    def __str__(self) -> str:
        """Return a note for people."""
        return f"capacity {self.cells} cells: {self.why}"


def choose_capacity(
    options: LoadOptions, config: EngineConfig | None = None, *, most_sequences: int = 1
) -> Capacity:
    """Return the capacity that is asked for, or else the model's context as far as memory allows.

    Pools grow as they are used, so cells that nobody needs cost nothing. Without ``memory_bytes``
    it is this machine's memory without what is left to others; an accelerator's is its own.

    Args:
        options: of the model.
        config: policy of the engine.
        most_sequences: of one context each.

    Raises:
        ConfigError: the snapshots that are asked for leave no memory for K and V.
        ModelError: as ``size_model``.
    """
    if options.capacity is not None and options.memory_bytes is None:
        return Capacity(options.capacity, "as asked")
    context, sizes = _sizer(options, config)
    whole = options.capacity or context * most_sequences
    has_budget = options.memory_bytes is not None
    if options.memory_bytes is not None:
        limit = of = options.memory_bytes
    else:
        own = accelerator_memory(options)
        of = machine_bytes() if own is None else own.total_bytes * options.tp
        process = 0 if own is not None else process_bytes_of([options])
        limit = of - of // MACHINE_SHARE - process
    cells = most(whole, lambda n: _sum_of(sizes(n, keeps_windows=has_budget)) <= limit)
    if options.snapshot_bytes is not None and cells < min(whole, MIN_CHUNK):
        _check_snapshots(options, limit - sum(size.fixed_bytes for size in sizes(MIN_CHUNK)))
    if options.capacity is not None:
        return _of_asked(max(cells, least_cells(whole)), whole, of)
    if cells == whole:
        times = "" if most_sequences == 1 else f", {most_sequences} times"
        return Capacity(whole, f"the model's context{times}")
    cells = max(_in_round_numbers(cells), min(whole, MIN_CHUNK))
    return Capacity(cells, f"what {format_size(of)} allow of the model's context of {context}")


def _of_asked(cells: int, asked: int, limit_bytes: int) -> Capacity:
    if cells == asked:
        return Capacity(cells, "as asked")
    return Capacity(cells, f"what {format_size(limit_bytes)} allow of {asked}")


def _check_snapshots(options: LoadOptions, left: int) -> None:
    """Refuse snapshots that take the memory of K and V; ``left`` bytes are for both.

    Raises:
        ConfigError: they do.
    """
    asked = options.snapshot_bytes
    if asked is None or size_model(options).params.state is None or not left > 0:
        return
    raise ConfigError(
        f"snapshots may take {format_size(asked)}, and {format_size(left)} are there for K, V and "
        f"snapshots together; ask for less, such as {format_size(left // SHARE)}, or leave it out"
    )


def planned_context(options: LoadOptions, config: EngineConfig | None = None) -> tuple[int, int]:
    """Return the longest conversation that a model will take, and what it was made for.

    Nothing is loaded.

    Raises:
        ModelError: as ``size_model``.
    """
    spec = size_model(options)
    cells = choose_capacity(options, config).cells
    return min(cells, spec.max_positions), spec.max_positions


def _in_round_numbers(cells: int) -> int:
    """Round a number of cells down to a multiple of 256, where it is not small."""
    return cells if cells < 1024 else cells - cells % 256


def parts_of(
    spec: ModelCacheSpec, n_cells: int, options: LoadOptions, *, keeps_windows: bool = False
) -> tuple[int, int]:
    """Return what a model takes besides its weights, with a cache of so many cells.

    What is set aside for forwards and restores, and KV with states: as ``MemoryPlan.size_of`` and,
    with ``keeps_windows``, ``choose_capacity`` count them.
    """
    config = EngineConfig()
    size = _size_of(spec, n_cells, options, config, config.max_num_seqs, keeps_windows)
    return size.reserve_bytes, size.kv_bytes


def _sum_of(sizes: Sequence[_Size]) -> int:
    return sum(size.fixed_bytes + size.kv_bytes for size in sizes)


def _sizer(
    options: LoadOptions, config: EngineConfig | None
) -> tuple[int, Callable[..., list[_Size]]]:
    """Return a model's context; and what it, and whoever guesses for it, take with n cells."""
    config = config or EngineConfig()
    speculate = options.speculate
    spec = size_model(options)
    n_rows = config.max_num_seqs
    guessing = replace(options, kv_dtype=None, snapshot_bytes=None, adapters={})
    draft, n_draft_rows = None, 0
    if speculate is not None:
        n_rows = min(config.max_num_batched_tokens, n_rows * (1 + config.max_drafted))
    if speculate is not None and (head := head_of(speculate)) is not None:
        draft, n_draft_rows = size_eagle3(head or None, options.model, dtype=spec.dtype), n_rows
    elif speculate is not None and speculate != NGRAM:
        draft = size_model(replace(options, model=speculate, adapters={}))
        n_draft_rows = config.max_num_batched_tokens

    def sizes(capacity: int, *, keeps_windows: bool = False) -> list[_Size]:
        found = [_size_of(spec, capacity, options, config, n_rows, keeps_windows)]
        if speculate == NGRAM:
            found.append(_Size(0, 2 * capacity * NGRAM_BYTES, 0))
        elif draft is not None:
            found.append(_size_of(draft, capacity, guessing, config, n_draft_rows, keeps_windows))
        return found

    return spec.max_positions, sizes


def head_of(speculate: str) -> str | None:
    """Return the head that a drafter's name asks for: "" for the bundled one, None for no head.

    A folder or a model called ``eagle3`` is asked for by its path.
    """
    kind, _, path = speculate.partition(":")
    return path if kind == EAGLE3 else None


def _size_of(
    spec: ModelCacheSpec,
    capacity: int,
    options: LoadOptions,
    config: EngineConfig,
    n_rows: int,
    keeps_windows: bool = False,
) -> _Size:
    """Size a model: weights, KV and states, a forward, and what a restore has on the way in.

    Pools of windows grow like the others as conversations come and go, unless a budget keeps them
    at what one sequence needs where there is no more room.
    """
    kv = _kv_of(spec, options.kv_dtype)
    context = min(capacity, spec.max_positions)
    forward = spec.scratch_bytes(context, config.max_num_batched_tokens, n_rows)
    if options.device not in (None, "cpu"):
        forward += CARD_WORKSPACE + SAMPLING_BYTES * min(n_rows, SAMPLED_ROWS) * spec.vocab_size
    cells = [capacity] * len(spec.params.groups)
    if keeps_windows:
        more = MIN_RUN + STEP_TOKENS
        cells = [min(capacity, n + more) for n in spec.agent_cells(capacity)]
    kv_bytes = spec.growth_bytes(capacity, kv) + sum(
        n * (size + INDEX_BYTES + ARRAY_BYTES)
        for n, size in zip(cells, spec.group_bytes(kv), strict=True)
    )
    n_slots = slots_for(spec.params, capacity, kv, options.snapshot_bytes, config.max_num_seqs)
    kv_bytes += slots_bytes(spec.params, n_slots) + exact_bytes(spec.params.groups, kv)
    in_flight = IN_FLIGHT * BLOCK_TOKENS * spec.token_bytes(kv) + spec.slot_bytes
    weight_bytes = spec.weight_bytes + adapters_bytes(options.adapters)
    return _Size(weight_bytes, forward + in_flight, kv_bytes)


def _kv_of(spec: ModelCacheSpec, kv_dtype: str | None) -> KvDtype:
    return parse_kv_dtype(kv_dtype or spec.kv_dtype)
