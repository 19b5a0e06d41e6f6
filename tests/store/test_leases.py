"""Leases of histories: one holder of all processes, known by name, gone with its process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kvcellar.errors import LeaseHeldError, LeaseLostError, StoreError
from kvcellar.store import Store
from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.leases import Lease, LocalLeases
from tests.processes import started


def leases(folder: Path) -> LocalLeases:
    """Leases as a process of its own has them."""
    return LocalLeases(Folder(folder))


def test_one_of_two_has_the_lease_of_a_history_and_the_other_is_told_who(tmp_path: Path) -> None:
    ours, theirs = leases(tmp_path), leases(tmp_path)
    mine = ours.take("poet")
    assert theirs.take("cook").name == "cook"
    with pytest.raises(LeaseHeldError, match=f"extended by process {os.getpid()} on") as error:
        theirs.take("poet")
    assert error.value.owner == mine.owner
    with pytest.raises(LeaseHeldError):
        ours.take("poet")
    ours.release(mine)
    ours.release(mine)
    again = theirs.take("poet")
    assert again.token != mine.token and not again.is_expired
    assert theirs.renew(again) == again
    with pytest.raises(LeaseLostError):
        ours.renew(mine)


def test_a_lease_goes_with_its_process_and_what_it_left_is_cleared_away(tmp_path: Path) -> None:
    Folder(tmp_path)
    with started("tests.store.holding", tmp_path, "poet", "cook") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        ours = leases(tmp_path)
        with pytest.raises(LeaseHeldError, match=f"process {other.pid} on"):
            ours.take("poet")
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    ours.release(ours.take("poet"))
    (left,) = (tmp_path / "leases").iterdir()
    held = ours.take("poet")
    ours.clear()
    (kept,) = (tmp_path / "leases").iterdir()
    assert left != kept
    ours.release(held)
    assert not list((tmp_path / "leases").iterdir())


def test_a_lease_ends_when_its_time_is_over_and_without_one_never() -> None:
    now = time.monotonic()
    assert not Lease("poet", "me").is_expired
    assert not Lease("poet", "me", expires_s=now + 600).is_expired
    assert Lease("poet", "me", expires_s=now).is_expired
    assert Lease("poet", "me").token != Lease("poet", "me").token


def test_a_store_that_closes_lets_go_of_its_leases(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.leases.take("poet")
    with Store(tmp_path) as store:
        store.leases.take("poet")


def test_a_link_in_place_of_a_lease_is_not_followed(tmp_path: Path) -> None:
    ours = leases(tmp_path / "store")
    ours.release(ours.take("poet"))
    target = tmp_path / "letter"
    target.write_text("mine")
    held = ours.take("poet")
    (path,) = (tmp_path / "store" / "leases").iterdir()
    ours.release(held)
    path.symlink_to(target)
    with pytest.raises(StoreError, match="none is followed"):
        ours.take("poet")
    assert target.read_text() == "mine"
    path.unlink()
    (tmp_path / "store" / "leases").rmdir()
    (tmp_path / "store" / "leases").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="is a link"):
        Folder(tmp_path / "store")


def test_where_nobody_can_write_nobody_else_extends_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = leases(tmp_path)

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvcellar.store.disk.leases.open_own", refuse)
    lease = ours.take("poet")
    assert ours.renew(lease) == lease
    ours.release(lease)
