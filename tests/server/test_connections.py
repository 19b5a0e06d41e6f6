"""Connections that ask for nothing, or never to the end: bounded in number and in time."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time

import httpx
import pytest

from kvcellar.server.front import bodies
from tests.server.live import PATIENCE_S, serving

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HEAD_S = 1.5


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """A server that waits for little, with room for few connections."""
    with serving(
        tmp_path_factory.mktemp("bounded"),
        head_timeout_s=HEAD_S,
        idle_timeout_s=1.0,
        send_timeout_s=1.0,
        max_connections=60,
        max_of_one_address=50,
    ) as server:
        server.address = (server.url.split("/")[2].split(":")[0], int(server.url.split(":")[2]))
        yield server


@contextlib.contextmanager
def opened(live, n, sent=b"", source="127.0.0.1"):
    """Connections that have sent so much."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(n):
            one = socket.create_connection(live.address, PATIENCE_S, source_address=(source, 0))
            stack.enter_context(one)
            if sent:
                one.sendall(sent)
            found.append(one)
        yield found


def received(connection):
    """All that comes until the server closes the connection, in time."""
    said = b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionResetError:
        pass
    return said


def n_open(connections):
    """How many of them the server has not closed. Those that are closed can be read at once."""
    closed, _, _ = select.select(connections, [], [], 0)
    return len(connections) - len(closed)


def n_known(live):
    async def count():
        return len(live.connections)

    return live.run(count())


@pytest.mark.parametrize("sent", [b"", HEAD, b"G"])
def test_whoever_asks_for_nothing_gives_way_to_who_asks(bounded, sent):
    """200 of them from one address, of which 50 may be open, and a request of the same address."""
    with opened(bounded, 200, sent) as connections:
        for _ in range(3):
            assert httpx.get(f"{bounded.url}/health").status_code == 200
        bounded.until(lambda: n_open(connections) <= 50, "the end of most")


@pytest.mark.parametrize("sent", [HEAD, b"G", HEAD + b"X-Slow: "])
def test_half_a_head_is_waited_for_so_long_and_no_longer(bounded, sent):
    with opened(bounded, 20, sent) as connections:
        found = [said for said in map(received, connections) if said]
    assert found, "all were closed before they had sent it: by a busy machine, one or two"
    for said in found:
        assert said.startswith(b"HTTP/1.1 408 ") and b"within 1.5 s" in said
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_slow"


def test_a_head_that_comes_in_drops_has_no_more_time(bounded):
    with opened(bounded, 1, b"GET /health HTTP/1.1\r\nX-Slow: ") as (connection,):
        connection.settimeout(HEAD_S / 15)
        said, drops = b"", 0
        while not said:
            with contextlib.suppress(TimeoutError):
                said = connection.recv(4096)
            connection.sendall(b"x")
            drops += 1
            assert drops < 1000
        assert said.startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_never_says_a_word_is_closed_without_one(bounded):
    with opened(bounded, 20) as connections:
        assert [received(connection) for connection in connections] == [b""] * 20


def test_an_idle_connection_is_closed_after_its_time_also_with_half_of_the_next_request(bounded):
    assert not behind_an_answer(bounded, b"")
    for _ in range(5):  # on a busy machine its time may be over before the half is sent
        rest = behind_an_answer(bounded, HEAD)
        if rest:
            break
    assert rest.startswith(b"HTTP/1.1 408 ") and rest.endswith(b"}")


def behind_an_answer(live, sent):
    """Return what comes behind the answer to a request, to a connection that has sent this."""
    with opened(live, 1, HEAD + b"\r\n") as (connection,):
        said = b""
        while not said.endswith(b"}"):  # head and body may come apart
            said += connection.recv(65536)
        assert said.startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        return received(connection)


def test_two_requests_in_one_piece_are_both_answered(bounded):
    with opened(bounded, 1, (HEAD + b"\r\n") * 2 + HEAD) as (connection,):
        said = received(connection)
    assert said.count(b"HTTP/1.1 200 ") == 2 and said.count(b"HTTP/1.1 408 ") == 1


@pytest.mark.slow
def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for(bounded):
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with opened(bounded, 1, head) as (connection,):
        said, n = b"", 0
        connection.settimeout(HEAD_S / 15)
        with contextlib.suppress(ConnectionError):
            while True:
                with contextlib.suppress(TimeoutError):
                    piece = connection.recv(65536)
                    if not piece:
                        break
                    said += piece
                connection.sendall(b"x")
                n += 1
                assert n < 1000
    assert said.startswith(b"HTTP/1.1 404 ")


def test_where_all_are_being_answered_one_more_is_told_so(bounded):
    """Streams are nobody's to close; another address still gets in."""
    stream = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with opened(bounded, 50, stream) as connections:
        for connection in connections:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        with opened(bounded, 1, HEAD + b"\r\n") as (connection,):
            said = received(connection)
        assert said.startswith(b"HTTP/1.1 503 ") and b"Retry-After:" in said
        assert b"50 requests of this address are being answered" in said
        with opened(bounded, 1, HEAD + b"\r\n", source="127.0.0.2") as (other,):
            assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
        # Longer than any of the time limits: streams go on.
        time.sleep(HEAD_S)
        for connection in connections:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                assert connection.recv(65536), "a stream was closed"
    bounded.until(lambda: n_known(bounded) == 0, "the end of all connections")
    assert httpx.get(f"{bounded.url}/health").status_code == 200


def test_a_slow_body_is_refused_in_the_end(bounded, monkeypatch):
    """Also one that comes in drops, none of them late."""
    monkeypatch.setattr(bodies, "BODY_S", 1.0)
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    with opened(bounded, 1, head) as (connection,):
        connection.settimeout(0.1)
        said, n = b"", 0
        while not said:
            with contextlib.suppress(TimeoutError):
                said = connection.recv(4096)
            connection.sendall(b" ")
            n += 1
            assert n < 1000
    assert said.startswith(b"HTTP/1.1 408 "), "the head comes first, the rest when it likes"


def test_an_answer_that_is_not_read_does_not_stay(bounded):
    """Nor does its connection, though the server has closed its own end."""
    big = b"GET /viewer/vendor/highlight.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(bounded.address)
        sender = threading.Thread(target=_send_all, args=(connection, big * 3000))
        sender.start()
        bounded.until(lambda: n_known(bounded) == 1, "the connection")
        bounded.until(lambda: n_known(bounded) == 0, "its end")
        sender.join(PATIENCE_S)
        assert not sender.is_alive()


def _send_all(connection, data):
    with contextlib.suppress(OSError):
        connection.sendall(data)


POST = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SECOND = HEAD + b"\r\n"
"""Request that is hidden in the body of another one."""


@pytest.mark.parametrize(
    "first",
    [
        POST + CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        POST + b"Content-Length: 0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n0\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
        POST + b"Content-Length: 2, 3\r\n\r\n{} ",
        POST + b"Content-Length: +2\r\n\r\n{}",
        POST + b"Content-Length : 2\r\n\r\n{}",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_nothing_is_read_behind_a_request_whose_end_cannot_be_told(bounded, first):
    with opened(bounded, 1, first + SECOND) as (connection,):
        said = received(connection)
    assert said.startswith(b"HTTP/1.1 400 "), said
    assert said.count(b"HTTP/1.1 ") == 1 and b"connection: close" in said.lower()


def test_whoever_sends_one_length_keeps_the_connection(bounded):
    pieces = b"2;name=value\r\n{}\r\n0\r\n\r\n"
    for first in (POST + CHUNKED + b"\r\n" + pieces, POST + b"Content-Length: 2\r\n\r\n{}"):
        with opened(
            bounded, 1, first + SECOND.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        ) as (connection,):
            said = received(connection)
        assert said.count(b"HTTP/1.1 ") == 2 and said.count(b"HTTP/1.1 200 ") == 1, said
