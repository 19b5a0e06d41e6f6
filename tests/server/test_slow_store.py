"""A store that takes its time is waited for by those who ask it, and by nobody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from kvcellar.agents import is_unnamed
from kvcellar.store import Store, blocks, cold
from kvcellar.store.catalogue import Catalogue
from kvcellar.store.folder import Folder
from kvcellar.store.journal import Journal
from tests.server.live import PATIENCE_S, Live, serving

READ_S = 2.0
LONG_S = 15.0

READS = (
    (Catalogue, "_select"),
    (Journal, "_ask"),
    (Folder, "reference_paths"),
    (Store, "has_reference"),
    (Store, "get"),
    (cold, "read_file"),
    (blocks, "read_file"),
    (blocks, "read_header"),
)


class Slow:
    """Whatever reads the store's folder takes ``seconds``; who did is remembered."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.readers: dict[str, set[str]] = {}
        for owner, name in READS:
            patch.setattr(owner, name, self._slowed(getattr(owner, name), name))

    def _slowed(self, read: Any, name: str) -> Any:
        def slowly(*given: Any, **named: Any) -> Any:
            if self.seconds:
                who = threading.current_thread().name
                self.readers.setdefault(who, set()).add(name)
                time.sleep(self.seconds)
            return read(*given, **named)

        return slowly


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found = Slow(monkeypatch)
    yield found
    found.seconds = 0.0


def chat(text: str, n: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": n,
        "temperature": 0,
        **more,
    }


async def beat(gaps: list[float], stop: threading.Event) -> None:
    """Measure how long the event loop was busy with something else."""
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        gaps.append(time.perf_counter() - before)


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


def use_everything(live: Live, slow: Slow, known: list[dict[str, str]]) -> None:
    """Ask for whatever looks into the store, or writes to it, all at one time."""
    following = [*known, {"role": "user", "content": "And then?"}]
    asks = [
        lambda: live.post("/v1/chat/completions", {**chat(""), "messages": following}),
        lambda: live.post("/v1/chat/completions", chat("Something new. " * 30)),
        lambda: live.post(
            "/v1/chat/completions", chat("More. " * 60), headers={"x-agent-id": "poet"}
        ),
        lambda: live.post("/v1/agents/sleeper/generate", {"text": "Wake up.", "max_tokens": 4}),
        lambda: live.get("/v1/agents"),
        lambda: live.get("/v1/agents/poet"),
        lambda: live.http.get("/v1/agents/nobody"),
        lambda: live.get("/v1/agents/poet/why"),
        lambda: live.http.get("/metrics"),
        lambda: live.get("/health"),
        lambda: live.post("/v1/responses", {"input": "Store it.", "max_output_tokens": 4}),
        lambda: live.http.get("/v1/responses/resp_none"),
        lambda: live.post("/v1/agents", {"id": "new", "system": "Be kind."}),
        lambda: live.post("/v1/agents/rewound/rewind", {}),
        lambda: live.post("/v1/agents/forked/fork", {"id": "child"}),
        lambda: live.post("/v1/agents/paused/pause"),
        lambda: live.http.delete("/v1/agents/deleted"),
    ]
    with ThreadPoolExecutor(len(asks)) as pool:
        running = [pool.submit(ask) for ask in asks]
        wait(running, LONG_S)
        slow.seconds = 0.0  # what is still waiting was shown to wait alone
        for done in running:
            done.result(PATIENCE_S)


def test_other_streams_do_not_notice_a_store_whose_every_read_takes_two_seconds(
    tmp_path: Any, slow: Slow
) -> None:
    names = ("poet", "sleeper", "rewound", "forked", "paused", "deleted")
    with serving(tmp_path) as live:
        for name in names:
            live.post("/v1/agents", {"id": name})
            live.post(f"/v1/agents/{name}/generate", {"text": f"I am {name}. " * 30})
        live.post("/v1/agents/sleeper/pause")
    with serving(tmp_path) as live:
        live.http.timeout = 4 * PATIENCE_S
        question = chat("What is a cellar?")
        answer = live.post("/v1/chat/completions", question)
        known = [*question["messages"], answer["choices"][0]["message"]]
        assert is_unnamed(answer["kvcellar"]["agent_id"])
        gaps: list[float] = []
        is_begun, stop = threading.Event(), threading.Event()
        beating = asyncio.run_coroutine_threadsafe(beat(gaps, stop), live._loop)
        with ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(stream_gaps, live, is_begun, stop)
            assert is_begun.wait(PATIENCE_S)
            slow.seconds = READ_S
            try:
                use_everything(live, slow, known)
            finally:
                slow.seconds = 0.0
                stop.set()
            between = streaming.result(PATIENCE_S)
        beating.result(PATIENCE_S)
        waited = {name for name in slow.readers if name == "server" or "engine" in name}
        assert not waited, {name: slow.readers[name] for name in waited}
        assert slow.readers, "nobody read anything, so nothing was shown"
        assert max(gaps) < READ_S / 2, f"the event loop was held for {max(gaps):.2f} s"
        assert max(between) < READ_S / 2, f"a token took {max(between):.2f} s"
