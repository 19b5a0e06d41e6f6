"""Credentials are nowhere but where the libraries look: not in logs, events, errors or files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvcellar.store import Store
from tests.store.fakes import History, make_key, save, tokens_of
from tests.store.shared.servers import valkey_server

SECRET = "sesame-open"


@pytest.mark.parametrize("password", [SECRET, f"{SECRET}-wrong"])
def test_no_password_of_valkey_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, password: str
) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        valkey_server(tmp_path, "--requirepass", SECRET) as port,
        Store(tmp_path / "a", shared=f"valkey://:{password}@127.0.0.1:{port}/0") as store,
    ):
        save(store, "a@1", History(make_key(), tokens_of(1, 20)), metadata={"serial": 1})
        assert store.shared is not None
        assert store.shared.flush(5) == (password == SECRET)
        stats, events = store.stats(), store.take_events()
    check_untold(tmp_path / "a", SECRET, caplog.text, str(stats), str(events))
    if password != SECRET:
        assert "invalid" in str(events)


def test_no_key_of_s3_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with Store(tmp_path / "a", shared="s3://cellar/x") as store:
        save(store, "a@1", History(make_key(), tokens_of(1, 20)), metadata={"serial": 1})
        assert store.shared is not None
        assert not store.shared.flush(5)
        told = str(store.stats()), str(store.take_events()), repr(store.shared.place)
    check_untold(tmp_path / "a", SECRET, caplog.text, *told)


def check_untold(folder: Path, secret: str, *told: str) -> None:
    assert "shared" in str(told)
    assert not any(secret in text for text in told)
    for path in folder.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
