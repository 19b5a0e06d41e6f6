"""Clients that leave at any point, or stop reading: nothing of theirs stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
import threading

import pytest

from kvcellar.budget import resident_bytes
from kvcellar.server.stream.replies import Frames, SseResponse
from kvcellar.server.stream.streams import MergedStream
from tests.server.live import PATIENCE_S, load_demo, serving

N_GONE = int(os.environ.get("KVCELLAR_DISCONNECTS", "60"))

LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}


def requests_of(chance):
    """Every way to ask for an answer; prompts of all lengths, some that others have had."""
    text = f"{chance.randrange(8)} " + "word " * chance.randrange(1, 160)
    messages = [{"role": "user", "content": text}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    return [
        ("/v1/chat/completions", {"messages": messages, **LONG}),
        ("/v1/chat/completions", {"messages": messages, **LONG, "n": 2}),
        ("/v1/chat/completions", {"messages": messages, **LONG, "stream": False}),
        ("/v1/chat/completions", {"messages": messages, **LONG, "agent_id": "named"}),
        (
            "/v1/chat/completions",
            {"messages": messages, **LONG, "tools": tools, "tool_choice": "required"},
        ),
        ("/v1/completions", {"prompt": [text, text + "."], **LONG}),
        ("/v1/messages", {"messages": messages, "max_tokens": 400, "stream": True}),
        ("/v1/responses", {"input": text, "max_output_tokens": 400, "stream": True}),
        ("/v1/agents/named/generate", {"text": text, **LONG}),
        ("/events", None),
    ]


def leave(live, chance):
    """Ask for something, and go: in the request, before the answer, in it, politely or not."""
    path, body = chance.choice(requests_of(chance))
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"  # a refusal has no frames to wait for
    ).encode()
    whole = head + data
    n_sent = len(whole) if chance.random() < 0.8 else chance.randrange(len(whole))
    with socket.create_connection(live.service_address, timeout=PATIENCE_S) as connection:
        connection.sendall(whole[:n_sent])
        if n_sent == len(whole) and (body is None or body.get("stream", True)):
            n_frames, seen = chance.choice([0, 0, 1, 2, 5]), b""
            while seen.count(b"\n\n") < n_frames:
                piece = connection.recv(4096)
                if not piece:
                    break
                seen += piece
        if chance.random() < 0.5:  # no goodbye: a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
def small(tmp_path):
    # The store's RAM is full after the first visits, too.
    with serving(tmp_path, load=load_demo(1024), max_unnamed=8, warm_bytes=1 << 20) as live:
        host, port = live.url.removeprefix("http://").split(":")
        live.service_address = (host, int(port))
        live.post("/v1/agents", {"id": "named"})
        yield live


def counts(live):
    """Whatever a request may take with it while it runs."""

    async def tasks():
        return len(asyncio.all_tasks())

    stats = live.engine()
    return {
        "active": live.service.n_active,
        "running": stats.running,
        "waiting": stats.waiting,
        "live cells": stats.live_cells,
        "locked tokens": stats.protected_tokens,
        "taken conversations": len(live.service.conversations._taken),
        "busy agents": sum(a.live.gate.is_taken for a in live.service.agents.directory.agents()),
        "tasks": live.run(tasks()),
        "threads": threading.active_count(),
    }


def collected_bytes():
    """Return what the process has in memory when no garbage is left."""
    gc.collect()
    return resident_bytes()


@pytest.mark.slow
def test_whoever_leaves_takes_everything_along(small):
    """And memory is what it was: the first visits filled the cache, the others change nothing."""
    chance = random.Random(7)

    def visit(n):
        visitors = [
            threading.Thread(target=lambda: [leave(small, chance) for _ in range(n // 4)])
            for _ in range(4)
        ]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join(PATIENCE_S * 5)
            assert not visitor.is_alive()
        small.until(small.is_still, "the end of all requests")

    visit(40)
    small.until(lambda: counts(small)["tasks"] <= 4, "the end of all connections")
    # Few visits leave the allocator's warming up in the figure; many do not.
    most = 1.05 if N_GONE >= 500 else 1.1
    for n_left in reversed(range(3)):  # what leaks grows each time, a heap that is warm does not
        before, before_bytes = counts(small), collected_bytes()
        visit(N_GONE)
        n_tasks = before.pop("tasks")
        small.until(lambda n=n_tasks: counts(small)["tasks"] <= n, "the end of all connections")
        after = counts(small)
        del after["tasks"]
        # The pool of threads for blocking calls grows up to its limit, and no further.
        assert after.pop("threads") <= before.pop("threads") + 32
        assert after == before
        if collected_bytes() < most * before_bytes:
            break
        assert n_left, "memory grows with every visit"
    answer = small.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Still there?"}]}
    )
    assert answer["choices"][0]["message"]["content"] is not None


@pytest.mark.slow
def test_a_prompt_of_somebody_who_left_is_still_good_for_the_next(small):
    """What was computed for a client that has gone is there for the one that asks again."""
    body = {"messages": [{"role": "user", "content": "again " * 120}], **LONG}
    with small.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    small.until(small.is_still, "the end of the request")
    again = small.post("/v1/chat/completions", {**body, "stream": False, "max_tokens": 2})
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


class Plain(Frames):
    """What is said is text already."""

    async def of(self, number, item):
        return item


def test_a_client_that_does_not_read_counts_as_gone():
    """Its source is closed, whatever it was doing."""
    closed = []

    async def source():
        try:
            while True:
                yield b"data: more\n\n"
        finally:
            closed.append(True)

    async def talk():
        never = asyncio.Event()
        sent = []

        async def receive():
            await never.wait()

        async def send(message):
            sent.append(message["type"])
            if len(sent) > 3:
                await never.wait()

        scope = {}
        response = SseResponse(
            MergedStream.of(source()), Plain(None), ping_s=60, send_timeout_s=0.01
        )
        await response(scope, receive, send)
        return scope, sent

    scope, sent = asyncio.run(talk())
    assert scope["kvcellar.is_gone"] and closed == [True]
    assert sent[0] == "http.response.start" and len(sent) == 4


def test_a_silent_stream_says_that_it_is_alive():
    async def source():
        await asyncio.sleep(3600)
        yield b""

    async def talk():
        pinged = asyncio.Event()

        async def receive():
            await pinged.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message.get("body") == b": ping\n\n":
                pinged.set()

        scope = {}
        response = SseResponse(
            MergedStream.of(source()), Plain(None), ping_s=0.01, send_timeout_s=60
        )
        await response(scope, receive, send)
        return scope

    assert asyncio.run(talk())["kvcellar.is_gone"]
