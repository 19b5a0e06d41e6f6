"""The event loop waits for no disk and for no lock of the engine's thread; nor do others' streams.

Who waits is told by the thread that a call came from, which a busy machine does not change. How
long the loop was held is compared with what would have held it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.routing import APIRoute

from kvcellar.agents import publishing
from kvcellar.server.routes import observe, viewer
from kvcellar.store import Store, blocks, reference_files
from kvcellar.store.catalogue import Catalogue
from kvcellar.store.folder import Folder
from kvcellar.store.journal import Journal
from tests.server.live import PATIENCE_S, Live, serving

pytestmark = pytest.mark.slow

SLOW_S = 1.0
LONG_S = 10.0
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


class Watched:
    """What takes ``seconds`` wherever it is called, and which threads have called it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.seconds = 0.0
        self.callers: dict[str, set[str]] = {}

    def names(self) -> set[str]:
        """Return what has been called while it was slow, by whichever thread."""
        return {name for did in list(self.callers.values()) for name in list(did)}

    def watch(self, owner: Any, name: str, *, is_slow: bool = True) -> None:
        """Have a function noticed where it is called, and slow."""
        call = getattr(owner, name)

        def noticed(*given: Any, **named: Any) -> Any:
            if self.seconds:
                who = threading.current_thread().name
                self.callers.setdefault(who, set()).add(name)
                if is_slow:
                    time.sleep(self.seconds)
            return call(*given, **named)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        self._patch.setattr(owner, name, staticmethod(noticed) if is_static else noticed)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    found = Watched(monkeypatch)
    yield found
    found.seconds = 0.0


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }


@contextmanager
def probed(live: Live) -> Iterator[list[float]]:
    """Measure how long the event loop was busy with one thing; the longest is there at the end."""
    stop = threading.Event()
    found: list[float] = []

    async def beat() -> float:
        longest = 0.0
        while not stop.is_set():
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - before)
        return longest

    beating = asyncio.run_coroutine_threadsafe(beat(), live._loop)
    try:
        yield found
    finally:
        stop.set()
        found.append(beating.result(PATIENCE_S))


def stream_gaps(live: Live, is_begun: threading.Event, stop: threading.Event) -> list[float]:
    """Seconds between the tokens of one stream after the other, until told to stop."""
    gaps = []
    while not stop.is_set():
        last = None
        body = {"prompt": "def", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with live.http.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                    is_begun.set()
                last = now
                if stop.is_set():
                    break
    return gaps


NAMES = ("poet", "sleeper", "rewound", "forked", "paused", "deleted", "kept", "waiting", "undone")


def prepare(live: Live) -> dict[str, Any]:
    """Make agents, a stored response and an exported file, for requests to meet."""
    for name in NAMES:
        live.post("/v1/agents", {"id": name})
        live.post(f"/v1/agents/{name}/generate", {"text": f"I am {name}. " * 30})
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
    live: Live,
    watched: Watched,
    seconds: float,
    what: dict[str, Any],
    behind: Set[str] = frozenset(),
) -> None:
    """Use every route at one time while everything that is watched is slow.

    What is called ``behind`` the answers, by the store's own thread, is waited for.
    """
    with ThreadPoolExecutor(len(what)) as pool:
        watched.seconds = seconds
        running = {name: pool.submit(ask) for name, ask in what.items()}
        wait(running.values(), LONG_S)
        until = time.monotonic() + PATIENCE_S
        while not watched.names() >= behind and time.monotonic() < until:
            time.sleep(0.05)
        watched.seconds = 0.0  # what is still waiting was shown to wait alone
        for name, done in running.items():
            found = done.result(PATIENCE_S)
            assert getattr(found, "status_code", 200) < 500, (name, found.text)


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
    is_begun, stop = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream_gaps, server, is_begun, stop)
        assert is_begun.wait(PATIENCE_S)
        try:
            with probed(server) as longest:
                use_everything(server, watched, SLOW_S, what, WRITES)
        finally:
            watched.seconds = 0.0
            stop.set()
        between = streaming.result(PATIENCE_S)
    on_disk = {name for _, name in DISK}
    callers = watched.callers
    assert not callers.get(LOOP), f"on the event loop: {sorted(callers[LOOP])}"
    in_engine = {name: did & on_disk for name, did in callers.items() if "engine" in name}
    assert not any(in_engine.values()), in_engine
    assert watched.names() >= on_disk - {"read_header"}
    assert longest[0] < SLOW_S, f"the event loop was held for {longest[0]:.2f} s"
    late = [seconds for seconds in between if seconds >= SLOW_S]
    assert len(late) <= 1, f"tokens took {late} s"  # one may be a busy machine's own pause


def test_the_loop_does_not_wait_for_the_engines_thread_which_copies_rows_under_its_lock(
    live: tuple[Live, dict[str, Any]], watched: Watched
) -> None:
    server, what = live
    watched.watch(publishing, "save_history")
    with probed(server) as longest:
        use_everything(server, watched, SLOW_S, what)
    assert any("engine" in name for name in watched.callers), watched.callers
    assert LOOP not in watched.callers
    assert longest[0] < SLOW_S, f"the event loop was held for {longest[0]:.2f} s"
