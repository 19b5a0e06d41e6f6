"""Triton kernels that choose a token for each row of logits, in three launches for any settings.

A row is cut into tiles of the vocabulary. ``adjust_tiles`` changes logits by penalties, bias and
guides and finds the tiles' maxima; ``weigh_tiles`` sums what tokens weigh, and sorts the tiles of
rows that are cut by ``top_k``, ``top_p`` or ``min_p``; ``choose_rows`` finds the edges of the cuts
by searching all sorted tiles at once, and inverts the cumulative distribution in order of token
ids. Rows that take the likeliest token need the first and the last alone, and one launch of
``take_likeliest`` where nothing else is asked of any.

Settings of a row are integers and floats in the order of ``INTS`` and ``FLOATS``; its lists of
tokens lie behind one another in ``ids``, with a value beside each.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTS, FLOATS, PARTS = tl.constexpr(10), tl.constexpr(8), tl.constexpr(5)
"""Settings of a row, and what is found of a tile.

Integers are the row of the logits, ``top_k`` or 0, the row of its guide's bits or -1, the token
that stands for what may not come or -1, 1 if anything is cut, and where the lists of held, sampled,
biased and barred tokens begin and the last one ends. Floats are the temperature, the least scaled
logit, the penalties for repetition, frequency and presence, the random number or -1, ``top_p``, and
the temperature at which tokens stand for others, 0 for none. Of a tile there are the highest logit,
the highest adjusted one and its token, and the highest of those that another token stands for, with
the sum of what they weigh beside it.
"""

FARTHEST = tl.constexpr(0x7F800000)
"""Bits of infinity: how far below the highest a token is that cannot come."""

WAYS = tl.constexpr(16)
"""Edges that a search tries at a time."""


@triton.jit
def adjust_tiles(
    logits, adjusted, parts, ints, floats, ids, values, bits, n_vocab, n_tiles, n_bytes, row_size,
    TILE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Adjust a tile of a row and find its maxima; the grid is (tiles, rows)."""
    r, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE
    token = first + tl.arange(0, TILE)
    ok = token < n_vocab
    row = tl.load(ints + r * INTS)
    found = tl.load(logits + row * row_size + token, mask=ok, other=-float("inf")).to(tl.float32)
    to = parts + (r * n_tiles + tl.program_id(0)) * PARTS
    tl.store(to, _best(found))
    is_free = ok
    place = adjusted + r * n_vocab
    tl.store(place + token, found, mask=ok)
    lists = ints + r * INTS + 5
    held, sampled, biased = tl.load(lists), tl.load(lists + 1), tl.load(lists + 2)
    barred, stop = _barred(ints, r)
    if barred > held:
        tl.debug_barrier()
        penalty = tl.load(floats + r * FLOATS + 2).to(tl.float32)
        often = tl.load(floats + r * FLOATS + 3).to(tl.float32)
        once = tl.load(floats + r * FLOATS + 4).to(tl.float32)
        for at in range(held, sampled, SOME):
            one, is_here = _listed(ids, at, sampled, first, n_vocab, TILE, SOME)
            value = tl.load(place + one, mask=is_here, other=0.0)
            value = tl.where(value > 0, tl.div_rn(value, penalty), value * penalty)
            tl.store(place + one, value, mask=is_here)
        tl.debug_barrier()
        for at in range(sampled, biased, SOME):
            one, is_here = _listed(ids, at, biased, first, n_vocab, TILE, SOME)
            times = tl.load(values + at + tl.arange(0, SOME), mask=is_here, other=0.0)
            value = tl.load(place + one, mask=is_here, other=0.0)
            tl.store(place + one, value - times * often - once, mask=is_here)
        tl.debug_barrier()
        for at in range(biased, barred, SOME):
            one, is_here = _listed(ids, at, barred, first, n_vocab, TILE, SOME)
            bias = tl.load(values + at + tl.arange(0, SOME), mask=is_here, other=0.0)
            value = tl.load(place + one, mask=is_here, other=0.0)
            tl.store(place + one, value + bias, mask=is_here)
        tl.debug_barrier()
        found = tl.load(place + token, mask=ok, other=-float("inf"))
    guide, end = tl.load(ints + r * INTS + 2), tl.load(ints + r * INTS + 3)
    if guide >= 0:
        of_eight = tl.load(bits + guide * n_bytes + token // 8, mask=ok, other=0).to(tl.int32)
        may_come = ((of_eight >> (token % 8)) & 1) != 0
        others = tl.where(ok & ((token == end) | ~may_come), found, -float("inf"))
        most = tl.max(others, 0).to(tl.float64)
        scale = tl.load(floats + r * FLOATS + 7)
        below = tl.where(others == -float("inf"), -float("inf"), others.to(tl.float64) - most)
        weight = tl.exp(below / tl.where(scale > 0, scale, 1.0))
        tl.store(to + 3, most)
        tl.store(to + 4, tl.sum(weight, 0))
        found = tl.where(may_come, found, -float("inf"))
        tl.store(place + token, found, mask=ok)
        is_free = is_free & (token != end)
    for at in range(barred, stop):
        is_free = is_free & (token != tl.load(ids + at))
    found = tl.where(is_free, found, -float("inf"))
    most, at = tl.max(found, 0, return_indices=True)
    tl.store(to + 1, most.to(tl.float64))
    tl.store(to + 2, (first + at).to(tl.float64))


@triton.jit
def _best(found):
    """Return the highest of some logits; NaN where one is."""
    is_nonsense = tl.max((found != found).to(tl.int32), 0) > 0
    return tl.where(is_nonsense, float("nan"), tl.max(found, 0)).to(tl.float64)


@triton.jit
def take_likeliest(
    logits, parts, counts, told, n_vocab, n_tiles, row_size,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Tell each row's likeliest token, -1 if none may come, and its logit; the grid: (tiles, rows).

    The last program of a row to get so far looks at what all of them have found. ``counts`` of rows
    are 0 before and after; nobody else may use them meanwhile.
    """
    r, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE
    token = first + tl.arange(0, TILE)
    ok = token < n_vocab
    found = tl.load(logits + r * row_size + token, mask=ok, other=-float("inf")).to(tl.float32)
    to = parts + (r * n_tiles + tl.program_id(0)) * PARTS
    most, at = tl.max(found, 0, return_indices=True)
    tl.store(to, _best(found))
    tl.store(to + 1, most.to(tl.float64))
    tl.store(to + 2, (first + at).to(tl.float64))
    tl.debug_barrier()  # all of the program's threads have stored, before it is counted
    if tl.atomic_add(counts + r, 1, sem="acq_rel") == n_tiles - 1:
        t = tl.arange(0, TILES)
        is_tile = t < n_tiles
        of_tile = parts + (r * n_tiles + t) * PARTS
        bests = tl.load(of_tile, mask=is_tile, other=-float("inf"), cache_modifier=".cg")
        of_tiles = tl.load(of_tile + 1, mask=is_tile, other=-float("inf"), cache_modifier=".cg")
        tokens = tl.load(of_tile + 2, mask=is_tile, other=0.0, cache_modifier=".cg").to(tl.int64)
        highest = tl.max(of_tiles, 0)
        chosen = tl.min(tl.where(of_tiles == highest, tokens, n_vocab), 0)
        chosen = tl.where(highest == -float("inf"), -1, chosen)
        tl.store(told + r * 2, chosen.to(tl.float64))
        tl.store(told + r * 2 + 1, _best(bests))
        tl.store(counts + r, 0)


@triton.jit
def _barred(ints, r):
    """Return where a row's list of barred tokens begins and ends."""
    return tl.load(ints + r * INTS + 8), tl.load(ints + r * INTS + 9)


@triton.jit
def _listed(ids, at, stop, first, n_vocab, TILE: tl.constexpr, SOME: tl.constexpr):
    """Return some tokens of a list, and which of them are in a tile."""
    i = at + tl.arange(0, SOME)
    one = tl.load(ids + i, mask=i < stop, other=-1)
    return one, (one >= first) & (one < first + TILE) & (one < n_vocab)


@triton.jit
def _highest(
    adjusted, parts, ints, floats, ids, r, n_vocab, n_tiles, TILES: tl.constexpr,
):  # fmt: skip
    """Return a row's highest adjusted logit and the first token that has it.

    And the logit of the token that stands for others, and true if barred tokens are barred.
    """
    t = tl.arange(0, TILES)
    at = parts + (r * n_tiles + t) * PARTS
    of_tiles = tl.load(at + 1, mask=t < n_tiles, other=-float("inf"))
    tokens = tl.load(at + 2, mask=t < n_tiles, other=0.0).to(tl.int64)
    most = tl.max(of_tiles, 0)
    token = tl.min(tl.where(of_tiles == most, tokens, n_vocab), 0)
    value = tl.zeros((), tl.float64)
    end = tl.load(ints + r * INTS + 3)
    barred, stop = _barred(ints, r)
    is_end_barred = end < 0
    for i in range(barred, stop):
        is_end_barred = is_end_barred | (tl.load(ids + i) == end)
    if end >= 0:
        scale = tl.load(floats + r * FLOATS + 7)
        tops = tl.load(at + 3, mask=t < n_tiles, other=-float("inf"))
        sums = tl.load(at + 4, mask=t < n_tiles, other=0.0)
        value = tl.max(tops, 0)
        if (scale > 0) & (tl.abs(value) < float("inf")):
            below = (tops - value) / scale
            weights = tl.where(tops == -float("inf"), 0.0, sums * tl.exp(below))
            value += scale * tl.log(tl.sum(weights, 0))
        value = value.to(tl.float32).to(tl.float64)
        if (not is_end_barred) & ((value > most) | ((value == most) & (end < token))):
            most, token = value, end
    is_barred = tl.abs(most) < float("inf")
    if not is_barred:
        for i in range(barred, stop):
            one = tl.load(ids + i)
            its = tl.load(adjusted + r * n_vocab + one).to(tl.float64)
            its = tl.where(one == end, value, its)
            if (its > most) | ((its == most) & (one < token)):
                most, token = its, one
    return most, token, value, is_barred


@triton.jit
def _below(
    adjusted, ints, floats, ids, r, token, n_vocab, most, value, is_barred,
):  # fmt: skip
    """Return how far tokens are below the highest, in temperatures: their floats' bits."""
    ok = token < n_vocab
    found = tl.load(adjusted + r * n_vocab + token, mask=ok, other=-float("inf"))
    end = tl.load(ints + r * INTS + 3)
    found = tl.where((token == end) & (end >= 0), value.to(tl.float32), found)
    barred, stop = _barred(ints, r)
    if is_barred:
        for i in range(barred, stop):
            found = tl.where(token == tl.load(ids + i), -float("inf"), found)
    temperature = tl.load(floats + r * FLOATS).to(tl.float32)
    scaled = tl.div_rn(found - most.to(tl.float32), temperature)  # else a division may overflow
    below = tl.where(found == -float("inf"), float("inf"), 0.0 - scaled)
    return below.to(tl.int32, bitcast=True)


@triton.jit
def _weight(below):
    """Return what tokens weigh that are so far below the highest."""
    return tl.exp(-below.to(tl.float32, bitcast=True))


@triton.jit
def weigh_tiles(
    adjusted, parts, keys, masses, sums, ints, floats, ids, n_vocab, n_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sum what tokens of a tile weigh, and sort it if its row is cut; the grid is (tiles, rows)."""
    r = tl.program_id(1).to(tl.int64)
    if tl.load(floats + r * FLOATS + 5) < 0:
        return
    most, _, value, is_barred = _highest(
        adjusted, parts, ints, floats, ids, r, n_vocab, n_tiles, TILES
    )
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    below = _below(adjusted, ints, floats, ids, r, token, n_vocab, most, value, is_barred)
    at = r * n_tiles + tl.program_id(0)
    tl.store(sums + at, tl.sum(_weight(below).to(tl.float64), 0))
    if tl.load(ints + r * INTS + 4) != 0:
        below = tl.sort(tl.where(token < n_vocab, below, 0x7FFFFFFF))
        is_there = below <= FARTHEST
        mass = tl.cumsum(tl.where(is_there, _weight(below), 0.0).to(tl.float64), 0)
        to = at * TILE + tl.arange(0, TILE)
        tl.store(keys + to, below)
        tl.store(masses + to, mass)


@triton.jit
def _ranks(keys, row, edge, low, high):
    """Return how many keys of sorted tiles are at most ``edge``: between ``low`` and ``high``."""
    while tl.max(tl.max(high - low, 0), 0) > 0:
        middle = (low + high) // 2
        is_open = low < high
        key = tl.load(keys + row + middle, mask=is_open, other=0)
        is_in = key <= edge
        low = tl.where(is_open & is_in, middle + 1, low)
        high = tl.where(is_open & ~is_in, middle, high)
    return low


@triton.jit
def _edge(keys, masses, row, is_tile, wanted, IS_MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the least edge up to which all tiles have so many tokens, or so much mass."""
    low, high = -1, FARTHEST
    from_rank = row.to(tl.int32) * 0
    to_rank = from_rank + tl.where(is_tile, TILE, 0)
    way = tl.arange(0, WAYS)[:, None]
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        edges = tl.minimum(low + 1 + way * step, high)
        ranks = _ranks(keys, row, edges, from_rank + way * 0, to_rank + way * 0)
        if IS_MASS:
            is_some = is_tile & (ranks > 0)
            found = tl.sum(tl.load(masses + row + ranks - 1, mask=is_some, other=0.0), 1)
        else:
            found = tl.sum(ranks, 1).to(tl.float64)
        enough = found[:, None] >= wanted
        least = tl.min(tl.min(tl.where(enough, way, WAYS), 1), 0)
        to_rank = tl.where(least < WAYS, _picked(ranks, way, least), to_rank)
        from_rank = tl.where(least > 0, _picked(ranks, way, least - 1), from_rank)
        high_next = tl.where(least < WAYS, tl.minimum(low + 1 + least * step, high), high)
        low = tl.where(least > 0, tl.minimum(low + 1 + (least - 1) * step, high), low)
        high = high_next
    return high


@triton.jit
def _picked(ranks, way, which):
    """Return one row of ranks."""
    return tl.sum(tl.where(way == which, ranks, 0), 0)[None, :]


@triton.jit
def choose_rows(
    adjusted, parts, keys, masses, sums, told, ints, floats, ids, n_vocab, n_tiles,
    HAS_DRAWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Choose a row's token, -1 if none may come, and tell its highest logit; one program a row."""
    r = tl.program_id(0).to(tl.int64)
    most, chosen, value, is_barred = _highest(
        adjusted, parts, ints, floats, ids, r, n_vocab, n_tiles, TILES
    )
    t = tl.arange(0, TILES)
    is_tile = t < n_tiles
    bests = tl.load(parts + (r * n_tiles + t) * PARTS, mask=is_tile, other=-float("inf"))
    tl.store(told + r * 2 + 1, _best(bests))
    if HAS_DRAWS:
        number = tl.load(floats + r * FLOATS + 5)
        if (number >= 0) & (most > -float("inf")):
            edge = FARTHEST
            mass = tl.load(sums + r * n_tiles + t, mask=is_tile, other=0.0)
            if tl.load(ints + r * INTS + 4) != 0:
                row = ((r * n_tiles + t) * TILE)[None, :]
                top_k, top_p = tl.load(ints + r * INTS + 1), tl.load(floats + r * FLOATS + 6)
                if top_k > 0:
                    edge = _edge(
                        keys, masses, row, is_tile[None, :], top_k.to(tl.float64), False, TILE
                    )  # fmt: skip
                if top_p < 1:
                    total = tl.sum(_up_to(keys, masses, row, is_tile[None, :], edge, TILE), 0)
                    edge = _edge(
                        keys, masses, row, is_tile[None, :], top_p * total, True, TILE
                    )  # fmt: skip
                lowest = tl.load(floats + r * FLOATS + 1).to(tl.float32)
                edge = tl.minimum(edge, (0.0 - lowest).to(tl.int32, bitcast=True))
                mass = _up_to(keys, masses, row, is_tile[None, :], edge, TILE)
            before = tl.cumsum(mass, 0)
            aim = number * tl.sum(mass, 0)
            last = tl.max(tl.where(mass > 0, t, 0), 0)
            tile = tl.minimum(tl.min(tl.where((before > aim) & (mass > 0), t, TILES), 0), last)
            done = tl.sum(tl.where(t == tile, before - mass, 0.0), 0)
            token = tile * TILE + tl.arange(0, TILE)
            below = _below(adjusted, ints, floats, ids, r, token, n_vocab, most, value, is_barred)
            weight = _weight(below)
            kept = (token < n_vocab) & (below <= edge) & (weight > 0)
            cumulative = done + tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
            first = tl.min(tl.where(kept & (cumulative > aim), token, n_vocab), 0)
            final = tl.max(tl.where(kept, token, 0), 0)
            chosen = tl.where(first < n_vocab, first, final).to(tl.int64)
    tl.store(told + r * 2, tl.where(most == -float("inf"), -1, chosen).to(tl.float64))


@triton.jit
def _up_to(keys, masses, row, is_tile, edge, TILE: tl.constexpr):
    """Return the mass of each tile up to an edge."""
    none = row.to(tl.int32) * 0
    ranks = _ranks(keys, row, edge, none, none + tl.where(is_tile, TILE, 0))
    found = tl.load(masses + row + ranks - 1, mask=is_tile & (ranks > 0), other=0.0)
    return tl.sum(found, 0)
