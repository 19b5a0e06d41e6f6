"""The life of one forward, the same for every cache.

A step is *open* from the moment its cells are claimed. Each layer asks for its plan once and
reports when its bytes are written; when every layer has, the step is *complete* and its tokens
count. The next verb accepts a complete step, or undoes one that a raised forward left behind.
Until then ``cancel_step`` takes it back, complete or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcellar.bookkeeping.growth import Growth
from kvcellar.checks import wholes
from kvcellar.errors import PositionError, StepError
from kvcellar.types import CacheConfig, CacheUsage, GroupUsage, IntArray, StepPlan


class OpenStep:
    """One forward under way: its plans, and which layers have written."""

    __slots__ = ("n_left", "n_tokens", "plans", "positions", "seen", "written")

    def __init__(self, positions: Sequence[int], plans: Sequence[StepPlan], n_layers: int) -> None:
        self.positions = list(positions)
        self.n_tokens = len(self.positions)
        self.plans = plans  # one per layer group
        self.seen = bytearray(n_layers)
        self.written = bytearray(n_layers)
        self.n_left = n_layers

    @property
    def is_complete(self) -> bool:
        """Whether every layer has written its bytes."""
        return self.n_left == 0


class StepBookkeeping(ABC):
    """What every cache's bookkeeping shares: layer groups, plans, and the life of a step.

    A backend's cache derives from one of the subclasses and adds bytes: it calls ``plan`` at the
    start of each layer, ``wrote`` when that layer's K and V are stored, and overrides
    ``_move_cells`` and ``_forget_cells``.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Empty bookkeeping for ``config``."""
        self.config = config
        self.groups = config.params.groups
        self.n_layers = config.params.n_layers
        self._group_of = [0] * self.n_layers
        for index, group in enumerate(self.groups):
            for layer in group.layers:
                self._group_of[layer] = index
        self._open: OpenStep | None = None
        self._growth = self._make_growth()

    def _make_growth(self) -> Growth | None:
        """What asks the config's memory budget; None where there is none."""
        return None if self.config.budget is None else Growth(self.config, self.config.budget)

    # The runner's face -------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence may have: cells, or what a memory budget holds."""
        return self.config.capacity if self._growth is None else self._growth.n_fitting

    @property
    def is_step_open(self) -> bool:
        """Whether a step has been begun and not all of its layers have written yet."""
        return self._open is not None and not self._open.is_complete

    def cancel_step(self) -> None:
        """Take back the last step, finished or not; a no-op where there is none to take back.

        A runner calls it when its forward raised. Afterwards the cache is as it was before the
        step began. Once another verb has been called the step is accepted and stays.
        """
        step, self._open = self._open, None
        if step is not None:
            self._undo(step)

    def end_step(self) -> None:
        """Accept the finished step now, rather than at the next verb. Unfinished: undo it."""
        self._settle()

    def clear(self) -> None:
        """Forget everything. The pools keep their bytes for reuse."""
        self._open = None
        self._clear()

    def usage(self) -> CacheUsage:
        """Cells taken and shared, by layer group."""
        return CacheUsage(tuple(self._group_usage(i) for i in range(len(self.groups))))

    # The byte layer's face ---------------------------------------------------------------------

    def group_of(self, layer: int) -> int:
        """Index of the layer group that ``layer`` belongs to."""
        if not 0 <= layer < self.n_layers:
            raise StepError(f"layer {layer} asked for its cache; this cache has {self.n_layers}")
        return self._group_of[layer]

    def plan(
        self, layer: int, n_tokens: int, positions: Sequence[int] | IntArray | None
    ) -> StepPlan:
        """What ``layer`` writes and reads in this forward; memoised for the layers of a group.

        Args:
            layer: layer id.
            n_tokens: tokens in the flat batch.
            positions: one per token; compared once per forward, so later layers may pass None.

        Raises:
            StepError: no step is open and this cache cannot open one by itself, or the number of
                tokens is not that of the step.
            PositionError: the positions are not those that the step claimed.
        """
        group = self.group_of(layer)
        step = self._open
        if step is None or step.seen[layer] or step.is_complete:
            step = self._implicit_step(layer, n_tokens, positions)
            positions = None  # compared there
        if n_tokens != step.n_tokens:
            raise StepError(
                f"the forward brings {n_tokens} tokens to layer {layer}; the step was begun for "
                f"{step.n_tokens}; cancel_step takes the step back"
            )
        if positions is not None and step.n_left == self.n_layers and not any(step.seen):
            asked = wholes(positions, "positions", PositionError)
            if asked != step.positions:
                raise PositionError(
                    f"the forward brings positions {_short(asked)}; the step claimed "
                    f"{_short(step.positions)}; begin_step returns the positions that its tokens "
                    f"get"
                )
        step.seen[layer] = 1
        return step.plans[group]

    def take_plan(self, layer: int, plan: StepPlan) -> bool:
        """Take ``plan`` for one more layer of its group, in the forward that it was made for.

        The short way for all layers after the first: what ``plan`` would return, or false.
        """
        step = self._open
        if step is None or step.seen[layer] or step.plans[self._group_of[layer]] is not plan:
            return False
        step.seen[layer] = 1
        return True

    def begun_plans(self) -> Sequence[StepPlan]:
        """Per layer group the plan of the step that is begun; none where none is."""
        step = self._open
        return () if step is None or step.is_complete else step.plans

    def needs_positions(self) -> bool:
        """Whether the next ``plan`` call compares positions (or must learn them)."""
        step = self._open
        return step is None or step.is_complete or not any(step.seen)

    def wrote(self, layer: int) -> None:
        """The bytes of ``layer`` are stored; after the last layer the step's tokens count."""
        step = self._open
        assert step is not None and step.seen[layer], "a layer writes after it asked for its plan"
        if not step.written[layer]:
            step.written[layer] = 1
            step.n_left -= 1
            if step.n_left == 0:
                self._complete(step)
                if self._growth is not None:
                    self._growth.settle()

    def _n_held(self, group: int, n_cells: int) -> int:
        """What the pools of a group must hold for a plan that reaches ``n_cells``."""
        return n_cells if self._growth is None else self._growth.sizes[group]

    # What a subclass provides ------------------------------------------------------------------

    @abstractmethod
    def _implicit_step(
        self, layer: int, n_tokens: int, positions: Sequence[int] | IntArray | None
    ) -> OpenStep:
        """Open the step that a forward without ``begin_step`` means, or raise StepError."""

    @abstractmethod
    def _complete(self, step: OpenStep) -> None:
        """Every layer has written: the step's tokens count from now on."""

    @abstractmethod
    def _undo(self, step: OpenStep) -> None:
        """Free what the step claimed and forget its tokens."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def _group_usage(self, group: int) -> GroupUsage:
        """Cells taken and shared in one group."""

    def _accepted(self, step: OpenStep) -> None:  # noqa: B027 - nothing to do by default
        """The step can no longer be taken back."""

    def _settle(self) -> None:
        """Accept the finished step, or undo what a raised forward left behind."""
        step, self._open = self._open, None
        if step is None:
            return
        if step.is_complete:
            self._accepted(step)
        else:
            self._undo(step)

    # Bytes: nothing here, a backend overrides --------------------------------------------------

    def _move_cells(self, group: int, base: int, src_cells: IntArray) -> None:  # noqa: B027
        """Copy ``src_cells`` to ``[base, base + len)`` in every pool of the group."""


def _short(positions: Sequence[int]) -> str:
    """Positions for an error message: all of a few, the ends of many."""
    if len(positions) <= 8:
        return str(list(positions))
    return f"[{positions[0]}, {positions[1]}, ... {positions[-1]}] ({len(positions)} of them)"
