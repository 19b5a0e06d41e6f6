"""A hub on this machine: downloads by the real library, broken off and taken up again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvcellar.models.files.hub import DEMO_FOLDER

COMMIT = "c" * 40
WEIGHTS = "model.safetensors"


class Hub(ThreadingHTTPServer):
    """One repository, ``some/model``, with the bundled model's files.

    Attributes:
        files: their bytes by name.
        breaks_at: bytes of the weights after which the connection ends, once; None: it never does.
        fails: true if the weights cannot be had.
        sha256: what the weights' SHA-256 is said to be; None: nothing is said of it.
        asked: for each file, the first bytes that were asked for, in order.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {
            path.name: path.read_bytes() for path in DEMO_FOLDER.iterdir() if path.is_file()
        }
        self.files["README.md"] = b"not wanted"
        self.breaks_at: int | None = None
        self.fails = False
        self.sha256: str | None = None
        self.asked: dict[str, list[int]] = {name: [] for name in self.files}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/some/model"):
            self._send(200, self._described(path), {"Content-Type": "application/json"}, has_body)
        elif (found := re.fullmatch(r"/some/model/resolve/\w+/(.+)", path)) is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, has_body)
        elif found[1] == WEIGHTS and self.server.fails:
            self._send(403, b"", {}, has_body)
        elif (content := self.server.files.get(found[1])) is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, has_body)
        else:
            self._send_file(found[1], content, has_body)

    def _described(self, path: str) -> bytes:
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
            for name, content in self.server.files.items()
        ]
        if "/tree/" in path:
            return json.dumps(entries).encode()
        siblings = [{"rfilename": entry["path"]} for entry in entries]
        said = {"id": "some/model", "sha": COMMIT, "siblings": siblings, "private": False}
        return json.dumps(said).encode()

    def _send_file(self, name: str, content: bytes, has_body: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first = int(asked[1]) if asked else 0
        etag = (self.server.sha256 if name == WEIGHTS else None) or _etag(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        stop = None
        if has_body:
            self.server.asked[name].append(first)
        if name == WEIGHTS and has_body:
            stop, self.server.breaks_at = self.server.breaks_at, None
        self._send(206 if asked else 200, content[first:], headers, has_body, stop)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        has_body: bool,
        stop: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body[:stop])
        if stop is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def served() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def command(hub_url: str, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose hub is ours: the library reads that once, when it is imported."""
    env = {
        **os.environ,
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "10",
        "KVCELLAR_HOME": str(home / "own"),
        "HOME": str(home),
        "no_proxy": "127.0.0.1",
    }
    return subprocess.run(
        [sys.executable, "-m", "kvcellar", *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_connection_that_breaks_is_taken_up_where_it_ended(served, tmp_path):
    served.breaks_at = 12_000_000  # the library writes 10 MiB at a time
    pulled = command(served.url, tmp_path, "models", "pull", "some/model")
    assert pulled.returncode == 0, pulled.stderr
    assert served.asked[WEIGHTS] == [0, 10 << 20]
    folder = Path(pulled.stdout.strip())
    assert (folder / WEIGHTS).read_bytes() == served.files[WEIGHTS]
    assert not (folder / "README.md").exists()
    listed = json.loads(command(served.url, tmp_path, "models", "list", "--json").stdout)
    (row,) = (row for row in listed if row["name"] == "some/model")
    assert row["place"] == "hugging face" and row["memory_bytes"] and not row["lacks"]


def test_a_file_that_came_damaged_is_deleted(served, tmp_path):
    right = hashlib.sha256(served.files[WEIGHTS]).hexdigest()
    served.sha256 = right[::-1]
    damaged = command(served.url, tmp_path, "models", "pull", "some/model")
    assert damaged.returncode == 2 and f"its SHA-256 is {right}" in damaged.stderr, damaged.stderr
    assert not list((tmp_path / "hf").rglob(served.sha256))

    served.sha256 = right
    pulled = command(served.url, tmp_path, "models", "pull", "some/model")
    assert pulled.returncode == 0, pulled.stderr
    assert (Path(pulled.stdout.strip()) / WEIGHTS).read_bytes() == served.files[WEIGHTS]


def test_what_came_whole_is_not_downloaded_again(served, tmp_path):
    served.fails = True
    broken = command(served.url, tmp_path, "models", "pull", "some/model")
    assert broken.returncode == 2 and "came whole are kept" in broken.stderr, broken.stderr

    served.fails = False
    pulled = command(served.url, tmp_path, "models", "pull", "some/model")
    assert pulled.returncode == 0, pulled.stderr
    assert served.asked["tokenizer.json"] == [0]
    assert (Path(pulled.stdout.strip()) / WEIGHTS).read_bytes() == served.files[WEIGHTS]


def test_a_model_that_the_hub_does_not_have_is_said_in_one_line(served, tmp_path):
    result = command(served.url, tmp_path, "models", "pull", "some/other")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "no model of that name on the Hugging Face hub" in result.stderr
