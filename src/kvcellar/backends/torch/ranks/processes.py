"""Processes of a machine that compute models together: started once, told what to do by pipes.

A pipe is used, and no collective, for all but what the models' own layers exchange: a process that
waits for a command may wait for days, and a pipe that ends says at once that its process has.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvcellar.backends.torch.ranks.commands import Command, Forget, Join
from kvcellar.errors import BackendError, RankLostError

COLLECTIVE = timedelta(minutes=10)
"""How long a rank waits for the others in a collective: as while weights are read."""

_END_S = 5.0
"""How long a process may take to end once its pipe has."""


class Ranks:
    """The ranks of this process, which leads them as rank 0; for several threads.

    Attributes:
        was_killed: whether a process was ended by something else than an error of its own.
    """

    def __init__(self, n_ranks: int, kind: str) -> None:
        """Start the others and join them in one process group.

        Args:
            n_ranks: how many, this process among them.
            kind: of their devices, ``cpu`` or ``cuda``.

        Raises:
            BackendError: this process is in a process group already, or one did not start.
        """
        if dist.is_initialized():
            raise BackendError(
                "this process is in a process group of torch.distributed already, and one process "
                "has one; load a model with tp in another process"
            )
        self.n_ranks, self.kind = n_ranks, kind
        self._lock = threading.RLock()
        self.was_killed = False
        self._lost: RankLostError | None = None
        self._is_closed = False
        self._n_numbers = 0
        self._forgotten: deque[Forget] = deque()
        self._folder = Path(tempfile.mkdtemp(prefix="kvcellar-ranks-"))
        self._others = [_start(rank, kind) for rank in range(1, n_ranks)]
        atexit.register(self.close)
        try:
            for process in self._others:
                self._receive(process)  # it has imported all that it needs
            n_threads = max(1, torch.get_num_threads() // n_ranks) if kind == "cpu" else 1
            join = Join(self._folder / "store", n_ranks, n_threads)
            for process in self._others:
                _send(process, join)
            join_group(join, 0, kind)
        except BaseException as error:
            self.close()
            raise self._said(error) from error

    @property
    def is_closed(self) -> bool:
        """True if they have ended, or cannot go on."""
        return self._is_closed

    @property
    def lost(self) -> RankLostError | None:
        """Reason why they cannot go on; None: they can, as far as their processes are there."""
        ended = self._ended()
        return _ended_error(self.n_ranks, ended) if self._lost is None and ended else self._lost

    def new_number(self) -> int:
        """Return a number for a model or a cache that no other one has."""
        with self._lock:
            self._n_numbers += 1
            return self._n_numbers

    def forget(self, kind: str, number: int) -> None:
        """Have the others let go of a cache or a model, with the next command; never waits."""
        self._forgotten.append(Forget(kind, number))

    @contextmanager
    def together(self, command: Command | Callable[[int], Command]) -> Iterator[None]:
        """Tell the others what to do while this process does its part in the block.

        What fails inside of it leaves the others in the middle of something: then all are ended.

        Args:
            command: the same for all, or a function of a rank.

        Raises:
            RankLostError: a process has ended, now or before, or cannot go on.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                while self._forgotten:
                    self._tell(self._forgotten.popleft())
                self._tell(command)
                yield
            except BaseException as error:
                self._lost = self._said(error)
                self.close()
                if isinstance(error, Exception):
                    raise self._lost from error
                raise

    def answers(self) -> list[Any]:
        """Return what each of the others answers to a command that is ``together``'s, by rank."""
        return [self._receive(process) for process in self._others]

    def close(self) -> None:
        """End the other processes; models and caches that they have a part of are lost."""
        self._is_closed = True
        self._lost = self._lost or RankLostError("the ranks of this model were closed")
        atexit.unregister(self.close)
        for process in self._others:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()  # it ends at the end of its commands
        for process in self._others:
            _end(process)
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, command: Command | Callable[[int], Command]) -> None:
        for rank, process in enumerate(self._others, 1):
            _send(process, command(rank) if callable(command) else command)

    def _receive(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout is not None
        return pickle.load(process.stdout)

    def _ended(self) -> list[tuple[int, int]]:
        """Return the ranks whose process has ended, and its exit code."""
        found = ((rank, process.poll()) for rank, process in enumerate(self._others, 1))
        return [(rank, code) for rank, code in found if code is not None]

    def _said(self, error: BaseException) -> RankLostError:
        """Make the error for a model whose ranks cannot go on after another one."""
        until = time.monotonic() + (_END_S if _is_of_others(error) else 0.0)
        ended = self._ended()
        while not ended and time.monotonic() < until:
            time.sleep(0.02)
            ended = self._ended()
        if ended:
            self.was_killed = any(code not in (0, 1) for _, code in ended)
            return _ended_error(self.n_ranks, ended)
        return RankLostError(
            f"rank 0 of {self.n_ranks} failed in the middle of what all of them do "
            f"({type(error).__name__}: {error}), and they cannot go on; load the model again, or "
            f"start the program again"
        )


def _ended_error(n_ranks: int, ended: Sequence[tuple[int, int]]) -> RankLostError:
    """Make the error for ranks that have ended, each with its exit code."""
    said = ", ".join(f"rank {rank} (exit code {code})" for rank, code in ended)
    return RankLostError(
        f"of {n_ranks} ranks some have ended: {said}; the others cannot go on without them; load "
        f"the model again, or start the program again"
    )


def _is_of_others(error: BaseException) -> bool:
    """Return true for errors that the end of another process may have caused."""
    of_others = EOFError | OSError | RuntimeError | pickle.UnpicklingError
    return isinstance(error, of_others) or isinstance(error.__cause__, of_others)


def _start(rank: int, kind: str) -> subprocess.Popen[bytes]:
    """Start one that follows; it answers once it is ready."""
    source = str(Path(__file__).parents[4])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, "-m", "kvcellar.backends.torch.ranks.following", str(rank), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | own,
    )


def _send(process: subprocess.Popen[bytes], command: Command) -> None:
    assert process.stdin is not None
    pickle.dump(command, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def join_group(join: Join, rank: int, kind: str) -> None:
    """Join the process group of all ranks; every one of them does so at the same time.

    Raises:
        RuntimeError: the others did not come.
    """
    names: Sequence[tuple[int, str]] = socket.if_nameindex() if kind == "cpu" else ()
    loopback = next((name for _, name in names if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # nobody else may knock
    if kind == "cpu":
        torch.set_num_threads(join.n_threads)
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        init_method=join.path.as_uri(),
        rank=rank,
        world_size=join.n_ranks,
        timeout=COLLECTIVE,
        device_id=None if kind == "cpu" else torch.device("cuda", rank),
    )


_current: Ranks | None = None
_current_lock = threading.Lock()


def ranks_of(n_ranks: int, kind: str) -> Ranks:
    """Return the ranks of this process, which are started with the first model that is divided.

    Raises:
        BackendError: another model has another number of them, or they do not start.
    """
    global _current
    with _current_lock:
        if _current is None or _current.is_closed:
            _current = Ranks(n_ranks, kind)
        elif (_current.n_ranks, _current.kind) != (n_ranks, kind):
            raise BackendError(
                f"models of this process are divided among {_current.n_ranks} ranks on "
                f"{_current.kind}, and {n_ranks} on {kind} were asked for; ask for the same, or "
                f"use another process"
            )
        return _current
