"""Pictures by address: from named hosts alone, within bounds, and never from here."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import pytest

from kvcellar.errors import ConfigError
from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import ApiError
from kvcellar.server.state.fetching import MOST_REDIRECTS, Fetcher, is_public
from kvcellar.server.state.picture_desk import PictureDesk
from tests.pictures.fakes import make_seeing_host, picture_file
from tests.server.live import serving

PUBLIC, OTHER = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
FILE = picture_file(1)


def http(body=b"", status="200 OK", *headers, length=None):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


class Elsewhere:
    """The internet: names with addresses, and what is answered at each host."""

    def __init__(self, answers, **addresses):
        self.answers, self.addresses = answers, addresses
        self.asked, self.resolved, self.connected = [], [], []
        self.readers, self.n_closed = [], 0

    async def resolve(self, host, port):
        self.resolved.append((host, port))
        found = self.addresses.get(host.replace(".", "_").replace("-", "_"), [PUBLIC])
        if isinstance(found, Exception):
            raise found
        return found

    async def connect(self, address, port, server):
        self.connected.append((address, port, server))
        reader = asyncio.StreamReader()
        self.readers.append(reader)
        elsewhere = self

        class Writer:
            def write(self, data):
                path = data.split(b" ", 2)[1].decode()
                elsewhere.asked.append(data)
                found = elsewhere.answers[path]
                found = found.pop(0) if isinstance(found, list) else found
                if found is not None:
                    reader.feed_data(found)
                    reader.feed_eof()

            async def drain(self):
                pass

            def close(self):
                elsewhere.n_closed += 1

            async def wait_closed(self):
                pass

        return reader, Writer()


def fetch(elsewhere, url, *allowed, **more):
    async def ask():
        fetcher = Fetcher(allowed, resolve=elsewhere.resolve, connect=elsewhere.connect, **more)
        return await fetcher.fetch(url)

    return asyncio.run(ask())


def refused(elsewhere, url, *allowed, **more):
    with pytest.raises(ApiError) as error:
        fetch(elsewhere, url, *allowed, **more)
    assert error.value.status == 400
    return error.value


def test_what_a_named_host_has_is_fetched():
    there = Elsewhere({"/a%20b.png?x=1": http(FILE)})
    assert fetch(there, "http://Example.com./a%20b.png?x=1#part", "example.com") == FILE
    assert there.connected == [(PUBLIC, 80, None)]
    head = there.asked[0].lower()
    assert b"accept-encoding: identity" in head and b"cookie" not in head
    assert fetch(there, "https://example.com/a%20b.png?x=1", "example.com") == FILE
    assert there.connected[1] == (PUBLIC, 443, "example.com")
    pieces = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces
    assert fetch(Elsewhere({"/": chunked}), "http://a.example", "a.example") == b"abcde"


@pytest.mark.parametrize("where", ["http://[", "//[x", "http://e.com]/"])
def test_a_redirect_to_no_address_is_said(where):
    there = Elsewhere({"/a": http(b"", "302 Found", f"Location: {where}")})
    assert "no address" in str(refused(there, "http://example.com/a", "example.com"))


def test_what_is_packed_is_not_taken_for_a_picture():
    there = Elsewhere({"/a": http(FILE, "200 OK", "Content-Encoding: gzip")})
    assert "another encoding" in str(refused(there, "http://example.com/a", "example.com"))


def test_port_0_is_no_usual_port():
    there = Elsewhere({"/a": http(FILE)})
    refused(there, "http://example.com:0/a", "example.com")
    assert not there.connected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "10.0.0.7", "[fec0::1]"])
def test_no_option_is_named_that_would_not_help(host):
    there = Elsewhere({"/a": http(FILE)})
    said = str(refused(there, f"http://{host}/a"))
    assert "private network" in said and "have the server started" not in said


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://example.com/a", ()),
        ("http://example.com/a", ("example.org",)),
        ("http://sub.example.com/a", ("example.com",)),
        ("http://example.com.evil.test/a", ("example.com",)),
        ("http://example.com:8080/a", ("example.com",)),
        ("http://example.com:443/a", ("example.com",)),
        ("https://example.com/a", ("example.com:8443",)),
        ("http://example.com/a", ("example.com:8080",)),
    ],
)
def test_nobody_is_asked_who_was_not_named(url, allowed):
    there = Elsewhere({"/a": http(FILE)})
    error = refused(there, url, *allowed)
    assert error.code == "fetch_not_allowed" and "--allow-fetch" in str(error)
    assert url.split("/")[2].partition(":")[0] in str(error)
    assert not there.resolved and not there.connected


def test_a_port_is_named_with_its_host():
    there = Elsewhere({"/a": http(FILE)})
    assert fetch(there, "http://example.com:8080/a", "example.com:8080") == FILE
    assert there.connected == [(PUBLIC, 8080, None)]


PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%lo",
    "fc00::1",
    "fd12::1",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "no address",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_the_internets_is_never_connected_to(address):
    assert not is_public(address)
    there = Elsewhere({"/a": http(FILE)}, example_com=[address])
    error = refused(there, "http://example.com/a", "example.com")
    assert error.code == "fetch_not_allowed" and "private network" in str(error)
    mixed = Elsewhere({"/a": http(FILE)}, example_com=[PUBLIC, address])
    refused(mixed, "http://example.com/a", "example.com")
    assert not there.connected and not mixed.connected


@pytest.mark.parametrize(
    "address", [PUBLIC, OTHER, "1.1.1.1", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_an_address_of_the_internet_is(address):
    assert is_public(address)


def test_an_address_of_this_machine_is_never_connected_to(monkeypatch):
    class Device:
        address = PUBLIC

    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [Device]})
    assert not is_public(PUBLIC) and not is_public(f"::ffff:{PUBLIC}") and is_public("1.1.1.1")


def test_a_name_is_resolved_once_and_that_address_is_connected_to():
    there = Elsewhere({"/a": http(FILE)})
    addresses = iter([[PUBLIC], ["127.0.0.1"]])

    async def resolve(host, port):
        return next(addresses)

    there.resolve = resolve
    assert fetch(there, "http://example.com/a", "example.com") == FILE
    assert there.connected == [(PUBLIC, 80, None)]


def moved(to):
    return http(b"", "302 Found", f"Location: {to}")


def test_a_redirect_is_checked_as_the_first_address_was():
    there = Elsewhere({"/a": moved("/b"), "/b": moved("http://b.example/c"), "/c": http(FILE)})
    assert fetch(there, "http://a.example/a", "a.example", "b.example") == FILE
    error = refused(there, "http://a.example/a", "a.example")
    assert error.code == "fetch_not_allowed" and "b.example" in str(error)
    inside = Elsewhere({"/a": moved("http://b.example/c")}, b_example=["127.0.0.1"])
    error = refused(inside, "http://a.example/a", "a.example", "b.example")
    assert "private network" in str(error) and len(inside.connected) == 1
    for target in ("file:///etc/passwd", "ftp://a.example/", "data:,x", "http://u:p@a.example/"):
        error = refused(Elsewhere({"/a": moved(target)}), "http://a.example/a", "a.example")
        assert error.code == "fetch_failed"
    down = Elsewhere({"/a": moved("http://a.example/b"), "/b": http(FILE)})
    assert "https to http" in str(refused(down, "https://a.example/a", "a.example"))
    circle = Elsewhere({"/a": moved("/a")})
    assert "times" in str(refused(circle, "http://a.example/a", "a.example"))
    assert len(circle.connected) == MOST_REDIRECTS + 1


def test_what_is_too_large_is_left_where_it_passes_the_bound():
    said = Elsewhere({"/a": http(b"", length=10**9)})
    assert "bytes" in str(refused(said, "http://a.example/a", "a.example"))
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000
    assert "1,000 bytes" in str(
        refused(Elsewhere({"/a": endless}), "http://a.example/a", "a.example", most_bytes=1000)
    )


def test_what_does_not_come_in_time_is_left():
    never = Elsewhere({"/a": None})
    error = refused(never, "http://a.example/a", "a.example", within_s=0.05)
    assert "0.05 s" in str(error)


def test_the_time_of_a_fetch_begins_with_the_fetch(monkeypatch):
    there, limits, timeout = Elsewhere({"/a": None}), [], asyncio.timeout

    def noted(limit_s):
        limits.append(limit_s)
        return timeout(limit_s)

    monkeypatch.setattr(asyncio, "timeout", noted)

    async def ask():
        fetcher = Fetcher(
            ["a.example"], resolve=there.resolve, connect=there.connect, within_s=600, turn_s=601
        )
        tasks = [asyncio.create_task(fetcher.fetch("http://a.example/a")) for _ in range(5)]
        for n in range(1, 6):
            while len(there.asked) < min(n + 3, 5):
                await asyncio.sleep(0)
            assert limits.count(601) == 5, "all of them wait, or have waited, for so long"
            assert limits.count(600) == len(there.asked), "and those that fetch have begun to"
            there.readers[n - 1].feed_data(http(FILE))
            there.readers[n - 1].feed_eof()
        return await asyncio.gather(*tasks)

    assert asyncio.run(ask()) == [FILE] * 5


def test_who_waits_too_long_for_others_is_told_that_and_not_that_nothing_came():
    there = Elsewhere({"/never": None})

    async def ask():
        fetcher = Fetcher(["a.example"], resolve=there.resolve, connect=there.connect, turn_s=0.05)
        slow = [asyncio.create_task(fetcher.fetch("http://a.example/never")) for _ in range(4)]
        while len(there.connected) < 4:
            await asyncio.sleep(0)
        for url, status, code in (
            ("http://a.example/never", 429, "fetch_busy"),
            ("http://b.example/never", 400, "fetch_not_allowed"),
        ):
            with pytest.raises(ApiError, match=r"others were being fetched|alone") as error:
                await fetcher.fetch(url)
            assert (error.value.status, error.value.code) == (status, code)
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        there.answers["/never"] = http(FILE)
        assert await fetcher.fetch("http://a.example/never") == FILE, "their turns are free again"

    asyncio.run(ask())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0\0",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
        http(b"no", "404 Not Found"),
        http(b"no", "500 Oh"),
        http(b"", "302 Found"),
        http(b"", "204 No Content", length=0),
    ],
)
def test_an_answer_that_is_none_is_a_400(answer):
    error = refused(Elsewhere({"/a": answer}), "http://a.example/a", "a.example")
    assert error.code == "fetch_failed"


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///a",
        "http://a.example:99999/",
        "http://[::1/",
        "http://user:secret@a.example/a",
        "http://a.example/a b",
        "http://a.example/\r\nX: y",
        "http://a.example/ä",
        "http://" + "a" * 70 + ".example/",
        "http://a.example/" + "x" * 9000,
    ],
)
def test_an_address_that_is_none_is_a_400(url):
    there = Elsewhere({})
    refused(there, url, "a.example")
    assert not there.connected


def test_a_name_without_an_address_is_a_400():
    there = Elsewhere({}, a_example=OSError("unknown"))
    assert "no address" in str(refused(there, "http://a.example/", "a.example"))
    assert "no address" in str(
        refused(Elsewhere({}, a_example=[]), "http://a.example/", "a.example")
    )


@pytest.mark.parametrize(
    "host", ["http://a.example", "a.example/b", "*", "", "a:0", "a:70000", "a b"]
)
def test_a_host_that_is_none_is_refused_at_the_start(host):
    with pytest.raises(ConfigError, match="no host to fetch from"):
        ServerConfig(allowed_fetches=(host,))


def test_this_machine_is_refused_though_its_name_is_allowed(tmp_path):
    hosts = ("localhost", "127.0.0.1", "[::1]", "a.example", "localhost:8642")
    with serving(
        tmp_path,
        load=lambda path, progress: make_seeing_host(path),
        offered={"seeing": "seeing"},
        allowed_fetches=hosts,
    ) as live:

        def ask(url):
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
            return live.http.post("/v1/chat/completions", json=body)

        for url in ("http://localhost/a", "https://127.0.0.1/a", "http://[::1]/a"):
            response = ask(url)
            assert response.status_code == 400, response.text
            assert "private network" in response.text
        assert "private network" in ask(f"{live.url}/v1/pictures/x").text

        there = Elsewhere({"/a.png": [http(FILE), http(b"<svg/>")]})
        fetcher = live.service.pictures.fetcher
        fetcher._resolve, fetcher._connect = there.resolve, there.connect
        first, second = ask("http://a.example/a.png"), ask("http://a.example/a.png")
        assert first.status_code == second.status_code == 200, first.text
        assert len(there.asked) == 1  # it is fetched once in a while, and not at every turn
        agent = live.service.agents.directory.conversation(first.json()["kvcellar"]["agent_id"])
        assert "a.example" not in json.dumps(agent) and agent[0]["pictures"]
        there.answers["/b.png"] = http(b"<svg/>")
        bad = ask("http://a.example/b.png")
        assert bad.status_code == 400 and bad.json()["error"]["code"] == "invalid_image"


@pytest.fixture
def fetching(tmp_path):
    """A server that fetches from a host that never answers, with time."""
    there = Elsewhere({"/never.png": None})
    with serving(
        tmp_path,
        load=lambda path, progress: make_seeing_host(path),
        offered={"seeing": "seeing"},
        allowed_fetches=("a.example",),
    ) as live:
        live.service.pictures.fetcher = Fetcher(
            ["a.example"], resolve=there.resolve, connect=there.connect, within_s=600
        )
        live.host()
        yield live, there


PART = {"type": "image_url", "image_url": {"url": "http://a.example/never.png"}}
ITEM = {"type": "input_image", "image_url": "http://a.example/never.png"}
BLOCK = {"type": "image", "source": {"type": "url", "url": "http://a.example/never.png"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [ITEM]}]}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [BLOCK]}], "max_tokens": 2},
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "", "images": [ITEM["image_url"]]}]},
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": [PART]}]}),
    ],
)
def test_a_fetch_ends_when_its_client_leaves(fetching, path, body):
    live, there = fetching
    for is_streamed in (False, True):
        more = {} if path == "/tokenize" else {"stream": is_streamed}
        n_asked = len(there.asked)
        with asking(live, path, {"model": "seeing", **body, **more}):
            live.until(lambda n=n_asked: len(there.asked) > n, "the fetch")
            assert there.n_closed == n_asked
        live.until(lambda n=n_asked: there.n_closed > n, "the end of the fetch")
        live.until(live.is_still, "the end of the request")


@contextmanager
def asking(live, path, body):
    """A client that asks, and leaves behind the block."""
    host, _, port = live.url.removeprefix("http://").partition(":")
    with closing(HTTPConnection(host, int(port))) as client:
        client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield


def test_a_turn_that_goes_on_without_its_client_fetches_on(fetching):
    live, there = fetching
    live.post("/v1/agents", {"id": "eye"})
    body = {"text": "What?", "images": ["http://a.example/never.png"], "max_tokens": 2}
    n_connected = len(live.connections)
    with asking(live, "/v1/agents/eye/generate", {**body, "background": True, "stream": True}):
        live.until(lambda: len(there.asked) == 1, "the fetch")
    live.until(lambda: len(live.connections) == n_connected, "that the server knows it has left")
    assert there.n_closed == 0

    async def comes():
        there.readers[0].feed_data(http(FILE))
        there.readers[0].feed_eof()

    live.run(comes())
    live.until(lambda: live.get("/v1/agents/eye")["n_turns"] == 1, "the turn")
    there.answers["/other.png"] = None
    with asking(
        live, "/v1/agents/eye/generate", {**body, "images": ["http://a.example/other.png"]}
    ):
        live.until(lambda: len(there.asked) == 2, "the other fetch")
    live.until(lambda: there.n_closed == 2, "the end of the fetch")


def test_pictures_are_decoded_one_at_a_time_whoever_leaves_meanwhile():
    async def ask():
        desk, running, most = PictureDesk(Fetcher()), [], []
        may_end = threading.Event()

        def work():
            running.append(1)
            most.append(len(running))
            may_end.wait(60)
            running.pop()

        first = asyncio.create_task(desk.alone(work))
        while not running:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(desk.alone(work))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert len(most) == 1
        may_end.set()
        await second
        assert most == [1, 1]

    asyncio.run(ask())
