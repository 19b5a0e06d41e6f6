"""An S3 that answers late, twice, wrongly or not at all: nothing is lost, and nobody parts."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvcellar.store import Store
from kvcellar.store.shared import guarded_calls, pusher
from kvcellar.store.shared.histories import Pulled
from tests.store.fakes import FULL, History, load_all, make_key, save, tokens_of
from tests.store.shared.servers import S3_KEYS

NAME = "poet@0011"
KEY = make_key(groups=(FULL,))
KINDS = ("late", "lost", "twice", "refused", "wrong", "cut")


class Unsteady(BaseHTTPRequestHandler):
    """Passes requests on, and does something to some of them.

    ``late``: the answer takes a while. ``lost``: the request is done and not answered. ``twice``:
    it is done twice, and the second answer is given. ``refused``: 503, and nothing is done.
    ``wrong``: what is read is something else, with a 200. ``cut``: the connection ends in it.
    """

    protocol_version = "HTTP/1.1"
    target = ""
    rng = random.Random(0)
    kinds: tuple[str, ...] = ()
    share = 0.25
    struck: list[str]

    def pass_on(self) -> None:
        """Answer, or not."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        kind = self.rng.choice(self.kinds) if self.kinds and self.rng.random() < self.share else ""
        if kind in ("wrong", "cut") and self.command != "GET":
            kind = "lost"
        if kind:
            self.struck.append(kind)
        if kind == "refused":
            return self.answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
        for _ in range(2 if kind == "twice" else 1):
            status, headers, said = self.asked(body)
        if kind == "late":
            time.sleep(0.3)
        if kind == "lost":
            self.close_connection = True
            return None
        if kind == "wrong" and status == 200:
            said = self.rng.randbytes(len(said)) if said else b"<html>Sign in</html>"
        self.answer(status, headers, said, len(said) // 2 if kind == "cut" else None)
        return None

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on  # noqa: N815

    def asked(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """What the server behind says."""
        there = http.client.HTTPConnection(self.target)
        there.request(self.command, self.path, body, dict(self.headers))
        answer = there.getresponse()
        said = answer.read()
        there.close()
        return answer.status, dict(answer.headers), said

    def answer(
        self, status: int, headers: dict[str, str], said: bytes, n_sent: int | None = None
    ) -> None:
        self.send_response(status)
        left_out = {"content-length", "connection", "date", "server", "transfer-encoding"}
        for name, value in headers.items():
            if name.lower() not in left_out:
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(said))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said[:n_sent])
        self.close_connection |= n_sent is not None

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def unsteady(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Unsteady]]:
    """What stands between the stores and a bucket."""

    class Mine(Unsteady):
        target = urlsplit(s3_url).netloc
        struck: list[str] = []  # noqa: RUF012

    with ThreadingHTTPServer(("127.0.0.1", 0), Mine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        for key, value in {**S3_KEYS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(guarded_calls, "FIRST_PAUSE_S", 0.02)
        monkeypatch.setattr(guarded_calls, "LONGEST_PAUSE_S", 0.05)
        monkeypatch.setattr(pusher, "_TRY_AGAIN_S", 0.02)
        yield Mine
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_two_machines_lose_nothing_and_nobody_parts(
    kind: str, unsteady: type[Unsteady], tmp_path: Path
) -> None:
    url = f"s3://cellar/{kind}-{time.time_ns()}"
    tokens = tokens_of(1, 20)
    with Store(tmp_path / "a", shared=url) as one, Store(tmp_path / "b", shared=url) as two:
        for serial in range(1, 5):
            unsteady.kinds = KINDS if kind == "all" else (kind,)
            unsteady.rng = random.Random(serial)
            ours, theirs = (one, two) if serial % 2 else (two, one)
            assert ours.shared is not None and theirs.shared is not None
            tokens = [*tokens, *tokens_of(serial + 1, 9)]
            save(ours, NAME, History(KEY, tokens), metadata={"serial": serial})
            theirs.shared.pull(NAME)  # in the midst of it
            unsteady.kinds = ()
            while not ours.shared.flush(180):
                time.sleep(0.02)
            assert not ours.shared.is_diverged(NAME)
            while theirs.shared.pull(NAME) is not Pulled.TAKEN and (
                list(theirs.get(NAME).tokens) != tokens
            ):
                time.sleep(0.02)
            assert load_all(theirs, History(KEY, tokens)) >= len(tokens) // 8 * 8
            assert theirs.get(NAME).serial == serial and theirs.verify().is_good
        assert unsteady.struck
