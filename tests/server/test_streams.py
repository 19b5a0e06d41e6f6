"""Several sources are read as one stream, and end together."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from kvcellar.server.stream import streams
from kvcellar.server.stream.streams import MergedStream
from tests.server.live import PATIENCE_S


async def counted(n, closed, *, error=None):
    """Numbers up to ``n``; then an error, if one is given. Says where it was closed."""
    try:
        for i in range(n):
            yield i
            await asyncio.sleep(0)
        if error is not None:
            raise error
    finally:
        closed.append(n)


async def endless(closed):
    """Items until it is closed."""
    async for item in counted(1 << 30, closed):
        yield item


async def all_of(stream):
    """Everything that a stream has."""
    async with asyncio.timeout(PATIENCE_S), stream as items:
        return [item async for item in items]


def test_items_come_in_the_order_of_their_source_with_its_number():
    async def read():
        closed = []
        return await all_of(MergedStream.of(*(counted(n, closed) for n in (3, 0, 2)))), sorted(
            closed
        )

    found, closed = asyncio.run(read())
    assert closed == [0, 2, 3]
    assert [item for number, item in found if number == 0] == [0, 1, 2]
    assert [item for number, item in found if number == 2] == [0, 1]
    assert len(found) == 5


def test_where_one_source_fails_all_end_and_the_error_is_told_behind_what_came_before():
    async def read():
        closed, found = [], []
        stream = MergedStream.of(endless(closed), counted(2, closed, error=ValueError("no more")))
        with pytest.raises(ValueError, match="no more"):
            async with asyncio.timeout(PATIENCE_S), stream:
                async for number, item in stream:
                    found.append((number, item))
        return found, closed

    found, closed = asyncio.run(read())
    assert {(1, 0), (1, 1)} <= set(found) and len(closed) == 2


def test_the_first_item_is_waited_for_and_still_to_be_taken():
    async def read():
        stream = MergedStream.of(counted(2, []))
        return await stream.opened(PATIENCE_S), await all_of(stream)

    assert asyncio.run(read()) == (0, [(0, 0), (0, 1)])


def test_an_error_before_the_first_item_is_raised_where_it_is_waited_for():
    async def read():
        async with MergedStream.of(counted(0, [], error=ValueError("refused"))) as stream:
            await stream.opened(PATIENCE_S)

    with pytest.raises(ValueError, match="refused"):
        asyncio.run(read())


def test_a_first_item_that_does_not_come_in_time_comes_later():
    async def read():
        is_wanted = asyncio.Event()

        async def late():
            await is_wanted.wait()
            yield "late"

        stream = MergedStream.of(late())
        first = await stream.opened(0.001)
        stream.nudge()
        is_wanted.set()
        return first, await all_of(stream)

    assert asyncio.run(read()) == (None, [(0, None), (0, "late")])


def test_what_is_around_the_sources_is_left_when_they_end_and_when_the_stream_is_closed():
    async def read(is_read):
        said = []

        @asynccontextmanager
        async def around():
            said.append("in")
            try:
                yield [counted(3, said) if is_read else endless(said)]
            finally:
                said.append("out")

        stream = MergedStream(around())
        if is_read:
            await all_of(stream)
        else:
            await stream.opened(PATIENCE_S)
            await stream.close()
        return said

    assert asyncio.run(read(True)) == ["in", 3, "out"]
    said = asyncio.run(read(False))
    assert (said[0], said[-1], len(said)) == ("in", "out", 3)


def test_sources_wait_for_somebody_who_does_not_take_their_items(monkeypatch):
    monkeypatch.setattr(streams, "_AHEAD", 8)

    async def read():
        said = 0

        async def eager():
            nonlocal said
            while True:
                said += 1
                yield said

        async with MergedStream.of(eager(), eager(), eager()) as stream:
            for _ in range(200):
                await asyncio.sleep(0)
            before = said
            for _ in range(20):
                await anext(stream)
            for _ in range(200):
                await asyncio.sleep(0)
            return before, said

    before, after = asyncio.run(read())
    assert 8 <= before <= 8 + 3, "one more of each source"
    assert before + 20 - 3 <= after <= before + 20 + 3
