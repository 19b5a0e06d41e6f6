"""However large a request is: the others' tokens come, and memory stays what it was."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import select
import socket
import threading
import time

import pytest

from kvcellar.budget import resident_bytes
from kvcellar.errors import ContextError, EngineClosedError
from kvcellar.hosting.text_limits import PIECE_CHARACTERS, longest_token, refuse_text
from kvcellar.hosting.thread_lanes import Work, check_wanted
from kvcellar.server.front import bodies
from kvcellar.server.state import models
from tests.server.live import PATIENCE_S, load_demo, serving

MOST_STALL_S = 0.5
"""Five times what is promised: tests run on machines that do other things too."""

CONTEXT = 4096


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server that others use too."""
    with serving(tmp_path_factory.mktemp("shared"), load=load_demo(CONTEXT)) as server:
        server.post("/v1/completions", {"prompt": "Ready?", "max_tokens": 1})
        host, port = server.url.removeprefix("http://").split(":")
        server.address = (host, int(port))
        yield server


def between(last, now):
    """Seconds from one moment to another, but for those in which other processes had the machine.

    Whoever holds the loop computes, in this process: on its thread, or with the interpreter's lock.
    """
    return min(b - a for a, b in zip(last, now, strict=True))


def moment():
    return time.perf_counter(), time.process_time()


@contextlib.contextmanager
def beating(live):
    """Yields a list to which the longest stall of the server's loop is added in the end, in s."""
    found = []

    async def beat(until):
        longest, last = 0.0, moment()
        while not until.is_set():
            await asyncio.sleep(0.002)
            now = moment()
            longest, last = max(longest, between(last, now)), now
        return longest

    is_over = threading.Event()
    future = asyncio.run_coroutine_threadsafe(beat(is_over), live._loop)
    try:
        yield found
    finally:
        is_over.set()
        found.append(future.result(PATIENCE_S))


def goes_unnoticed(live, what, ask, capsys):
    """What ``ask`` asks for holds the loop for no longer than is promised.

    Once of three times is enough: a machine with other work to do holds it longer itself.
    """
    least = MOST_STALL_S
    for _ in range(3):
        with beating(live) as stalls:
            ask()
        least = min(least, stalls[0])
        if least < MOST_STALL_S:
            break
    with capsys.disabled():
        print(f"\n{what}: the loop stood still for {least * 1000:.0f} ms at most")
    assert least < MOST_STALL_S


def told(live, path, body, *, length=True):
    """What a request is told, sent without the client taking this process's time."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = f"Content-Length: {len(data)}" if length else "Transfer-Encoding: chunked"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\n{size}\r\n\r\n"
    ).encode()
    if not length:
        pieces = [data[at : at + 65536] for at in range(0, len(data), 65536)]
        data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    with socket.create_connection(live.address, PATIENCE_S) as connection:
        sender = threading.Thread(target=_send, args=(connection, head + data), daemon=True)
        sender.start()
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                said += piece
        sender.join(PATIENCE_S)
    head, _, rest = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


def _send(connection, data):
    with contextlib.suppress(OSError):
        connection.sendall(data)


BIG = "words and more of them, one after the other. " * (10 << 20 >> 5)
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": BIG}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": BIG}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": BIG}]},
    "/v1/responses": {"input": BIG, "max_output_tokens": 16},
    "/v1/completions": {"prompt": BIG, "max_tokens": 1},
    "/v1/agents": {"system": BIG},
    "/v1/agents/named/generate": {"text": BIG, "max_tokens": 1},
}


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("path", ROUTES)
def test_ten_megabytes_of_text_are_refused_and_nobody_notices(shared, path, is_told, capsys):
    data = json.dumps(ROUTES[path]).encode()
    before = resident_bytes()

    def ask():
        status, body = told(shared, path, data, length=is_told)
        assert status == 400, body
        message = body["error"]["message"]
        assert "at least" in message and str(CONTEXT) in message
        if path.startswith("/v1/messages"):
            assert "prompt is too long" in message
        else:
            assert body["error"]["code"] == "context_length_exceeded"

    goes_unnoticed(shared, path, ask, capsys)
    assert resident_bytes() - before < 200 << 20


TOKENS = {"prompt": [1] * 140_000, "max_tokens": 1}
INTRICATE = {
    "values": (413, b'{"prompt": [' + b"1," * (5 << 20) + b"1]}"),
    "objects": (413, b'{"messages": [' + b"{}," * 30_000 + b"{}]}"),
    "lists": (413, b'{"metadata": [' + b"[]," * 30_000 + b"[]]}"),
    "depth": (400, b'{"messages": ' + b"[" * 15_000 + b"]" * 15_000 + b"}"),
    "tokens": (400, json.dumps(TOKENS).encode()),
    "values in a text": (
        400,
        json.dumps(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"function": {"name": "f", "arguments": f"[{'1,' * 60_000}1]"}}
                        ],
                    }
                ]
            }
        ).encode(),
    ),
}


@pytest.mark.parametrize("what", INTRICATE)
def test_an_intricate_body_is_refused_and_nobody_notices(shared, what, capsys):
    status, data = INTRICATE[what]
    path = "/v1/completions" if b"prompt" in data[:20] else "/v1/chat/completions"
    before = resident_bytes()

    def ask():
        found, body = told(shared, path, data)
        assert found == status, body

    goes_unnoticed(shared, what, ask, capsys)
    assert resident_bytes() - before < 200 << 20


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_text_that_spells_control_tokens_is_read_beside_the_others(shared, path, capsys):
    """It is as much as its bytes allow, with such tokens all over, and none but the first."""
    host = shared.host()
    control = host.tokenizer.eos_token

    def ask():
        for text in ((control + " and so on. ") * 6000, control + "and so on. " * 12_000):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            status, said = told(shared, path, body)
            assert status == 400 and "at least" in said["error"]["message"], said

    goes_unnoticed(shared, path, ask, capsys)


def test_the_collector_does_not_walk_over_what_is_loaded_until_it_leaves(tmp_path, monkeypatch):
    """A walk holds everybody's tokens; a body of thousands of parts sets one off."""
    monkeypatch.setattr(models, "gc", gc)
    gc.unfreeze()
    with serving(tmp_path, load=load_demo(CONTEXT)) as live:
        live.post("/v1/completions", {"prompt": "import", "max_tokens": 1})
        held = len(gc.get_objects())
        assert gc.get_freeze_count() > 2 * held
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as the tests had it


def test_a_prompt_that_is_a_little_too_long_is_counted_to_its_end(shared):
    text = "word " * (CONTEXT * 3 // 2)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    _, counted = told(shared, "/v1/messages/count_tokens", body)
    status, said = told(shared, "/v1/messages", body)
    assert status == 400
    assert f"{counted['input_tokens']} tokens > {CONTEXT} maximum" in said["error"]["message"]
    assert "at least" not in said["error"]["message"]


def test_a_text_is_encoded_no_further_than_it_takes_to_see_that_it_is_too_long():
    class Tokenizer:
        n = 0

        def encode(self, text, *, add_special_tokens):
            self.n += len(text)
            return [0] * (len(text) // 4)

    tokenizer = Tokenizer()
    refuse_text(tokenizer, "x" * PIECE_CHARACTERS, 10)
    assert tokenizer.n == 0, "short enough to be encoded as a whole"
    with pytest.raises(ContextError, match="at least") as caught:
        refuse_text(tokenizer, "x" * (100 * PIECE_CHARACTERS), 10_000)
    assert tokenizer.n == 2 * PIECE_CHARACTERS and 10_000 < caught.value.n_tokens <= 16_384


def test_work_that_nobody_waits_for_ends():
    """Where it next looks; what has not begun is not begun."""
    begun, ended = threading.Event(), threading.Event()

    def long():
        begun.set()
        try:
            while True:
                check_wanted()
                time.sleep(0.001)
        finally:
            ended.set()

    async def leave():
        work = Work()
        task = asyncio.create_task(work.run(1 << 20, long))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        behind = asyncio.create_task(work.run(1 << 20, pytest.fail, "it was begun"))
        await asyncio.sleep(0)
        for one in (behind, task):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
        assert await work.run(1 << 20, threading.current_thread) is not threading.main_thread()
        work.close()
        with pytest.raises(EngineClosedError):
            await work.run(1 << 20, long)

    asyncio.run(leave())
    assert ended.wait(PATIENCE_S)


def test_a_prompt_that_fits_is_worked_on_beside_the_others(shared, capsys):
    """Many messages with tools, and as much text as the context holds: others' tokens go on."""
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}}
        for i in range(100)
    ]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 1500
    bodies_ = [
        {"messages": [*messages, {"role": "user", "content": "z"}], "max_tokens": 1},
        {"messages": [{"role": "user", "content": "x" * 90_000}], "max_tokens": 1, "n": 8},
        {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 1},
    ]

    def ask():
        for body in bodies_:
            status, said = told(shared, "/v1/chat/completions", body)
            assert status == 400 and said["error"]["code"] == "context_length_exceeded", said

    goes_unnoticed(shared, "much that is small", ask, capsys)


@pytest.mark.slow
def test_somebody_elses_stream_goes_on_while_ten_megabytes_arrive(shared):
    """The longest time between two tokens is short, once of three times at least."""
    assert any(longest_gap(shared) < 2 * MOST_STALL_S for _ in range(3))


def longest_gap(shared):
    """Return the longest time between two tokens of a stream while large bodies arrive, in s."""
    ask = {"prompt": "Go on: ", "max_tokens": 400, "ignore_eos": True, "stream": True}
    times = []
    is_going = threading.Event()

    def listen():
        with shared.http.stream("POST", "/v1/completions", json=ask) as response:
            for line in response.iter_lines():
                if line:
                    times.append(moment())
                    is_going.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert is_going.wait(PATIENCE_S)
    for path in ("/v1/messages/count_tokens", "/v1/completions"):
        assert told(shared, path, ROUTES[path])[0] == 400
    listener.join(PATIENCE_S)
    return max(between(a, b) for a, b in itertools.pairwise(times))


@pytest.mark.slow
def test_all_large_bodies_together_have_a_limit(tmp_path):
    """Those that are being read count as what they say that they will be."""
    with serving(tmp_path, max_body_bytes=1 << 20) as live:
        host, port = live.url.removeprefix("http://").split(":")
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        with contextlib.ExitStack() as stack:
            waiting = [
                stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
                for _ in range(3)
            ]
            for connection in waiting:
                connection.sendall(head)
            told, _, _ = select.select(waiting, [], [], PATIENCE_S)
            (refused,) = told
            assert refused.recv(65536).startswith(b"HTTP/1.1 429 ")
            small = live.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert small["choices"]
            others = [connection for connection in waiting if connection is not refused]
            assert not select.select(others, [], [], 0)[0], "one was refused, and no more"
        long = {"prompt": "x" * 900_000}
        live.until(
            lambda: live.http.post("/v1/completions", json=long).status_code == 400,
            "room for a large body",
        )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 64])
def test_values_are_counted_alike_however_a_body_comes_in_pieces(n):
    value = {"a,b": ['x"y\\', "[{,", r"\\", {"c": [1, 2, {"d": None}]}, ",\\\\,"], "e": "\\"}
    data = json.dumps(value).encode()
    whole, cut = bodies._ValueCount(), bodies._ValueCount()
    whole.take(data)
    for at in range(0, len(data), n):
        cut.take(data[at : at + n])
    assert (cut.n_values, cut.n_containers) == (whole.n_values, whole.n_containers)
    # Two objects more than lists, with a comma between any two values that have one beside them.
    assert whole.n_containers == 5 and whole.n_values == 5 + 1 + 4 + 2


def test_no_token_stands_for_more_bytes_than_the_longest(shared):
    host = shared.host()
    most = longest_token(host.tokenizer)
    for word in (" ", "\n", "=", "ß", "def f(x):\n    return x\n"):
        text = word * 5000
        n = len(host.tokenizer.encode(text, add_special_tokens=False))
        assert n * most >= len(text.encode())
