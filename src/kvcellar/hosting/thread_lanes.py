"""Threads for what would hold an event loop: reading, rendering and encoding of long texts.

Short texts are worked on at once, since a thread costs more than they do. Of the long ones one is
worked on at a time, so that what they take beside their own bytes is bounded, and what is between
never waits for them.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvcellar.errors import EngineClosedError

P = ParamSpec("P")
T = TypeVar("T")

SHORT_BYTES = 4 << 10
"""Text that takes an event loop a millisecond or two."""

OTHER_BYTES = SHORT_BYTES + 1
"""What to add for work that waits for another process, such as rendering: never on the loop."""

LONG_BYTES = 256 << 10
"""Text that takes so much time that others should not wait behind it."""

_is_unwanted: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("is_unwanted")


class UnwantedError(Exception):
    """The caller of this work has left."""


def check_wanted() -> None:
    """End work that nobody waits for any more. To be called between its parts.

    Raises:
        UnwantedError: as said; never outside of :meth:`Work.run`.
    """
    event = _is_unwanted.get(None)
    if event is not None and event.is_set():
        raise UnwantedError


class Work:
    """Two lanes of threads. For callers on any event loop."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._short = ThreadPoolExecutor(2, thread_name_prefix="kvcellar-work")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="kvcellar-long")

    async def run(
        self, n_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function, in a thread where it has much to do; return what it returns.

        A caller that is cancelled does not wait for it: it is not begun, or ends where it next
        calls :func:`check_wanted`.

        Args:
            n_bytes: how much text it works on.
            function: what to call.
            args: its arguments.
            kwargs: the same by name.

        Raises:
            EngineClosedError: there are no threads any more.
            Exception: what the function raised.
        """
        if n_bytes <= SHORT_BYTES:
            return function(*args, **kwargs)
        unwanted = threading.Event()
        context = contextvars.copy_context()
        context.run(_is_unwanted.set, unwanted)
        lane = self._long if n_bytes > LONG_BYTES else self._short
        try:
            future = lane.submit(context.run, lambda: function(*args, **kwargs))
        except RuntimeError as error:
            raise EngineClosedError("the server is being stopped; ask the next one") from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            unwanted.set()
            raise

    def close(self) -> None:
        """Begin nothing new, and let go of the threads when they have ended."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
