"""From a configuration to a server that listens, and back: stopped, with every agent on disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TextIO

import uvicorn

from kvcellar.errors import ConfigError
from kvcellar.server.app import create_app
from kvcellar.server.commands.presence import held_store
from kvcellar.server.config import ServerConfig
from kvcellar.server.front.connections import Connections, ConnectionsConfig
from kvcellar.server.front.entrance import MOST_HEADER_BYTES
from kvcellar.server.state.models import ServedModels
from kvcellar.server.state.service import Service
from kvcellar.store import Store

log = logging.getLogger("kvcellar.server")

_BACKLOG = 512
_TRIES = 16
"""Free ports that are tried until one is free at both addresses."""

MAX_WAITING = 32
"""Threads that wait for a disk on behalf of requests; one that is slow must not keep the others."""

_LAST_WORDS_S = 2.0
"""In which clients have to read why their answers have ended; then they are cut off."""

_HURRY_S = 0.5
"""The same, where a second signal says that nobody wants to wait."""


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken by another program, perhaps by another kvcellar; "
                f"stop it, or give another --port"
            ) from error
        raise ConfigError(
            f"cannot listen on {host!r} port {port}: {error.strerror or error}; give an address of "
            f"this machine as --host"
        ) from error
    return listener


@contextmanager
def listeners(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Hold sockets that listen, all on one port: for ``localhost`` one for each of its addresses.

    Clients that look ``localhost`` up get 127.0.0.1 or ::1, as their system likes.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    if host.lower() != "localhost":
        with contextlib.closing(listen(host, port)) as listener:
            yield [listener]
        return
    for n_left in reversed(range(_TRIES)):
        first = listen("127.0.0.1", port)
        try:
            second = [listen("::1", first.getsockname()[1])] if _has_ipv6() else []
        except ConfigError:
            first.close()
            if port or not n_left:
                raise
            continue  # a port that was free there is taken here: another
        try:
            yield [first, *second]
        finally:
            for one in (first, *second):
                one.close()
        return


def _has_ipv6() -> bool:
    """Return true if this machine has ::1."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


class Server(uvicorn.Server):
    """uvicorn, which tells the service when it is to stop and closes it when it has.

    Use ``serve`` in a program, ``run_in_loop`` where a loop is there already.
    """

    def __init__(self, service: Service) -> None:
        """Around a service."""
        config = service.config
        self.connections = Connections(config)
        super().__init__(
            ConnectionsConfig(
                create_app(service),
                self.connections,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=math.ceil(config.shutdown_s + _LAST_WORDS_S),
                h11_max_incomplete_event_size=2 * MOST_HEADER_BYTES,
                timeout_keep_alive=config.idle_timeout_s,
                ws="none",
                server_header=False,
            )
        )
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal does not wait for what runs."""
        assert self._loop is not None, "signals are handled while the loop runs"
        self._loop.call_soon_threadsafe(self.hurry if self.should_exit else self.stop)

    def stop(self) -> None:
        """Stop, from any code on the server's loop: answers have ``shutdown_s`` to end."""
        if not self.should_exit:
            self.should_exit = True
            self._service.begin_closing()
            loop = asyncio.get_running_loop()
            loop.call_later(self._service.config.shutdown_s, self._service.end_answers)

    def hurry(self) -> None:
        """Stop now, from any code on the server's loop: answers end with an error."""
        self.should_exit = True
        self._service.end_answers()
        asyncio.get_running_loop().call_later(_HURRY_S, self._wait_no_longer)

    def _wait_no_longer(self) -> None:
        self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own would end the process by the signal before the agents are on disk."""
        yield

    async def run_in_loop(self, *listening: socket.socket) -> None:
        """Serve until it is stopped, then publish every agent and let go of the models."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(
            ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="kvcellar-waiting")
        )
        with self._stopped_by_signals():
            try:
                await self.serve(sockets=list(listening))
                await self._service.kept_is_done()
            finally:
                await asyncio.to_thread(self._service.close)

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the server, in the main thread, until all is saved."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    config: ServerConfig,
    store: Store,
    make_models: Callable[[], ServedModels],
    *,
    on_ready: Callable[[str, Service], None] | None = None,
) -> None:
    """Serve until a signal says stop.

    Args:
        config: policy.
        store: of the agents; the caller's to close.
        make_models: opens what is offered.
        on_ready: called with the address when requests are taken.

    Raises:
        ConfigError: the port is taken.
        StoreError: another server has the store.
    """
    with listeners(config.host, config.port) as found:
        port = found[0].getsockname()[1]
        name = f"[{config.host}]" if ":" in config.host else config.host
        url = f"http://{name}:{port}"
        runner = asyncio.Runner(loop_factory=_loop_factory())
        config = replace(config, folder_token=secrets.token_urlsafe(32))
        with held_store(store.path, url, config.folder_token), runner:
            runner.run(_serve(config, store, make_models(), found, url, on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which wakes up for less, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


async def _serve(
    config: ServerConfig,
    store: Store,
    models: ServedModels,
    listening: Sequence[socket.socket],
    url: str,
    on_ready: Callable[[str, Service], None] | None,
) -> None:
    service = Service(config, store, models)
    server = Server(service)
    loading = asyncio.create_task(_preload(service))
    if on_ready is not None:
        on_ready(url, service)
    try:
        await server.run_in_loop(*listening)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def _preload(service: Service) -> None:
    """Load the first model; what is wrong with it is seen in ``/health`` and said once."""
    try:
        async with service.models.registry.use(service.models.default):
            pass
    except Exception as error:
        log.error(json.dumps({"event": "model failed to load", "error": str(error)}))


class _Lines(logging.Formatter):
    """One line of JSON for each record, whoever it is from."""

    def format(self, record: logging.LogRecord) -> str:
        """Our own records are JSON already."""
        text = record.getMessage()
        line = json.loads(text) if record.name == log.name else {"event": text}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({"level": record.levelname.lower(), **line})


class _ToStderr(logging.StreamHandler[TextIO]):
    """To what is standard error when there is something to say. One for the whole process."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_Lines())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_HANDLER = _ToStderr()
_OTHERS = ("uvicorn", "kvcellar.engine", "kvcellar.agents", "kvcellar.store")


def log_to_stderr() -> None:
    """Log a line of JSON per request, and for what else there is to say. May be called twice."""
    others = (logging.getLogger(name) for name in _OTHERS)
    for logger, least in ((log, logging.INFO), *((other, logging.WARNING) for other in others)):
        logger.addHandler(_HANDLER)
        logger.setLevel(least)
        logger.propagate = False
