"""From "whose tokens the next forward brings" to an open step; and forwards that nobody began."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.bookkeeping.admission import Room
from kvcellar.bookkeeping.layout import Stretch
from kvcellar.bookkeeping.rows import appends_of
from kvcellar.bookkeeping.steps import Positions, Steps
from kvcellar.checks import seen, whole, wholes
from kvcellar.errors import PositionError, StepError, UnknownSequenceError
from kvcellar.types import IntArray


def begin_tokens(
    room: Room, steps: Steps, seq_ids: Sequence[int] | IntArray, positions: Positions
) -> list[int]:
    """Open a step: one token per id. All or nothing; errors as in ``Sequences.begin_step``.

    Returns:
        The position of every token.
    """
    ids = wholes(seq_ids, "seq_ids", UnknownSequenceError)
    given = None if positions is None else wholes(positions, "positions", PositionError)
    steps.settle()
    if not ids:
        raise StepError("a step needs at least one token; begin_step got no seq_ids")
    check_seq_id(min(ids))
    stretches, asked = stretches_of(steps, ids)
    if given is not None and given != asked:
        _refuse_positions(given, asked)
    appends = appends_of(stretches)
    promised = steps.drafts.promised(appends)
    everybody = {**promised, **appends}
    room.take("step", lambda: room.demands(everybody), promised)
    steps.begin(stretches, asked)
    return asked


def stretches_of(steps: Steps, ids: list[int]) -> tuple[list[Stretch], list[int]]:
    """Cut a flat batch by sequence and give every token its position.

    Raises:
        StepError: a sequence with a tree brings other tokens than its last frontier.
    """
    lengths, drafts = steps.lengths, steps.drafts
    stretches: list[Stretch] = []
    positions: list[int] = []
    next_pos: dict[int, int] = {}
    start = 0
    for i in range(1, len(ids) + 1):
        if i < len(ids) and ids[i] == ids[start]:
            continue
        seq_id, n = ids[start], i - start
        first = next_pos.get(seq_id)
        if first is None:
            first = lengths.get(seq_id, steps.origin)
        tree = drafts.of(seq_id)
        if tree is None:
            stretches.append(Stretch(seq_id, start, n, first))
            positions.extend(range(first, first + n))
            next_pos[seq_id] = first + n
        else:
            if not tree.is_pending:
                raise StepError(
                    f"the tree of sequence {seq_id} awaits its commit; commit a chain, "
                    f"commit([]) to drop it, or propose the next frontier"
                )
            if not n == tree.frontier_size == ids.count(seq_id):
                raise StepError(
                    f"sequence {seq_id} proposed {tree.frontier_size} nodes; the step "
                    f"brings {ids.count(seq_id)} tokens for it"
                )
            stretches.append(Stretch(seq_id, start, n, tree.place, tree))
            positions.extend(tree.frontier_positions())
        start = i
    return stretches, positions


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
        f"call begin_step(seq_ids) before each forward"
    )


def begin_sequence_0(
    room: Room, steps: Steps, who: str, n_tokens: int, positions: Positions
) -> None:
    """Begin a forward that nobody began with tokens of sequence 0, where there is no other one.

    Raises:
        StepError: there are other sequences.
    """
    if any(seq_id != 0 for seq_id in (*steps.lengths, *steps.drafts.seq_ids())):
        refuse(room, steps, who, n_tokens, positions)
    begin_tokens(room, steps, [0] * n_tokens, positions)


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


def _refuse_positions(given: list[int], asked: list[int]) -> None:
    """Raise PositionError: the caller's positions do not continue the sequences."""
    at = next(
        (i for i, (a, b) in enumerate(zip(given, asked, strict=False)) if a != b),
        min(len(given), len(asked)),
    )
    raise PositionError(
        f"begin_step got {len(given)} positions for {len(asked)} tokens; they differ "
        f"from what continues each sequence at token {at}: "
        f"given {given[at : at + 4]}, expected {asked[at : at + 4]}"
    )
