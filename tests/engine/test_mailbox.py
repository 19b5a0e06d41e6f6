"""Items wait in order for one reader, who may leave without losing any."""

from __future__ import annotations

import asyncio

from kvcellar.engine.mailbox import Mailbox


def test_items_come_in_order_before_and_while_somebody_waits():
    async def main() -> list[int]:
        box: Mailbox[int] = Mailbox()
        box.put(1)
        box.put(2)
        assert len(box) == 2
        heard = [await box.get(), await box.get()]
        waiting = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(3)
        box.put(4)
        return [*heard, await waiting, await box.get()]

    assert asyncio.run(main()) == [1, 2, 3, 4]


def test_a_reader_that_is_cancelled_takes_nothing_along():
    async def main() -> int:
        box: Mailbox[int] = Mailbox()
        waiting = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(7)  # it is about to be woken
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return await box.get()

    assert asyncio.run(main()) == 7


def test_a_writer_waits_until_enough_was_taken():
    async def main() -> None:
        box: Mailbox[int] = Mailbox()
        for i in range(3):
            box.put(i)
        writer = asyncio.create_task(box.shrunk(2))
        await asyncio.sleep(0)
        await box.get()
        await asyncio.sleep(0)
        assert not writer.done(), "two still wait"
        await box.get()
        await writer
        assert len(box) == 1

    asyncio.run(main())
