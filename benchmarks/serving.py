"""A server in a process of its own, and answers that are streamed from it: the standard library's.

A request counts when it ends as it was asked to: whatever else becomes of it is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KVCELLAR = (sys.executable, "-m", "kvcellar")
OWN = ("TRITON_CACHE_DIR", "TRITON_HOME")
"""Variables that a process sets for itself, and that a server finds its own values for."""


class RequestFailedError(RuntimeError):
    """A request ended with an error, or with another number of tokens than was asked for."""


@contextmanager
def serving(
    options: Sequence[object],
    home: Path,
    *,
    command: Sequence[str] = KVCELLAR,
    patience_s: float = 600.0,
) -> Iterator[int]:
    """Start ``kvcellar serve`` and wait until a model is there; yield its port; end it.

    Args:
        options: of the command.
        home: the folder in which it keeps what it keeps.
        command: what runs kvcellar.
        patience_s: how long it may take to be up.

    Raises:
        RuntimeError: it ended before it was up, or was not up in time; with what it said last.
    """
    given = ["serve", "--port", "0", "--store", str(home / "store"), *map(str, options)]
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, *given],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment | {"KVCELLAR_HOME": str(home)},
        )
        try:
            yield _port(process, said, patience_s)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _port(process: subprocess.Popen[str], said: Any, patience_s: float) -> int:
    """Return the port of a server when a model is there."""
    until = time.monotonic() + patience_s
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(line.rsplit(":", 1)[1]) if ":" in line else 0
    while process.poll() is None and time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return port
        connection.close()
        time.sleep(0.05)
    said.seek(0)
    last = said.read()[-1500:].strip()
    why = "was not up in time" if process.poll() is None else f"ended with {process.returncode}"
    raise RuntimeError(f"the server {why}: {last}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer.

    Attributes:
        first_s: seconds until its first token.
        whole_s: seconds until its end.
        n_tokens: that were sampled.
    """

    first_s: float
    whole_s: float
    n_tokens: int


async def continued(port: int, model: str, prompt: Sequence[int], n_tokens: int) -> Answer:
    """Have a model go on behind the tokens of a prompt, and read what comes.

    Raises:
        RequestFailedError: it ended with an error, or with fewer tokens.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first_s, said, reason = None, 0, None
    try:
        async for data in frames(port, "/v1/completions", body):
            chunk = json.loads(data)
            for choice in chunk["choices"]:
                if choice["text"] and first_s is None:
                    first_s = time.perf_counter() - began
                reason = choice["finish_reason"] or reason
            said = (chunk.get("usage") or {}).get("completion_tokens", said)
    except (OSError, ValueError, EOFError) as error:
        raise RequestFailedError(f"{type(error).__name__}: {error}") from error
    if said != n_tokens or reason != "length" or first_s is None:
        raise RequestFailedError(
            f"{n_tokens} tokens were asked for, and {said} came, which ended with {reason!r}"
        )
    return Answer(first_s, time.perf_counter() - began, said)


async def frames(port: int, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """Yield the data of what a server on this machine streams, as it comes.

    Raises:
        ValueError: the server refused, or the answer ended with an error.
        EOFError: it ended in its middle.
        OSError: nobody listens.
    """
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(data), data)
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status!r} {(await reader.read())[-300:]!r}")
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b'data: {"error"'):
                raise ValueError(line.decode())
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ")
        raise EOFError("the answer ended in its middle")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
