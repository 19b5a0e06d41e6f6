"""A place of each kind, new for each test, on servers that run for the session."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.shared.servers import S3_KEYS, s3_server, valkey_server, wait_long


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places may be slow, unless a test says otherwise."""
    wait_long(monkeypatch)


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """URL of an S3-compatible server."""
    with s3_server() as url:
        yield url


@pytest.fixture(scope="session")
def valkey_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a real Valkey."""
    with valkey_server(tmp_path_factory.mktemp("valkey")) as port:
        yield port


@pytest.fixture(params=["file", "s3", "valkey"])
def place_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """URL of an empty place."""
    name = uuid.uuid4().hex
    if request.param == "file":
        return f"file://{tmp_path}/share"
    if request.param == "valkey":
        port = request.getfixturevalue("valkey_port")
        return f"valkey://127.0.0.1:{port}/0?prefix={name}"
    for key, value in {**S3_KEYS, "AWS_ENDPOINT_URL": request.getfixturevalue("s3_url")}.items():
        monkeypatch.setenv(key, value)
    return f"s3://cellar/{name}"
