"""The writer's thread: jobs in their order, bounds that hold, and nobody who waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvcellar.errors import StoreError
from kvcellar.store import writer as writers
from kvcellar.store.writer import NICENESS, Writer

ROOM = 100


@pytest.fixture
def told() -> list[BaseException]:
    return []


@pytest.fixture
def writer(told: list[BaseException]) -> Iterator[Writer]:
    opened = Writer(ROOM, told.append)
    yield opened
    opened.close()


class Gate:
    """A job that runs until it is let go."""

    def __init__(self, writer: Writer, size_bytes: int = 0) -> None:
        self.go, self.runs = threading.Event(), threading.Event()
        assert writer.offer(self, size_bytes)
        assert self.runs.wait(60)

    def __call__(self) -> None:
        self.runs.set()
        assert self.go.wait(60)


def test_jobs_run_in_their_order_and_the_bytes_of_those_that_wait_or_run_are_bounded(
    writer: Writer,
) -> None:
    done: list[int] = []
    gate = Gate(writer, 40)
    assert (writer.queued_bytes, writer.n_free_bytes) == (40, 60)
    assert not writer.offer(lambda: done.append(0), 61)
    assert writer.offer(lambda: done.append(1), 60)
    assert (writer.queued_bytes, writer.n_free_bytes) == (100, 0)
    assert not writer.offer(lambda: done.append(2), 1)
    assert writer.offer(lambda: done.append(3), 0)
    gate.go.set()
    assert writer.call(lambda: done.append(4)) is None
    assert done == [1, 3, 4]
    assert (writer.queued_bytes, writer.n_free_bytes) == (0, ROOM)


def test_what_a_job_raises_is_told_and_the_next_one_runs(
    writer: Writer, told: list[BaseException]
) -> None:
    assert writer.offer(lambda: 1 / 0, 90)  # type: ignore[arg-type, return-value]
    assert writer.call(lambda: 7) == 7
    assert [type(error) for error in told] == [ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        writer.call(lambda: 1 / 0)
    assert len(told) == 1 and writer.queued_bytes == 0


def test_that_nobody_can_be_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def torn(_: BaseException) -> None:
        raise RuntimeError

    writer = Writer(ROOM, torn)
    writer.offer(lambda: 1 / 0, 0)  # type: ignore[arg-type, return-value]
    writer.call(lambda: None)
    (line,) = caplog.records
    assert line.name == "kvcellar.store" and "ZeroDivisionError" in line.getMessage()
    assert writer.close(60)


def test_a_call_from_the_writers_own_thread_runs_at_once(writer: Writer) -> None:
    assert not writer.is_here
    assert writer.call(lambda: (writer.is_here, writer.call(lambda: 5))) == (True, 5)


def test_a_call_waits_as_long_as_it_was_told(writer: Writer) -> None:
    gate, done = Gate(writer), threading.Event()
    with pytest.raises(StoreError, match=r"still writing after 0.01 s; wait longer"):
        writer.call(done.set, 0.01)
    gate.go.set()
    assert done.wait(60), "it happened all the same"

    def late() -> None:
        raise TimeoutError("of the job's own")

    with pytest.raises(TimeoutError, match="own"):
        writer.call(late, 60)


def test_a_writer_that_closes_runs_what_is_queued_and_takes_no_more(writer: Writer) -> None:
    gate, done = Gate(writer), threading.Event()
    assert writer.offer(done.set, ROOM)
    assert not writer.is_closed and not writer.close(0.01)
    assert writer.is_closed and not writer.offer(done.clear, 0)
    with pytest.raises(StoreError, match="the store is closed; open it again"):
        writer.call(done.clear)
    gate.go.set()
    assert writer.close(60) and writer.close()
    assert done.is_set() and not writer._thread.is_alive()
    assert not writer._finalizer.alive


def test_who_waits_for_a_job_that_gets_no_further_is_told(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not writer.is_stuck
    writer.goes_on()
    assert writer._since_s is None, "no job runs"
    gate = Gate(writer)
    assert not writer.is_stuck
    over = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(writers, "STUCK_S", 0.2)
        with pytest.raises(StoreError, match=r"one file for 0.2 s.*see whether its disk answers"):
            writer.wait_for(over)
        assert writer.is_stuck
    since_s = writer._since_s
    assert since_s is not None and since_s + 0.2 <= time.monotonic()
    writer.goes_on()
    assert writer._since_s is not None and writer._since_s >= since_s + 0.2, "it got further"
    assert not writer.is_stuck
    over.set()
    writer.wait_for(over)
    gate.go.set()
    writer.call(lambda: None)
    assert not writer.is_stuck


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own niceness is Linux's")
def test_those_that_compute_go_first(writer: Writer) -> None:
    def mine() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    ours = mine()
    assert writer.call(mine) == max(ours, NICENESS) and mine() == ours


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own niceness is Linux's")
def test_where_nobody_may_go_first_all_is_written_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    writer = Writer(ROOM, print)
    assert writer.call(lambda: 5, 60) == 5 and writer.close(60)


def test_what_was_taken_is_run_though_the_interpreter_ends_without_a_close() -> None:
    code = (
        "import time\n"
        "from kvcellar.store.writer import Writer\n"
        "writer = Writer(9, print)\n"
        "writer.offer(lambda: time.sleep(0.2), 0)\n"
        "writer.offer(lambda: print('written', flush=True), 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "written\n", "")
