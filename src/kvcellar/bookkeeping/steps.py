"""The life of one forward, the same for every cache.

A step is *open* from the moment its cells are claimed. Each layer asks for its plan once and
reports when its bytes are written; when every layer has, the step is *complete* and its tokens
count. The next verb accepts a complete step, or undoes one that a raised forward left behind.
Until then ``cancel_step`` takes it back, complete or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcellar.bookkeeping.cells.growth import Growth
from kvcellar.bookkeeping.layouts.drafts import Drafts
from kvcellar.bookkeeping.layouts.layout import Bytes, Keeper, Layout, Stretch
from kvcellar.bookkeeping.layouts.slots import Slots
from kvcellar.cache_config import CacheConfig, CacheUsage
from kvcellar.checks import wholes
from kvcellar.errors import PositionError, StepError
from kvcellar.states import StatePlan
from kvcellar.types import IntArray, StepPlan

Positions = Sequence[int] | IntArray | None
"""One per token of the flat batch; None where they are known."""


class OpenStep:
    """One forward under way: whose it is, its plans, and which layers have written."""

    __slots__ = (
        "lengths",
        "n_left",
        "n_tokens",
        "plans",
        "positions",
        "seen",
        "states",
        "stretches",
        "written",
    )

    def __init__(
        self,
        stretches: Sequence[Stretch],
        positions: list[int],
        plans: Sequence[StepPlan],
        states: StatePlan | None,
        lengths: dict[int, int | None],
        n_layers: int,
    ) -> None:
        """Create a step of which no layer has been seen.

        Args:
            stretches: whose tokens it brings.
            positions: one per token.
            plans: one per layer group.
            states: the plan of recurrent layers; None where there are none.
            lengths: of its sequences before it; None for one that did not exist.
            n_layers: layers that will write, recurrent ones behind the others.
        """
        self.stretches = stretches
        self.positions = positions
        self.n_tokens = len(positions)
        self.plans = plans
        self.states = states
        self.lengths = lengths
        self.seen = bytearray(n_layers)
        self.written = bytearray(n_layers)
        self.n_left = n_layers

    @property
    def is_complete(self) -> bool:
        """True if every layer has written its bytes."""
        return self.n_left == 0


Unasked = Callable[["Steps", str, int, Positions], None]
"""(steps, which layer asks, tokens, positions): begin the step that a forward without one means, or
raise StepError."""


class Steps:
    """The forwards of one cache: one layout per layer group, drafts, and a port to the bytes.

    A backend's layer calls ``plan`` (or ``take_plan``) when it starts and ``wrote`` when its K and
    V are stored; a recurrent layer ``plan_states`` and ``wrote_states``. Whoever has the steps
    begins them, and calls ``settle`` before any other change.
    """

    def __init__(
        self,
        config: CacheConfig,
        layouts: Sequence[Layout],
        lengths: dict[int, int],
        pools: Bytes,
        *,
        growth: Growth | None,
        unasked: Unasked,
        slots: Slots | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """Create the steps of a cache without tokens.

        Args:
            config: the cache's.
            layouts: one per layer group.
            lengths: the sequences' lengths, empty; kept here, read by the layouts.
            pools: the bytes.
            growth: what asks the memory budget; None where there is none.
            unasked: begins the step of a forward that nobody began.
            slots: the layout of states; None where no layer is recurrent.
            drafts: the sequences' draft trees, none yet; None: nobody proposes any.
        """
        self.config = config
        self.origin = config.origin
        """The length that a sequence without tokens of its own has."""
        self.groups = config.params.groups
        self.n_layers = config.params.n_layers
        self.layouts = layouts
        self.slots = slots
        self.keepers: Sequence[Keeper] = layouts if slots is None else (*layouts, slots)
        """All that keep a part of histories: one per layer group, and the slots of states."""
        self.lengths = lengths
        self.drafts = Drafts() if drafts is None else drafts
        self.growth = growth
        self._pools = pools
        self._unasked = unasked
        state = config.params.state
        self._n_states = 0 if state is None else len(state.layers)
        self._group_of = config.params.group_of
        self._source_of = config.params.sources
        self._shares = bool(config.params.shared)
        self._open: OpenStep | None = None

    # For whoever begins steps ------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if a step has been begun and not all of its layers have written yet."""
        return self._open is not None and not self._open.is_complete

    def begin(self, stretches: Sequence[Stretch], positions: list[int]) -> None:
        """Open a step whose cells are free: claim them and plan. All or nothing.

        Args:
            stretches: whose tokens come, in the order of the flat batch.
            positions: one per token.

        Raises:
            Exception: what a copy of bytes raised; nothing was changed.
        """
        assert self._open is None, "the step before was settled"
        lengths = {s.seq_id: self.lengths.get(s.seq_id) for s in stretches}
        plans = []
        states = None
        sizes = [None] * len(self.keepers) if self.growth is None else self.growth.sizes
        try:
            for index, (layout, n_held) in enumerate(zip(self.layouts, sizes, strict=False)):
                plan, moves = layout.begin(stretches, len(positions), n_held)
                for move in moves:
                    self._pools.move_cells(index, move.base, move.src_cells)
                plans.append(plan)
            if self.slots is not None:
                states = self.slots.begin(stretches, len(positions), sizes[-1])
        except BaseException:
            for keeper in self.keepers:
                keeper.undo(stretches)
            raise
        if self.drafts:
            for stretch in stretches:
                if stretch.tree is not None:
                    stretch.tree.n_placed = stretch.tree.n_nodes
        n_layers = self.n_layers + self._n_states
        self._open = OpenStep(stretches, positions, plans, states, lengths, n_layers)

    def settle(self) -> None:
        """Accept the finished step, or undo what a raised forward left behind."""
        step, self._open = self._open, None
        if step is None:
            return
        if not step.is_complete:
            self._undo(step)
            return
        for keeper in self.keepers:
            keeper.accept(step.lengths)

    def cancel(self) -> None:
        """Take back the last step, finished or not; a no-op where there is none to take back.

        Afterwards the cache is as it was before the step began, but for what windows let go of to
        make room. Once another verb has been called the step is accepted and stays.
        """
        step, self._open = self._open, None
        if step is not None:
            self._undo(step)

    def open_seq_ids(self) -> list[int]:
        """Return the sequences of the last step, while it can be taken back."""
        return [] if self._open is None else list(self._open.lengths)

    def move(self, group: int, moves: Sequence[tuple[int, IntArray]]) -> None:
        """Copy the bytes of a group's cells, in order."""
        for base, src_cells in moves:
            self._pools.move_cells(group, base, src_cells)

    def clear(self) -> None:
        """Forget everything. The pools keep their bytes for reuse."""
        self._open = None
        for keeper in self.keepers:
            keeper.clear()
        self.lengths.clear()
        self.drafts.clear()

    def usage(self) -> CacheUsage:
        """Return the cells taken and shared by layer group, and the bytes of the pools."""
        groups = tuple(layout.usage() for layout in self.layouts)
        slots = None if self.slots is None else self.slots.usage()
        return CacheUsage(groups, self._pools.size_bytes, slots)

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` that all layer groups can resume at.

        Behind a frozen prefix, where sequences begin, they always can.
        """
        while length > self.origin:
            low = min(keeper.resume_at(seq_id, length) for keeper in self.keepers)
            if low == length:
                return length
            length = max(low, self.origin)
        return length if length == self.origin else 0

    @property
    def narrow(self) -> str:
        """Kinds of layer groups that let go of their past, in words, for messages."""
        kinds = {"a chunk": "chunk", "a sliding window": "window"}
        there = [
            words
            for words, name in kinds.items()
            if any(getattr(group, name) is not None for group in self.groups)
        ]
        return " or ".join(there + ["a recurrent state"] * (self.slots is not None))

    @property
    def keeps_more(self) -> str:
        """The way to resume from more lengths, for messages."""
        if self.slots is not None:
            return "call keep_point where it may be cut back to"
        return f"raise window_slack ({self.config.window_slack}) to keep more"

    # For the layers of a forward ---------------------------------------------------------------

    def group_of(self, layer: int) -> int:
        """Return the index of the layer group that ``layer`` belongs to."""
        if not 0 <= layer < self.n_layers:
            raise StepError(f"layer {layer} asked for its cache; this cache has {self.n_layers}")
        return self._group_of[layer]

    def stores(self, layer: int) -> bool:
        """Return true if ``layer`` writes rows, false if it attends over an earlier layer's."""
        return self._source_of[layer] == layer

    def awaits(self, layer: int) -> bool:
        """Return true if a step is open in which ``layer`` has not had its turn."""
        step = self._open
        return step is not None and not step.is_complete and not step.seen[layer]

    def plan(self, layer: int, n_tokens: int, positions: Positions) -> StepPlan:
        """Return what ``layer`` writes and reads in this forward; made once per layer group.

        A layer that shares another's rows gets the plan of that one, and writes nothing.

        Args:
            layer: layer id.
            n_tokens: tokens in the flat batch.
            positions: one per token; compared once per forward, so later layers may pass None.

        Raises:
            StepError: no step is open and this cache cannot open one by itself, or the number of
                tokens is not that of the step; or the layer shares rows that are not written yet.
            PositionError: the positions are not those that the step claimed.
        """
        group = self.group_of(layer)
        step = self._open
        if self._shares and not self._has_rows(step, layer):
            raise StepError(
                f"layer {layer} attends over the rows of layer {self._source_of[layer]}, which has "
                f"not written those of this forward; run the layers in their order"
            )
        return self._turn_of(layer, f"layer {layer}", n_tokens, positions).plans[group]

    def plan_states(self, layer: int, n_tokens: int, positions: Positions) -> StatePlan:
        """Return what recurrent layer ``layer`` reads and writes in this forward; see ``plan``.

        Args:
            layer: its number among the recurrent layers.
            n_tokens: tokens in the flat batch.
            positions: as for ``plan``.

        Raises:
            StepError, PositionError: as ``plan`` does.
        """
        if not 0 <= layer < self._n_states:
            raise StepError(
                f"recurrent layer {layer} asked for its states; this cache has {self._n_states}"
            )
        who = f"recurrent layer {layer}"
        states = self._turn_of(self.n_layers + layer, who, n_tokens, positions).states
        assert states is not None, "a cache with recurrent layers has slots"
        return states

    def _turn_of(self, index: int, who: str, n_tokens: int, positions: Positions) -> OpenStep:
        """Return the step of the forward that brings tokens to a layer: it has had its turn.

        Raises:
            StepError, PositionError: as ``plan`` does.
        """
        step = self._open
        if step is None or step.seen[index] or step.is_complete:
            self._unasked(self, who, n_tokens, positions)
            step = self._open
            assert step is not None, "whoever begins a step opens it or raises"
            positions = None  # compared there
        if n_tokens != step.n_tokens:
            raise StepError(
                f"the forward brings {n_tokens} tokens to {who}; the step was begun for "
                f"{step.n_tokens}; cancel_step takes the step back"
            )
        if positions is not None and step.n_left == len(step.seen) and not any(step.seen):
            check_positions(wholes(positions, "positions", PositionError), step.positions)
        step.seen[index] = 1
        return step

    def take_plan(self, layer: int, plan: StepPlan) -> bool:
        """Take ``plan`` for one more layer of its group, in the forward that it was made for.

        The short way for all layers after the first: what ``plan`` would return, or false.
        """
        step = self._open
        if step is None or step.seen[layer] or step.plans[self._group_of[layer]] is not plan:
            return False
        if self._shares and not self._has_rows(step, layer):
            return False
        step.seen[layer] = 1
        return True

    def _has_rows(self, step: OpenStep | None, layer: int) -> bool:
        """Return false if ``layer`` shares rows that the forward has not written."""
        source = self._source_of[layer]
        return source == layer or (step is not None and bool(step.written[source]))

    def plan_all(self, n_tokens: int, positions: Positions) -> Sequence[StepPlan]:
        """Return the plan of each layer group in this forward; no layer has had its turn by that.

        Whoever then runs all layers by himself calls ``wrote_all``; else they ask one by one, as
        if nothing had been asked.

        Args:
            n_tokens: tokens in the flat batch.
            positions: one per token.

        Raises:
            StepError, PositionError: as ``plan`` does.
        """
        step = self._turn_of(0, "the forward", n_tokens, positions)
        step.seen[0] = 0
        return step.plans

    def begun_states(self) -> StatePlan | None:
        """Return the plan of the recurrent layers in the step that ``plan_all`` has opened."""
        assert self._open is not None, "plan_all has opened the step"
        return self._open.states

    def wrote_all(self) -> None:
        """Note that every layer has stored its bytes: the open step's tokens count."""
        step = self._open
        assert step is not None and not any(step.seen), "plan_all has opened the step"
        for index in range(len(step.seen)):
            step.seen[index] = 1
            self._wrote(index)

    def begun_plans(self) -> Sequence[StepPlan]:
        """Return the plan of each layer group in the step that is begun; none where none is."""
        step = self._open
        return () if step is None or step.is_complete else step.plans

    def needs_positions(self) -> bool:
        """Return true if the next ``plan`` call compares positions (or must learn them)."""
        step = self._open
        return step is None or step.is_complete or not any(step.seen)

    def n_seen(self, layer: int) -> int | None:
        """Return the tokens that an open forward has brought to a layer; None: none is open."""
        step = self._open
        if step is None or step.is_complete:
            return None
        return step.n_tokens if step.seen[layer] else 0

    def wrote(self, layer: int) -> None:
        """Note that ``layer`` has stored its bytes, if it does; after the last, tokens count."""
        self._wrote(layer)

    def wrote_states(self, layer: int) -> None:
        """Note that recurrent layer ``layer`` has stored its states, as ``wrote`` does."""
        self._wrote(self.n_layers + layer)

    def _wrote(self, index: int) -> None:
        step = self._open
        assert step is not None and step.seen[index], "a layer writes after it asked for its plan"
        if not step.written[index]:
            step.written[index] = 1
            step.n_left -= 1
            if step.n_left == 0:
                self._complete(step)
                if self.growth is not None:
                    self.growth.settle()

    # How a step ends ---------------------------------------------------------------------------

    def _complete(self, step: OpenStep) -> None:
        """Have the step's tokens count: every layer has written."""
        for stretch in step.stretches:
            if stretch.tree is None:
                self.lengths[stretch.seq_id] = stretch.first_pos + stretch.n_tokens
            else:
                stretch.tree.n_forwarded = stretch.tree.n_nodes

    def _undo(self, step: OpenStep) -> None:
        """Free what the step claimed and forget its tokens."""
        for keeper in self.keepers:
            keeper.undo(step.stretches)
        for stretch in step.stretches:
            if stretch.tree is not None:
                stretch.tree.n_forwarded = stretch.tree.n_placed = stretch.tree.frontier_start
        for seq_id, length in step.lengths.items():
            if length is None:
                self.lengths.pop(seq_id, None)
            else:
                self.lengths[seq_id] = length


def check_positions(asked: list[int], claimed: list[int]) -> None:
    """Make sure that a forward brings the tokens of its step.

    Raises:
        PositionError: they are not at its positions.
    """
    if asked != claimed:
        raise PositionError(
            f"the forward brings positions {_short(asked)}; the step claimed {_short(claimed)}; "
            f"begin_step returns the positions that its tokens get"
        )


def _short(positions: Sequence[int]) -> str:
    """Return positions for an error message: all of a few, the ends of many."""
    if len(positions) <= 8:
        return str(list(positions))
    return f"[{positions[0]}, {positions[1]}, ... {positions[-1]}] ({len(positions)} of them)"
