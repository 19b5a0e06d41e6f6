"""References: the latest state of a history, the one before where that is damaged, and which is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import StoreError, UnknownReferenceError
from kvcellar.history import History as Tokens
from kvcellar.store import EventKind, Reference, Store, StoreConfig
from kvcellar.store.disk.reference_files import ReferenceFiles, previous_of
from kvcellar.store.values.format import DamagedError, read_file
from kvcellar.store.values.references import (
    MAX_NAME_BYTES,
    Boundary,
    checked_name,
    unpack_reference,
)
from tests.store.fakes import History, make_key, save, tokens_of
from tests.store.forging import Change, facts, forge, forged

COLD = StoreConfig(warm_bytes=0)
KEY = make_key()
WHOLE = Reference(
    "poet@ü",
    "model",
    KEY.layout.as_json,
    Tokens(range(20)),
    (b"a" * 16, b"b" * 16),
    16,
    (Boundary(5, b"c" * 16), Boundary(20, b"d" * 16)),
    "parent@x",
    7,
    {"serial": 5, "list": [1, None, {"x": "ü"}]},
    True,
    9,
    1e9,
)


def said(ref: Reference) -> tuple[object, ...]:
    names = "name fingerprint layout_json blocks n_stored boundaries parent parent_position"
    more = "metadata is_evicted revision saved_at"
    return (ref.tokens.tokens.tolist(), *(getattr(ref, n) for n in f"{names} {more}".split()))


@pytest.mark.parametrize("ref", [WHOLE, Reference("a", "", "{}", Tokens())])
def test_a_reference_is_read_as_it_was_written(ref: Reference) -> None:
    assert said(unpack_reference(ref.pack())) == said(ref)
    assert ref.addresses == {*ref.blocks, *(b.address for b in ref.boundaries)}


def tensors_are(**new: np.ndarray) -> Change:
    return lambda metadata, tensors: tensors.update(new)


DEEP = "facts is nested too deep"


def texts_are(**new: str) -> Change:
    return lambda metadata, tensors: metadata.update(new)


WRONG: dict[str, tuple[Change, str]] = {
    "a block and no reference": (texts_are(kind="block"), "it is a block and no reference"),
    "a name of two lines": (facts(name="a\nb"), "cannot name a history"),
    "a parent of no name": (facts(parent=""), "cannot name a history"),
    "a place behind no parent": (facts(parent_position=-1), "parent_position has to lie"),
    "more stored than there is": (facts(n_stored=21), "n_stored has to lie between 0 and 20"),
    "fewer than none": (facts(n_stored=-1), "n_stored has to lie between 0 and 20"),
    "a first revision of 0": (facts(revision=0), "revision has to lie between 1"),
    "an eviction of 1": (facts(is_evicted=1), "is_evicted has to be true or false"),
    "a time that is a text": (facts(saved_at="now"), "saved_at has to be a number"),
    "facts that are a list": (texts_are(facts="[]"), "facts has to be an object"),
    "facts of nothing": (texts_are(facts="{}"), "there is no 'parent'"),
    "metadata that is a list": (texts_are(metadata="[]"), "metadata has to be an object"),
    "metadata that is no JSON": (texts_are(metadata="{"), "metadata is no JSON"),
    "a token below 0": (tensors_are(tokens=np.array([0, -1])), "tokens have to lie between 0"),
    "a token that is too large": (tensors_are(tokens=np.array([1 << 62])), "tokens have to lie"),
    "tokens in rows": (tensors_are(tokens=np.zeros((2, 2), np.int64)), "tokens have to be a list"),
    "tokens that are floats": (tensors_are(tokens=np.zeros(20, np.float32)), "to be a list of int"),
    "a boundary behind the end": (tensors_are(window_lengths=np.array([5, 21])), "window_lengths"),
    "boundaries that descend": (tensors_are(window_lengths=np.array([20, 5])), "have to ascend"),
    "a boundary twice": (tensors_are(window_lengths=np.array([5, 5])), "have to ascend"),
    "one boundary of two": (tensors_are(window_lengths=np.array([5])), "one for each window"),
    "short addresses": (tensors_are(blocks=np.zeros((2, 15), np.uint8)), "addresses of 16 bytes"),
    "flat addresses": (tensors_are(blocks=np.zeros(32, np.uint8)), "addresses of 16 bytes"),
    "addresses of integers": (tensors_are(blocks=np.zeros((2, 16), np.int64)), "addresses of 16"),
    "no windows": (lambda metadata, tensors: tensors.__delitem__("windows"), "no 'windows'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_reference_that_says_what_cannot_be_is_damaged(what: str, tmp_path: Path) -> None:
    change, words = WRONG[what]
    path = tmp_path / "file"
    path.write_bytes(forged(WHOLE.pack(), change))
    with pytest.raises(DamagedError, match=words):
        unpack_reference(read_file(path))


def test_names_are_printable_and_bounded() -> None:
    for name in ("a", "ü/x y", "x" * MAX_NAME_BYTES, "ü" * (MAX_NAME_BYTES // 2)):
        assert checked_name(name) == name
    for name in ("", "a\n", "\0", "x" * (MAX_NAME_BYTES + 1), "ü" * (MAX_NAME_BYTES // 2) + "x"):
        with pytest.raises(StoreError, match=r"\(\d+ bytes\) cannot name a history"):
            checked_name(name)


@pytest.mark.parametrize(
    ("value", "serial"),
    [
        *((n, n) for n in (1, 5, (1 << 62) - 1)),
        *((odd, 0) for odd in (0, -1, True, "5", 5.0, None, 1 << 62)),
    ],
)
def test_a_serial_number_is_a_positive_integer_or_none(value: object, serial: int) -> None:
    assert Reference("a", "", "{}", Tokens(), metadata={"serial": value}).serial == serial


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    """A history that was saved twice, and one that was saved once."""
    with Store(quick_path / "store", COLD) as opened:
        for n in (9, 18):
            save(opened, "a", History(KEY, tokens_of(0, n)), metadata={"n": n})
        save(opened, "b", History(KEY, tokens_of(1, 9)))
        yield opened


def files_of(store: Store) -> ReferenceFiles:
    return store._cold.references


def test_where_the_latest_state_is_damaged_the_one_before_is_given_and_that_said(
    store: Store,
) -> None:
    path = store._folder.of_reference("a")
    path.write_bytes(path.read_bytes()[:-1])
    ref = store.get("a")
    assert (ref.revision, ref.metadata, len(ref.tokens)) == (1, {"n": 9}, 9)
    (event,) = store.take_events()
    assert (event.kind, event.subject) == (EventKind.REFERENCE_DAMAGED, "a")
    assert "the state before is used" in event.detail
    assert files_of(store).damage_of("a") == event.detail.partition(";")[0]
    save(store, "a", History(KEY, tokens_of(0, 27)))
    assert (len(store.get("a").tokens), store.take_events()[-1].kind) == (27, event.kind)
    path.write_bytes(b"x")
    assert store.get("a").revision == 1, "what was damaged is no state before"
    store.take_events()
    assert files_of(store).damage_of("b") is None and files_of(store).damage_of("c") is None
    previous_of(path).write_bytes(b"x")
    with pytest.raises(StoreError, match=r"'a' is damaged \(.+\); `kvcellar store verify` puts"):
        store.get("a")
    (event,) = store.take_events()
    assert event.subject == path.stem and "there is no state before" in event.detail
    with pytest.raises(UnknownReferenceError, match=r"no history 'c' is in .*; it holds b, a"):
        store.get("c")


def test_a_file_in_anothers_place_is_not_believed(store: Store) -> None:
    ours, theirs = (store._folder.of_reference(name) for name in "ab")
    ours.write_bytes(theirs.read_bytes())
    assert store.get("a").revision == 1
    assert "it is the reference of 'b'" in store.take_events()[0].detail


def test_histories_without_a_state_that_can_be_read_are_named_with_what_is_wrong(
    store: Store, quick_path: Path
) -> None:
    assert store.damaged_references() == {}
    path = store._folder.of_reference("a")
    good = path.read_bytes()
    path.write_bytes(b"x" * 5)
    for _ in range(2):  # found, and then known
        assert store.damaged_references() == {"a": "5 bytes are too few for a header"}
    path.write_bytes(b"x" * 6)
    assert store.damaged_references() == {"a": "6 bytes are too few for a header"}
    path.write_bytes(good)
    assert store.damaged_references() == {}
    previous_of(path).unlink()
    forge(path, facts(revision=0))
    store.close()
    for file in store.path.glob("catalogue*"):
        file.unlink()
    with Store(store.path, COLD) as again:
        (name, why), *others = again.damaged_references().items()
        assert (name, others) == ("a", []) and "revision has to lie" in why, "its header says it"
        forge(path, facts(name="c", revision=0))
        (name,) = again.damaged_references()
        assert name == path.stem, "that is not its own name"
        forge(path, texts_are(facts="[" * 100_000))
        assert again.damaged_references() == {path.stem: "its facts cannot be read: " + DEEP}
        path.unlink()
        assert again.damaged_references() == {}


def test_a_history_is_named_by_its_last_five_when_it_is_unknown(store: Store) -> None:
    for n in range(5):
        store.save(f"n{n}", KEY, [n]).wait()
    with pytest.raises(UnknownReferenceError, match=r"it holds n0, n1, n2, n3, n4, \.\.\.$"):
        store.get("x")
    for name in ("a", "b"):
        store.delete(name)
    with pytest.raises(UnknownReferenceError, match=r"it holds n0, n1, n2, n3, n4$"):
        store.delete("x")


def test_what_is_deleted_is_gone_with_its_state_before_and_its_records(store: Store) -> None:
    store.record("a", 1, b"x")
    path = store._folder.of_reference("a")
    assert files_of(store).size_bytes(path) == (
        path.stat().st_size + previous_of(path).stat().st_size
    )
    only = store._folder.of_reference("b")
    assert files_of(store).size_bytes(only) == only.stat().st_size
    store.delete("a")
    assert not path.exists() and not previous_of(path).exists() and store.recorded("a") == []
    assert not store.has_reference("a") and store.has_reference("b")
    assert store.revisions() == {"b": 1} and store.revision("a") is None
    with store._cold.locked():
        assert not files_of(store).remove("a") and files_of(store).remove("b")


def test_what_is_saved_is_behind_what_was_recorded_or_supersedes_it(store: Store) -> None:
    for n in (1, 2, 3):
        store.record("a", n, bytes([n]))
    store.save("a", KEY, [1], metadata={"serial": 2}).wait()
    store.record("b", 9, b"")  # what is superseded goes with the next write
    assert store.recorded("a") == [(3, b"\x03")] == store.recorded("a", 2)
    assert store.recorded("a", 3) == [] and store.recorded_serials() == {"a": 3, "b": 9}


def test_a_state_that_another_process_has_gone_beyond_is_not_published(store: Store) -> None:
    def state(serial: int, n: int) -> str:
        history = History(KEY, tokens_of(0, n))
        options = {"metadata": {"serial": serial}}
        return store.save("a", KEY, history.tokens, history, **options).wait()

    assert state(5, 20) == "published"
    revision = store.get("a").revision
    assert state(4, 25) == "published"
    assert (store.get("a").serial, len(store.get("a").tokens)) == (5, 20)
    assert state(5, 22) == "published"
    assert (store.get("a").revision, len(store.get("a").tokens)) == (revision + 1, 22)
    assert state(6, 10) == "published"
    assert (store.get("a").serial, len(store.get("a").tokens)) == (6, 10)
