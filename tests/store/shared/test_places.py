"""What every place has to do, whatever lies behind it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.errors import ConfigError
from kvcellar.store.shared.folders import FolderPlace
from kvcellar.store.shared.opening import open_place
from kvcellar.store.shared.places import MOST_PENDING, PlaceError, SharedPlace
from kvcellar.store.shared.urls import shown_url


@pytest.fixture
def place(place_url: str) -> Iterator[SharedPlace]:
    opened = open_place(place_url, timeout_s=20.0)
    yield opened
    opened.close()


def test_a_name_holds_what_was_written_last(place: SharedPlace) -> None:
    assert place.read("blocks/1", 99) is None
    assert place.size("blocks/1") is None
    place.write("blocks/1", b"first")
    place.write("blocks/1", memoryview(b"second"))
    assert (place.read("blocks/1", 99), place.size("blocks/1")) == (b"second", 6)
    place.drop(["blocks/1", "blocks/2"])
    assert place.read("blocks/1", 99) is None


def test_only_one_can_create_a_name(place: SharedPlace) -> None:
    assert place.create("leases/1", b"mine", 60.0)
    assert not place.create("leases/1", b"yours", 60.0)
    assert place.read("leases/1", 99) == b"mine"


def test_a_register_moves_on_by_one_state_at_a_time(place: SharedPlace) -> None:
    assert place.latest("agents/a") is None
    assert place.number("agents/a") == 0
    assert place.advance("agents/a", 5, b"five")  # an empty one takes any number
    assert place.advance("agents/a", 6, b"six")
    assert not place.advance("agents/a", 6, b"another six")
    state = place.latest("agents/a")
    assert state is not None
    assert (state.number, state.data) == (6, b"six")
    assert place.number("agents/a") == 6
    assert place.numbers("agents/") == {"agents/a": 6}
    place.forget("agents/a")
    assert place.latest("agents/a") is None
    assert place.numbers("agents/") == {}


def test_who_follows_a_state_of_long_ago_has_lost(place: SharedPlace) -> None:
    for number in range(1, MOST_PENDING + 3):
        assert place.advance("agents/a", number, b"%d" % number)
    assert not place.advance("agents/a", 2, b"late")
    state = place.latest("agents/a")
    assert state is not None
    assert state.number == MOST_PENDING + 2


def test_of_many_who_advance_at_once_one_wins(place: SharedPlace) -> None:
    won = []

    def run(i: int) -> None:
        if place.advance("agents/a", 1, b"%d" % i):
            won.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = place.latest("agents/a")
    assert state is not None
    assert [b"%d" % i for i in won] == [state.data]


def test_all_names_are_listed_with_their_sizes_and_times(place: SharedPlace) -> None:
    place.write("blocks/ab/1", b"x" * 100)
    place.write("windows/ab/2", b"y")
    (entry,) = place.entries("blocks/")
    assert entry.key == "blocks/ab/1"
    assert entry.size_bytes >= 100
    assert abs(entry.modified_s - time.time()) < 60
    assert {entry.key for entry in place.entries("")} == {"blocks/ab/1", "windows/ab/2"}


@pytest.mark.parametrize("url", ["s3://cellar/x", "valkey://:hidden@127.0.0.1:1/0"])
def test_a_place_that_is_gone_says_so_without_its_secrets(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    place = open_place(url, timeout_s=2.0)
    with pytest.raises(PlaceError) as raised:
        place.read("x", 99)
    assert "hidden" not in str(raised.value)
    assert place.title in str(raised.value)


def test_a_url_that_names_no_place_is_refused() -> None:
    for url in ("ftp://host/x", "share/kvcellar", "valkey://host:port/0"):
        with pytest.raises(ConfigError):
            open_place(url, timeout_s=1.0)
    assert shown_url("valkey://me:hidden@host:1/0?prefix=x") == "valkey://host:1/0"


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "a/./b", "/a", "a//b", "a/", "a/.."])
def test_a_name_that_leads_elsewhere_in_a_folder_is_none(tmp_path: Path, name: str) -> None:
    place = FolderPlace(str(tmp_path / "share"))
    for ask in (
        lambda: place.read(name, 9),
        lambda: place.write(name, b"x"),
        lambda: place.create(name, b"x", 1.0),
        lambda: place.size(name),
        lambda: place.drop([name]),
    ):
        with pytest.raises(PlaceError, match="is no name"):
            ask()
    assert not list((tmp_path / "share").iterdir())


@pytest.mark.parametrize("mark", ["", "/", "?", "#", "@", "[", "%", ":"])
@pytest.mark.parametrize(
    "form", ["valkey://me:{}@host:port/0", "valkey:me:{}@host", "s3://me:{}@b/x"]
)
def test_no_refusal_tells_a_password_whatever_is_in_it(mark: str, form: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_place(form.format(f"hid{mark}den"), timeout_s=1.0)
    assert "hid" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "empty"),
        ("valkey://[host", "%5B"),
        ("valkey://me:hid/den@host:1/0", "%2F"),
        ("valkey://host:1/first", "number"),
        ("valkey:///0", "valkey://host"),
        ("valkey://host:1?db=3", "'db'"),
        ("file://mnt/share", "three slashes"),
        ("file:///mnt/share?x=1", "%3F"),
        ("s3://cellar/x?signature=hidden", "no options"),
        ("s3://key:hidden@cellar/x", "environment"),
    ],
)
def test_what_would_be_ignored_in_a_url_is_refused_by_name(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        open_place(url, timeout_s=1.0)
    assert "hid" not in str(raised.value)


def test_places_that_differ_are_called_by_different_names() -> None:
    for url in ("abfss://one@account.host/x", "s3://cellar/a@b", "s3://cellar/a"):
        assert shown_url(url) == url
    for path in ("/a@b", "~/a@b", "./a@b", "file:///a@b/c", "file:///a:b@c"):
        assert shown_url(path) == path, "a folder has no password"
    urls = ("valkey://host:1/0?prefix=one", "valkey://host:1/0?prefix=other", "valkey://host:1/0")
    assert len({open_place(url, timeout_s=1.0).title for url in urls}) == 3


def test_who_has_no_credentials_is_told_where_they_are_looked_for(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # no cloud's machine
    place = open_place("s3://cellar/x", timeout_s=5.0)
    with pytest.raises(PlaceError, match=r"no credentials were found.*AWS_ACCESS_KEY_ID"):
        place.read("blocks/1", 99)
    place.close()
