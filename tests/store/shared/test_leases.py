"""Leases among machines, and what becomes of them when the place goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcellar.errors import LeaseHeldError, LeaseLostError
from kvcellar.store import Store
from kvcellar.store.shared import leases
from kvcellar.store.shared.folders import FolderPlace
from kvcellar.store.shared.places import PlaceError

NAME = "poet@0011"


def broken(*_: object) -> object:
    raise PlaceError("no answer")


@pytest.fixture
def machines(tmp_path: Path, place_url: str) -> Iterator[tuple[Store, Store]]:
    with (
        Store(tmp_path / "a", shared=place_url) as one,
        Store(tmp_path / "b", shared=place_url) as b,
    ):
        yield one, b


def test_one_machine_at_a_time_has_a_lease(machines: tuple[Store, Store]) -> None:
    one, other = machines
    lease = one.leases.take(NAME)
    with pytest.raises(LeaseHeldError, match="process"):
        other.leases.take(NAME)
    later = one.leases.renew(lease)
    assert (later.expires_s or 0) >= (lease.expires_s or 0) > time.monotonic()
    one.leases.release(later)
    other.leases.release(other.leases.take(NAME))


def test_the_lease_of_a_machine_that_died_expires(
    machines: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machines
    monkeypatch.setattr(leases, "TTL_S", 0.05)
    lost = one.leases.take(NAME)
    time.sleep(0.1)
    monkeypatch.setattr(leases, "TTL_S", 30.0)
    mine = other.leases.take(NAME)
    with pytest.raises(LeaseLostError):
        one.leases.renew(lost)
    one.leases.release(lost)  # takes nothing from who has it now
    with pytest.raises(LeaseHeldError):
        one.leases.take(NAME)
    other.leases.release(mine)


@pytest.mark.parametrize("shift_s", [-1e6, 1e6])
def test_a_clock_that_is_set_ends_no_lease_of_its_holder(
    shift_s: float, machines: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    lease, now = one.leases.take(NAME), time.time()
    monkeypatch.setattr(time, "time", lambda: now + shift_s)
    assert not lease.is_expired
    one.leases.release(one.leases.renew(lease))
    one.leases.release(one.leases.take(NAME))


def test_a_lease_of_a_clock_that_runs_ahead_is_over_when_nobody_renews_it(
    machines: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machines
    now = time.time

    @contextmanager
    def ahead() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + 1e6)
            yield

    with ahead():
        held = one.leases.take(NAME)
    monkeypatch.setattr(leases, "TTL_S", 0.05)
    with pytest.raises(LeaseHeldError):
        other.leases.take(NAME)
    time.sleep(0.06)
    with ahead():
        one.leases.renew(held)
    with pytest.raises(LeaseHeldError):  # it was renewed meanwhile, so its holder lives
        other.leases.take(NAME)
    time.sleep(0.06)
    other.leases.release(other.leases.take(NAME))


def test_a_lease_that_could_not_be_released_keeps_its_own_machine_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "a", shared=str(tmp_path / "share")) as store:
        lease = store.leases.take(NAME)
        with monkeypatch.context() as patch:
            patch.setattr(FolderPlace, "_ask", broken)
            store.leases.release(lease)
        assert store.shared is not None
        while store.shared.writing.is_away:
            time.sleep(0.05)
        again = store.leases.take(NAME)
        assert again.expires_s is not None, "the place has it, too"
        store.leases.release(again)


def test_leases_are_the_machines_own_while_the_place_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "a", shared=str(tmp_path / "share")) as store:
        shared = store.leases.take("other@0011")
        monkeypatch.setattr(FolderPlace, "_ask", broken)
        lease = store.leases.take(NAME)
        assert lease.expires_s is None
        with pytest.raises(LeaseHeldError):
            store.leases.take(NAME)
        store.leases.release(lease)
        assert store.leases.renew(shared).expires_s is not None
