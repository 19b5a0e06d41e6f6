"""From "whose tokens the next forward brings" to an open step; and forwards that nobody began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcellar.bookkeeping.admission import Room
from kvcellar.bookkeeping.layouts.drafts import DraftTree
from kvcellar.bookkeeping.layouts.layout import Stretch
from kvcellar.bookkeeping.layouts.rows import appends_of
from kvcellar.bookkeeping.steps import Positions, Steps, check_positions
from kvcellar.checks import seen, whole, wholes
from kvcellar.errors import PositionError, StepError, UnknownSequenceError

_NO_PAIRS = (str, bytes, bytearray, Mapping)
"""Two of them can be taken apart, but not into numbers that somebody meant."""


def begin_stretches(room: Room, steps: Steps, asked: Sequence[tuple[int, int]]) -> list[int]:
    """Open a step of these stretches. All or nothing; errors as in ``Sequences.begin_step``.

    Returns:
        The position of every token.
    """
    pairs = check_stretches(asked)
    steps.settle()
    return _open(room, steps, stretches_of(steps, pairs))


def check_stretches(asked: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what a step brings as plain numbers: (seq_id, n_tokens) of each stretch.

    Raises:
        StepError: it brings nothing, or one that is no pair, or has no token.
        UnknownSequenceError: an id that is no whole number, or negative.
    """
    pairs = []
    try:
        for pair in asked:
            if isinstance(pair, _NO_PAIRS):
                raise TypeError
            seq_id, n_tokens = pair
            pairs.append((check_seq_id(seq_id), whole(n_tokens, "n_tokens", StepError, least=1)))
    except (TypeError, ValueError):
        raise StepError(
            f"begin_step takes a pair (seq_id, n_tokens) for each stretch of the batch, got "
            f"{seen(asked)}"
        ) from None
    if not pairs:
        raise StepError("a step needs at least one token; begin_step got no stretches")
    return pairs


def stretches_of(steps: Steps, pairs: Sequence[tuple[int, int]]) -> list[Stretch]:
    """Return where each stretch of a batch begins, in the batch and in its sequence.

    Raises:
        StepError: a sequence with a tree brings other tokens than its last frontier.
    """
    stretches: list[Stretch] = []
    next_pos: dict[int, int] = {}
    start = 0
    for seq_id, n_tokens in pairs:
        tree = steps.drafts.of(seq_id)
        if tree is None:
            first = next_pos.get(seq_id)
            if first is None:
                first = steps.lengths.get(seq_id, steps.origin)
            next_pos[seq_id] = first + n_tokens
            stretches.append(Stretch(seq_id, start, n_tokens, first))
        else:
            _check_frontier(seq_id, tree, pairs)
            stretches.append(Stretch(seq_id, start, n_tokens, tree.place, tree))
        start += n_tokens
    return stretches


def _check_frontier(seq_id: int, tree: DraftTree, pairs: Sequence[tuple[int, int]]) -> None:
    """Make sure that a sequence with a tree brings its last frontier, in one stretch.

    Raises:
        StepError: it does not.
    """
    if not tree.is_pending:
        raise StepError(
            f"the tree of sequence {seq_id} awaits its commit; commit a chain, "
            f"commit([]) to drop it, or propose the next frontier"
        )
    brought = [n_tokens for other, n_tokens in pairs if other == seq_id]
    if brought != [tree.frontier_size]:
        raise StepError(
            f"sequence {seq_id} proposed {tree.frontier_size} nodes, which come in one stretch; "
            f"the step brings {' + '.join(map(str, brought))} tokens for it"
        )


def _open(room: Room, steps: Steps, stretches: list[Stretch]) -> list[int]:
    """Find cells for stretches and open their step; return the position of every token."""
    appends = appends_of(stretches)
    promised = steps.drafts.promised(appends)
    everybody = {**promised, **appends}
    room.take("step", lambda: room.demands(everybody), promised)
    positions = _positions_of(stretches)
    steps.begin(stretches, positions)
    return positions


def _positions_of(stretches: Sequence[Stretch]) -> list[int]:
    """Return the position of every token of a batch."""
    positions: list[int] = []
    for one in stretches:
        if one.tree is None:
            positions.extend(range(one.first_pos, one.first_pos + one.n_tokens))
        else:
            positions.extend(one.tree.frontier_positions())
    return positions


def refuse(room: Room, steps: Steps, who: str, n_tokens: int, positions: Positions) -> None:
    """Refuse a forward that nobody began.

    Raises:
        StepError: always.
    """
    if steps.is_open:
        raise StepError(
            f"{who} has had its turn in this step, which is still open; if its forward "
            f"raised, call cancel_step and begin_step again"
        )
    raise StepError(
        f"{who} brings {n_tokens} tokens and no step is open for them; "
        f"call begin_step(stretches) before each forward"
    )


def begin_sequence_0(
    room: Room, steps: Steps, who: str, n_tokens: int, positions: Positions
) -> None:
    """Begin a forward that nobody began with tokens of sequence 0, where there is no other one.

    Raises:
        StepError: there are other sequences, or no token.
        PositionError: they are not those that follow its history; nothing was changed.
    """
    if any(seq_id != 0 for seq_id in (*steps.lengths, *steps.drafts.seq_ids())):
        refuse(room, steps, who, n_tokens, positions)
    pairs = check_stretches([(0, n_tokens)])
    steps.settle()
    stretches = stretches_of(steps, pairs)
    if positions is not None:
        check_positions(wholes(positions, "positions", PositionError), _positions_of(stretches))
    _open(room, steps, stretches)


def check_seq_id(seq_id: int) -> int:
    """Return an id that a sequence can have.

    Raises:
        UnknownSequenceError: it is negative, or no whole number.
    """
    seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
    if seq_id < 0:
        raise UnknownSequenceError(f"seq_ids are 0 or more, got {seen(seq_id)}")
    return seq_id


def check_range(p0: int, p1: int | None) -> tuple[int, int | None]:
    """Return the ends of a range of positions; None is the end of the history.

    Raises:
        PositionError: one of them is no whole number.
    """
    first = whole(p0, "p0", PositionError)
    return first, None if p1 is None else whole(p1, "p1", PositionError)
