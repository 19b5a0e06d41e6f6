"""What strangers have put into a place: no turn ends for it, and nothing of theirs is removed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcellar.store import Store
from kvcellar.store.shared.folders import FolderPlace
from kvcellar.store.shared.histories import Pulled
from kvcellar.store.shared.manifests import pack_manifest, register_of, unpack_manifest
from kvcellar.store.shared.opening import open_place
from kvcellar.store.shared.places import MOST_NUMBER, ForeignError, SharedPlace
from kvcellar.store.shared.upkeep import collect, count
from kvcellar.store.shared.valkeys import ValkeyPlace
from tests.store.fakes import History, load_all, save, tokens_of
from tests.store.forging import forge
from tests.store.shared.test_tier import KEYS, NAME, Opener, machine, saved, tier, wait_for

__all__ = ["machine"]

needs_posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs links and pipes")


@pytest.fixture
def place(place_url: str) -> SharedPlace:
    return open_place(place_url, timeout_s=20.0)


def test_a_number_that_no_machine_reaches_is_nobodys_state(
    machine: Opener, place: SharedPlace
) -> None:
    register, key = register_of(NAME), KEYS["full"]
    one = machine("a")
    saved(one, key, tokens_of(1, 20), 1)
    if isinstance(place, ValkeyPlace):
        pytest.skip("a register of Valkey has one number")
    for number in (MOST_NUMBER + 1, 2**63, 2**64 - 1):
        assert place.create(f"{register}/{number:016x}", b"x", 0.0)
    history = saved(one, key, tokens_of(1, 30), 2)
    other = machine("b")
    tier(other).pull_all()
    assert other.get(NAME).tokens.tokens.tolist() == history.tokens
    assert not other.take_events()


@pytest.mark.parametrize("fields", [{"n": "x", "data": "y"}, {"n": "1e300"}, {"n": "-3"}, None])
def test_a_hash_of_somebody_else_s_is_nobodys_state(
    valkey_port: int, tmp_path: Path, fields: dict[str, str] | None
) -> None:
    url = f"valkey://127.0.0.1:{valkey_port}/0?prefix={tmp_path.name}"
    place = open_place(url, timeout_s=20.0)
    assert isinstance(place, ValkeyPlace)
    register = place._key(register_of(NAME))
    if fields is None:
        place._db.set(register, "no hash")
    else:
        place._db.hset(register, mapping=fields)
    place._db.zadd(place._key("registers"), {register_of(NAME): float("inf")})
    with Store(tmp_path / "a", shared=url) as one:
        tier(one).pull_all()
        assert tier(one).pull(NAME) is Pulled.SAME
        assert tier(one).reading.trouble == ""


def test_a_state_with_a_layout_of_brackets_ends_no_turn(
    machine: Opener, place: SharedPlace
) -> None:
    register, key = register_of(NAME), KEYS["full"]
    one, other = machine("a"), machine("b")
    saved(one, key, tokens_of(1, 20), 1)
    assert tier(other).pull(NAME) is Pulled.TAKEN
    state = place.latest(register)
    assert state is not None
    manifest = unpack_manifest(register, state.data)
    object.__setattr__(manifest.ref, "layout_json", "[" * 50_000)
    infos = {info.address: info for info in manifest.infos}
    forged = pack_manifest(manifest.ref, infos, [manifest.ref.serial])
    assert place.advance(register, state.number + 1, forged)
    assert tier(other).pull(NAME) is Pulled.SAME
    tier(other).pull_all()
    assert other.get(NAME).tokens.tokens.tolist() == tokens_of(1, 20)
    (event,) = other.take_events()
    assert event.kind == "damaged"
    assert "layout" in event.detail
    assert tier(other).reading.trouble == ""


def test_what_is_longer_than_anything_of_ours_is_not_read(place: SharedPlace) -> None:
    place.write("blocks/ab/1", b"x" * 1000)
    assert place.read("blocks/ab/1", 1000) == b"x" * 1000
    with pytest.raises(ForeignError):
        place.read("blocks/ab/1", 999)


def test_a_huge_state_is_one_that_nobody_can_read(
    machine: Opener, place: SharedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = KEYS["full"]
    one = machine("a")
    history = saved(one, key, tokens_of(1, 20), 1)
    number = place.number(register_of(NAME))
    assert place.advance(register_of(NAME), number + 1, b"x" * 200_000)
    for module in ("registers", "valkeys"):
        monkeypatch.setattr(f"kvcellar.store.shared.{module}.MOST_STATE_BYTES", 100_000)
    other = machine("b")
    tier(other).pull_all()
    assert tier(other).reading.trouble == ""
    assert [event.kind for event in other.take_events()] == ["damaged"]
    if not isinstance(place, ValkeyPlace):  # which holds nothing but the latest
        assert other.get(NAME).tokens.tokens.tolist() == history.tokens


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_block_that_holds_no_finite_numbers_is_computed_again(
    tmp_path: Path, number: float
) -> None:
    def spoil(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        name = next(name for name in tensors if name.startswith("k."))
        bits = np.array(number, "f4").view("u4") >> 16
        floats = tensors[name].dtype.kind == "f"
        tensors[name].flat[-1] = number if floats else bits

    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as one:
        history = saved(one, key, tokens_of(1, 43), 1)
    for path in [path for path in (share / "blocks").rglob("*") if path.is_file()]:
        forge(path, spoil)
    with Store(tmp_path / "b", shared=str(share)) as other:
        assert tier(other).pull(NAME) is Pulled.TAKEN
        assert load_all(other, history) == 0
        assert "no finite number" in other.take_events()[0].detail


def test_what_was_imported_is_no_other_machine_s_before_a_model_agrees(
    machine: Opener, place: SharedPlace, tmp_path: Path
) -> None:
    with Store(tmp_path / "author") as author:
        history = History(KEYS["full"], tokens_of(1, 43))
        save(author, NAME, history, metadata={"serial": 1})
        author.export_reference(NAME, tmp_path / "file")
    one = machine("a")
    ref = one.import_reference(tmp_path / "file")
    assert tier(one).flush()
    assert all(map(one.is_unproven, ref.addresses)) and count(place).n_blocks == 0
    for address in ref.addresses:
        one.prove(address)
    save(one, NAME, history, metadata={"serial": 2})
    assert tier(one).flush()
    assert count(place).n_blocks == len(ref.addresses)


@needs_posix
def test_a_pipe_in_a_block_s_place_is_computed_again_and_keeps_no_process(tmp_path: Path) -> None:
    share, key = tmp_path / "share", KEYS["full"]
    with Store(tmp_path / "a", shared=str(share)) as one:
        history = saved(one, key, tokens_of(1, 43), 1)
    for path in [path for path in (share / "blocks").rglob("*") if path.is_file()]:
        path.unlink()
        os.mkfifo(path)
    with Store(tmp_path / "b", shared=str(share)) as other:
        assert tier(other).pull(NAME) is Pulled.TAKEN
        assert load_all(other, history) == 0
        wait_for(lambda: len([*(share / "blocks").rglob("*/*")]) == 5)  # of six: it was in the way
    code = (
        "import sys\n"
        "from kvcellar.store.shared.folders import FolderPlace\n"
        "from kvcellar.store.shared.places import ForeignError\n"
        "try: FolderPlace(sys.argv[1]).read(sys.argv[2], 99)\n"
        "except ForeignError: print('no file of ours')\n"
    )
    os.mkfifo(share / "blocks" / "pipe")
    done = subprocess.run(
        [sys.executable, "-c", code, str(share), "blocks/pipe"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "no file of ours\n"


@needs_posix
def test_upkeep_removes_nothing_that_no_store_wrote_and_nothing_behind_a_link(
    tmp_path: Path,
) -> None:
    share, photos = tmp_path / "share", tmp_path / "photos"
    with Store(tmp_path / "a", shared=str(share)) as one:
        saved(one, KEYS["full"], tokens_of(1, 43), 1)
    photos.mkdir()
    theirs = [
        photos / f"ab{'0' * 30}",
        photos / "photo.jpg",
        share / "blocks" / "2019" / "photo.jpg",
        share / "blocks" / "ab" / "notes.txt",
        share / "documents" / "letter.txt",
        share / "agents" / "mine" / "0000000000000001",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    (share / "blocks" / "zz").symlink_to(photos)
    (share / "blocks" / "ab" / f"ab{'1' * 30}").symlink_to(photos / "photo.jpg")
    nobodys = share / "blocks" / "cd" / f"cd{'0' * 30}"
    nobodys.parent.mkdir(exist_ok=True)
    nobodys.write_bytes(b"old")
    os.utime(nobodys, (1, 1))
    place = FolderPlace(str(share))
    report = collect(place, grace_s=60.0)
    assert report.n_blocks == 1
    assert not nobodys.exists()
    assert all(path.read_bytes() == b"mine" for path in theirs)


@needs_posix
def test_nothing_is_written_or_read_behind_a_link(tmp_path: Path) -> None:
    place, elsewhere = FolderPlace(str(tmp_path / "share")), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "1").write_bytes(b"secret")
    (tmp_path / "share" / "leases").symlink_to(elsewhere)
    for ask in (
        lambda: place.read("leases/1", 99),
        lambda: place.write("leases/2", b"x"),
        lambda: place.create("leases/2", b"x", 1.0),
        lambda: place.drop(["leases/1"]),
        lambda: list(place.entries("leases/")),
    ):
        with pytest.raises(ForeignError):
            ask()
    assert [path.name for path in elsewhere.iterdir()] == ["1"]
    with Store(tmp_path / "a", shared=str(tmp_path / "share")) as one:
        lease = one.leases.take(NAME)  # of this machine alone
        one.leases.release(one.leases.renew(lease))


@needs_posix
def test_a_folder_is_as_private_as_the_local_store_unless_its_group_may_write(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        alone, team = tmp_path / "alone", tmp_path / "team"
        team.mkdir()
        team.chmod(0o2770)
        for root in (alone, team):
            FolderPlace(str(root)).write("blocks/ab/1", b"x")
            FolderPlace(str(root)).create("leases/1", b"x", 1.0)
        assert modes(alone) == {0o700, 0o600}
        assert stat.S_IMODE(alone.stat().st_mode) == 0o700
        assert {mode & 0o777 for mode in modes(team)} == {0o770, 0o660}
    finally:
        os.umask(before)


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}


def test_a_lease_that_cannot_be_read_is_nobodys(machine: Opener, place: SharedPlace) -> None:
    one = machine("a")
    for forged in (b"[" * 4000, b"[" * 100_000):
        lease = one.leases.take(NAME)
        place.write(next(entry.key for entry in place.entries("leases/")), forged)
        one.leases.release(lease)
