"""What a sequence holds in a pool, as lists to be compared."""

from __future__ import annotations

from kvcellar.bookkeeping import BlockPool


def seq_cells(pool: BlockPool, seq_id: int) -> list[int]:
    """Return the cells of a sequence in position order."""
    return [c for s in pool.spans(seq_id) for c in range(s.cell, s.cell + s.length)]


def seq_positions(pool: BlockPool, seq_id: int, p0: int = 0, p1: int | None = None) -> list[int]:
    """Return the positions that a sequence holds inside ``[p0, p1)``, ascending."""
    return [p for s in pool.spans(seq_id, p0, p1) for p in range(s.pos, s.stop)]


def block_table(pool: BlockPool, seq_id: int) -> list[int]:
    """Return the block of each ``block_size`` positions from 0 on, -1 where there is none."""
    table: list[int] = []
    for span in pool.spans(seq_id):
        first, last = span.pos // pool.block_size, (span.stop - 1) // pool.block_size
        table.extend([-1] * (first - len(table)))
        block = span.cell // pool.block_size
        table.extend(range(block + len(table) - first, block + last - first + 1))
    return table
