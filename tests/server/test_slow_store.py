"""The event loop waits for no disk and for no lock of the engine's thread; nor do others' streams.

What is slow takes as long as it takes the engine, the loop and a stream to go on a while beside it:
who waits for it waits for ever, however fast the machine is.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.routing import APIRoute

from kvcellar.agents.kv import residence
from kvcellar.server.routes import observe, viewer
from kvcellar.store import Store
from kvcellar.store.disk import reference_files
from kvcellar.store.disk.catalogue import Catalogue
from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.journal import Journal
from kvcellar.store.values import blocks
from tests.server.live import PATIENCE_S, Live, serving

pytestmark = pytest.mark.slow

N_ROUNDS = 10
"""Times that everybody else goes on while something slow lasts."""

MOST_ROUNDS = 200
"""Times that everybody else goes on before nothing is slow any more; who waited did so alone."""

LOOP = "server"
"""The name of the thread that the server's loop runs in."""

DISK = (
    (Catalogue, "_select"),
    (Catalogue, "_writing"),
    (Journal, "_ask"),
    (Journal, "_changing"),
    (Folder, "reference_paths"),
    (Folder, "write"),
    (Folder, "settle"),
    (reference_files, "read_file"),
    (blocks, "read_file"),
    (blocks, "read_header"),
)
"""All that reads or writes files of a store."""

WRITES = {"_writing", "write"}

VERBS = [
    (Store, name)
    for name, value in vars(Store).items()
    if callable(value) and not name.startswith("_")
]
"""All that a store can be asked, whether it needs the disk or not."""


class Streaming:
    """One stream after the other, read as its tokens come."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._is_over = False
        self._changed = threading.Condition()
        self._n_lines = 0
        self._is_begun = False

    def run(self) -> None:
        """Read streams until ``stop``."""
        body = {"prompt": "def", "max_tokens": 400, "stream": True, "ignore_eos": True}
        while not self._is_over:
            with self._live.http.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_lines():
                    self._tell(True)
                    if self._is_over:
                        break
            self._tell(False)

    def stop(self) -> None:
        """End the stream that is being read, and begin no other."""
        self._is_over = True

    def goes_on(self) -> bool:
        """Wait for the next line of a stream that has begun; false where it does not come."""
        with self._changed:
            n = self._n_lines
            return self._changed.wait_for(
                lambda: self._n_lines > n or not self._is_begun, PATIENCE_S
            )

    def begins(self) -> bool:
        """Wait until a stream has begun."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_begun, PATIENCE_S)

    def _tell(self, is_begun: bool) -> None:
        with self._changed:
            self._n_lines += 1
            self._is_begun = is_begun
            self._changed.notify_all()


class Watched:
    """Access that lasts until engine, loop and stream have gone on, and notes who called it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._is_watching = False
        self._rounds: int | None = None
        """How often everybody has gone on; None while nothing is slow."""
        self._changed = threading.Condition()
        self.stuck = ""
        """Where everybody was when somebody did not go on."""
        self.callers: dict[str, set[str]] = {}

    def names(self) -> set[str]:
        """Return what has been called while it was slow, by whichever thread."""
        return {name for did in list(self.callers.values()) for name in list(did)}

    @contextmanager
    def slow(self, *others: Callable[[], object]) -> Iterator[None]:
        """Have what is watched last until all of these have returned some times.

        One that takes too long, or returns false, is stuck, and nothing is slow any more.
        """
        self._is_watching, self._rounds = True, 0
        rounds = threading.Thread(target=self._go_round, args=(others,))
        rounds.start()
        try:
            yield
        finally:
            self._is_watching = False
            self._end()
            rounds.join(2 * PATIENCE_S)

    def watch(self, owner: Any, name: str, *, is_slow: bool = True) -> None:
        """Have a function noticed where it is called, and slow."""
        call = getattr(owner, name)

        def noticed(*given: Any, **named: Any) -> Any:
            if self._is_watching:
                who = threading.current_thread().name
                self.callers.setdefault(who, set()).add(name)
                if is_slow and who != LOOP:
                    self._last()
            return call(*given, **named)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        self._patch.setattr(owner, name, staticmethod(noticed) if is_static else noticed)

    def _go_round(self, others: tuple[Callable[[], object], ...]) -> None:
        for _ in range(MOST_ROUNDS):
            for other in others:
                try:
                    goes_on = other() is not False
                except TimeoutError:
                    goes_on = False
                if not goes_on:
                    self.stuck = everybody()
                    self._end()
                    return
            with self._changed:
                if self._rounds is None:
                    return
                self._rounds += 1
                self._changed.notify_all()
        self._end()

    def _end(self) -> None:
        """Let everything be as quick as it is."""
        with self._changed:
            self._rounds = None
            self._changed.notify_all()

    def _last(self) -> None:
        """Wait until everybody else has gone on so often."""
        with self._changed:
            until = (self._rounds or 0) + N_ROUNDS
            self._changed.wait_for(lambda: self._rounds is None or self._rounds >= until)


def everybody() -> str:
    """Return where each thread of the process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(
        f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame)[-4:])}"
        for ident, frame in frames
    )


def loop_of(live: Live) -> Callable[[], object]:
    """Return what waits until the server's loop has gone round."""
    return lambda: live.run(asyncio.sleep(0))


def engine_of(live: Live) -> Callable[[], object]:
    """Return what waits until the engine's thread is between two steps."""
    host = live.host()
    return lambda: host.service.run(lambda _: None).result(PATIENCE_S)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }


NAMES = ("poet", "sleeper", "rewound", "forked", "paused", "deleted", "kept", "waiting", "undone")


def prepare(live: Live) -> dict[str, Any]:
    """Make agents, a stored response and an exported file, for requests to meet."""
    for name in NAMES:
        live.post("/v1/agents", {"id": name})
        live.post(f"/v1/agents/{name}/generate", {"text": f"I am {name}. " * 30, "max_tokens": 4})
    live.post("/v1/agents/kept/fork", {"id": "sibling"})
    live.post("/v1/agents/undone/rewind", {})
    exported = live.http.get("/v1/agents/poet/export")
    assert exported.status_code == 200
    stored = live.post("/v1/responses", {"input": "Store it.", "max_output_tokens": 4})
    gone = live.post("/v1/responses", {"input": "Forget it.", "max_output_tokens": 4})
    live.post("/v1/agents/sleeper/pause")
    return {"file": exported.content, "stored": stored["id"], "gone": gone["id"]}


def first_line(live: Live, path: str, body: Any = None) -> str:
    """The first line of a stream, which is left then."""
    method = "GET" if body is None else "POST"
    with live.http.stream(method, path, json=body) as response:
        return next(response.iter_lines())


def asks(live: Live, ready: dict[str, Any], known: list[Any]) -> dict[str, Callable[[], Any]]:
    """Every route, by what it is declared as, and a way to use it that looks into the store."""
    following = [*known, {"role": "user", "content": "And then?"}]
    post, get, http = live.post, live.get, live.http
    agent, stored = "/v1/agents/{agent_id}", f"/v1/responses/{ready['stored']}"
    response = "/v1/responses/{response_id}"
    named = {"x-agent-id": "poet"}
    imported = {"content": ready["file"], "params": {"id": "imported"}}
    return {
        "GET /": lambda: http.get("/"),
        "GET /viewer/{name:path}": lambda: http.get("/viewer/main.js"),
        "GET /events": lambda: first_line(live, "/events"),
        "GET /health": lambda: get("/health"),
        "GET /ready": lambda: http.get("/ready"),
        "GET /metrics": lambda: http.get("/metrics"),
        "GET /v1/cache": lambda: get("/v1/cache"),
        "GET /v1/models": lambda: get("/v1/models"),
        "GET /v1/models/{name:path}": lambda: get("/v1/models/demo"),
        "POST /v1/chat/completions": lambda: post("/v1/chat/completions", chat("New. " * 30)),
        "POST /v1/chat/completions, going on": lambda: post(
            "/v1/chat/completions", {**chat(""), "messages": following}
        ),
        "POST /v1/chat/completions, named": lambda: post(
            "/v1/chat/completions", chat("More. " * 60), headers=named
        ),
        "POST /v1/completions": lambda: post("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        "POST /v1/messages": lambda: post("/v1/messages", chat("Hello. " * 30)),
        "POST /v1/messages/count_tokens": lambda: post(
            "/v1/messages/count_tokens", {"messages": following}, headers=named
        ),
        "POST /v1/responses": lambda: post(
            "/v1/responses",
            {"input": "On.", "max_output_tokens": 4, "previous_response_id": ready["stored"]},
        ),
        f"GET {response}": lambda: get(stored),
        f"GET {response}/input_items": lambda: get(f"{stored}/input_items"),
        f"POST {response}/cancel": lambda: http.post(f"{stored}/cancel"),
        f"DELETE {response}": lambda: http.delete(f"/v1/responses/{ready['gone']}"),
        "GET /v1/agents": lambda: get("/v1/agents"),
        "GET /v1/agents, dropped": lambda: get("/v1/agents?dropped=true"),
        "GET /v1/agents, search": lambda: get("/v1/agents?search=poet"),
        "POST /v1/agents": lambda: post("/v1/agents", {"id": "new", "system": "Be kind."}),
        "POST /v1/agents/import": lambda: http.post("/v1/agents/import", **imported),
        "GET /v1/agents/{agent_id:path}": lambda: get("/v1/agents/poet"),
        "GET /v1/agents/{agent_id:path}, nobody": lambda: http.get("/v1/agents/nobody"),
        "DELETE /v1/agents/{agent_id:path}": lambda: http.delete("/v1/agents/deleted"),
        f"GET {agent}/live": lambda: first_line(live, "/v1/agents/sleeper/live"),
        f"GET {agent}/why": lambda: get("/v1/agents/poet/why"),
        f"GET {agent}/export": lambda: http.get("/v1/agents/waiting/export"),
        f"POST {agent}/fork": lambda: post("/v1/agents/forked/fork", {"id": "child"}),
        f"POST {agent}/rewind": lambda: post("/v1/agents/rewound/rewind", {}),
        f"POST {agent}/rename": lambda: post("/v1/agents/kept/rename", {"title": "Kept"}),
        f"POST {agent}/stop": lambda: http.post("/v1/agents/poet/stop"),
        f"POST {agent}/keep": lambda: post("/v1/agents/kept/keep"),
        f"POST {agent}/undo": lambda: post("/v1/agents/undone/undo"),
        f"POST {agent}/pause": lambda: post("/v1/agents/paused/pause"),
        f"POST {agent}/resume": lambda: post("/v1/agents/poet/resume"),
        f"POST {agent}/wait": lambda: http.post("/v1/agents/waiting/wait"),
        f"POST {agent}/finish": lambda: post("/v1/agents/forked/finish"),
        f"POST {agent}/generate": lambda: post(
            "/v1/agents/sleeper/generate", {"text": "Wake up.", "max_tokens": 4}
        ),
    }


def routes_of(live: Live) -> set[str]:
    """Every route that the server has, as ``METHOD path``."""
    from kvcellar.server.routes import agents, anthropic, completions, openai, responses

    modules = (openai, completions, responses, anthropic, agents, observe, viewer)
    return {
        f"{method} {route.path}"
        for module in modules
        for route in module.router.routes
        if isinstance(route, APIRoute)  # conversations, which are included, go the way of responses
        for method in route.methods
        if method != "HEAD"
    }


def use_everything(
    live: Live, watched: Watched, what: dict[str, Any], behind: Set[str] = frozenset()
) -> None:
    """Use every route at one time.

    What is called ``behind`` the answers, by the store's own thread, is waited for.
    """
    with ThreadPoolExecutor(len(what)) as pool:
        running = {name: pool.submit(ask) for name, ask in what.items()}
        for name, done in running.items():
            found = done.result(4 * PATIENCE_S)
            assert getattr(found, "status_code", 200) < 500, (name, found.text)
    live.until(lambda: watched.names() >= behind, "what is written behind")


@pytest.fixture
def live(tmp_path: Any) -> Iterator[tuple[Live, dict[str, Any]]]:
    """A server that has been started again, and a way to use each of its routes."""
    with serving(tmp_path) as before:
        ready = prepare(before)
    with serving(tmp_path) as after:
        after.http.timeout = 4 * PATIENCE_S
        question = chat("What is a cellar?")
        answer = after.post("/v1/chat/completions", question)
        known = [*question["messages"], answer["choices"][0]["message"]]
        yield after, asks(after, ready, known)


def test_nobody_but_who_asks_waits_for_a_store_whose_every_access_is_slow(
    live: tuple[Live, dict[str, Any]], watched: Watched
) -> None:
    server, what = live
    assert {name.partition(",")[0] for name in what} == routes_of(server)
    for owner, name in VERBS:
        watched.watch(owner, name, is_slow=False)
    for owner, name in DISK:
        watched.watch(owner, name)
    stream = Streaming(server)
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream.run)
        try:
            assert stream.begins()
            with watched.slow(loop_of(server), engine_of(server), stream.goes_on):
                use_everything(server, watched, what, WRITES)
        finally:
            stream.stop()
        streaming.result(PATIENCE_S)
    on_disk = {name for _, name in DISK}
    callers = watched.callers
    assert not watched.stuck, watched.stuck
    assert not callers.get(LOOP), f"on the event loop: {sorted(callers[LOOP])}"
    in_engine = {name: did & on_disk for name, did in callers.items() if "engine" in name}
    assert not any(in_engine.values()), in_engine
    assert watched.names() >= on_disk - {"read_header"}


def test_the_loop_does_not_wait_for_the_engines_thread_which_copies_rows_under_its_lock(
    live: tuple[Live, dict[str, Any]], watched: Watched
) -> None:
    server, what = live
    watched.watch(residence, "save_history")
    with watched.slow(loop_of(server)):
        use_everything(server, watched, what)
    assert any("engine" in name for name in watched.callers), watched.callers
    assert not watched.stuck, watched.stuck
    assert LOOP not in watched.callers
