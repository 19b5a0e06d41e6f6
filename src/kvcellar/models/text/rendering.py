"""Chat templates are programs from strangers: they are run elsewhere, for so long and no longer.

Rendering happens in a process of its own, which gives a template what transformers gives it, so
that the text is the same. A template that takes too much ends with its process and raises an error
here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError, TemplateLimitError

CPU_S = 3.0
"""CPU time that one rendering may take. A conversation of a megabyte takes a few hundredths."""

WALL_S = 30.0
"""Limit by the clock, for a machine that is busy or a template that sleeps."""

START_S = 120.0
"""How long the process may take to begin."""

MOST_PROCESSES = 2

_SCRIPT = Path(__file__).with_name("render_worker.py")


class _GoneError(Exception):
    """The process has ended, for no reason that lies in the job."""


class _Renderer:
    """One process that renders, one job at a time."""

    def __init__(self) -> None:
        """Start the process; it is not waited for."""
        few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | few,
            start_new_session=True,
        )
        self._is_ready = False
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        """Answers of the worker, then None when it has ended. A thread moves them here from its
        pipe, since a queue can be waited for with a time limit on every system, a pipe cannot."""
        self._reader = threading.Thread(target=self._read, name="kvcellar-render", daemon=True)
        self._reader.start()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Have a job done.

        Raises:
            TemplateLimitError: it took too much; the process has ended.
            _GoneError: the process had ended before, or was ended by somebody.
        """
        payload = pickle.dumps(job | {"cpu_s": CPU_S})
        assert self._process.stdin is not None
        try:
            if not self._is_ready:
                self._receive(START_S)
                self._is_ready = True
            self._process.stdin.write(struct.pack("<I", len(payload)) + payload)
            self._process.stdin.flush()
            return self._receive(WALL_S)
        except (EOFError, BrokenPipeError) as error:
            if sys.platform != "win32" and self._process.wait() == -signal.SIGPROF:
                raise TemplateLimitError(
                    f"the model's chat template took more than {CPU_S:g} s of computing time for "
                    f"these messages and was stopped; give the model another template"
                ) from None
            raise _GoneError from error
        except TimeoutError:
            raise TemplateLimitError(
                f"the model's chat template took more than {WALL_S:g} s for these messages and was "
                f"stopped; give the model another template"
            ) from None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """Return its next answer.

        Raises:
            TimeoutError: there was none in time.
            EOFError: it has ended.
        """
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if found is None:
            raise EOFError
        return found

    def _read(self) -> None:
        """Put all that it says into the queue, until it ends."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        with contextlib.suppress(EOFError, OSError):
            while True:
                (n,) = struct.unpack("<I", _read_all(pipe, 4))
                self._answers.put(json.loads(_read_all(pipe, n).decode("utf-8", "surrogatepass")))
        self._answers.put(None)


def _read_all(pipe: int, n_bytes: int) -> bytes:
    """Read so many bytes.

    Raises:
        EOFError: there are fewer.
    """
    data = bytearray()
    while len(data) < n_bytes:
        part = os.read(pipe, n_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


class _Renderers:
    """The processes of this one: few, started when they are needed, used again."""

    def __init__(self) -> None:
        self._idle: list[_Renderer] = []
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(MOST_PROCESSES)

    def prepare(self) -> None:
        """Have a process on its way."""
        with self._lock:
            if not self._idle:
                self._idle.append(_Renderer())

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Have a job done by whoever is idle; a process that somebody ended is replaced once."""
        with self._turns:
            for _ in range(2):
                with self._lock:
                    renderer = self._idle.pop() if self._idle else None
                renderer = renderer or _Renderer()
                try:
                    found = renderer.ask(job)
                except _GoneError:
                    renderer.close()
                except BaseException:
                    renderer.close()
                    raise
                else:
                    with self._lock:
                        self._idle.append(renderer)
                    return found
        raise ModelError(
            f"the process that renders chat templates ends at once; does "
            f"`{sys.executable} -c 'import jinja2'` work?"
        )

    def close(self) -> None:
        """End those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for renderer in idle:
            renderer.close()


_renderers = _Renderers()
_of_parents: list[_Renderers] = []


def _after_fork() -> None:
    """Forget the processes, in a child of this one: they are its parent's."""
    global _renderers
    _of_parents.append(_renderers)
    _renderers = _Renderers()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _renderers.close())


def prepare_renderer() -> None:
    """Start the process that renders, so that it is ready when it is asked."""
    _renderers.prepare()


def ask_renderer(job: dict[str, Any]) -> str:
    """Have a template rendered, or read.

    Args:
        job: the arguments of ``render`` of the worker, or ``literals`` or
            ``variables`` with a template of which these are wanted, joined with null characters.

    Raises:
        TemplateLimitError: it takes more time, memory or output than is allowed; it was stopped.
        ModelError: the template raised an error, whose words these are, or nothing can be rendered.
    """
    found = _renderers.ask(job)
    if "exceeded" in found:
        raise TemplateLimitError(
            f"the model's chat template took {found['exceeded']} for these messages and was "
            f"stopped; give the model another template"
        )
    if "error" in found:
        raise ModelError(str(found["error"]))
    return str(found["text"])
