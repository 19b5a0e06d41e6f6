"""One history in one file: whole or not at all, and what it says is held to what it holds."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvcellar.errors import StoreError, UnknownReferenceError
from kvcellar.pictures.picture import Picture
from kvcellar.store import Reference, Store, StoreConfig
from kvcellar.store.disk import exchange
from kvcellar.store.values.format import read_from
from tests.store.fakes import FULL, STATE, WINDOW, History, load_all, make_key, save, tokens_of
from tests.store.forging import facts, forge_export, forged

COLD = StoreConfig(warm_bytes=0)
KEY = make_key(groups=[FULL, WINDOW], state=STATE)
HISTORY = History(KEY, tokens_of(0, 43))

Entries = dict[str, bytes]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Entries:
    """The entries of an exported history of six blocks and two boundary states."""
    folder = tmp_path_factory.mktemp("export")
    with Store(folder / "store", COLD) as store:
        save(store, "a", HISTORY, boundaries=(20,))
        store.export_reference("a", folder / "file")
    with zipfile.ZipFile(folder / "file") as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o600}
        return {name: archive.read(name) for name in archive.namelist()}


def written(path: Path, entries: Entries, how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def blocks_of(entries: Entries) -> list[str]:
    """Names of the blocks, in their order."""
    with_start = []
    for name, data in entries.items():
        if name.startswith("blocks/"):
            file = read_from(io.BytesIO(data), len(data))
            with_start.append((int(file.metadata["start"]), name))
    return [name for _, name in sorted(with_start)]


def changed(entries: Entries, name: str, change: Callable[..., None]) -> Entries:
    data = entries[name]
    return entries | {name: forged(read_from(io.BytesIO(data), len(data)), change)}


def of_reference(change: Callable[[dict[str, Any]], None]) -> Callable[[Entries], Entries]:
    def build(entries: Entries) -> Entries:
        return changed(entries, exchange.REFERENCE, lambda metadata, tensors: change(tensors))

    return build


def swap_two(entries: Entries) -> Entries:
    first, second, *_ = blocks_of(entries)
    return entries | {first: entries[second], second: entries[first]}


def not_finite(entries: Entries) -> Entries:
    def spoil(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
        tensors["k.0"].flat[3] = np.inf

    return changed(entries, blocks_of(entries)[1], spoil)


def of_another_model(entries: Entries) -> Entries:
    def change(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
        metadata["fingerprint"] = "other"

    return changed(entries, exchange.REFERENCE, change)


def reversed_blocks(tensors: dict[str, Any]) -> None:
    tensors["blocks"] = tensors["blocks"][::-1].copy()


def without_first(tensors: dict[str, Any]) -> None:
    tensors["blocks"] = tensors["blocks"][1:].copy()


def without_last(tensors: dict[str, Any]) -> None:
    tensors["blocks"] = tensors["blocks"][:-1].copy()


def twice_the_last(tensors: dict[str, Any]) -> None:
    tensors["blocks"] = np.concatenate([tensors["blocks"], tensors["blocks"][-1:]])


def other_token(tensors: dict[str, Any]) -> None:
    tensors["tokens"][20] += 1


def other_last_token(tensors: dict[str, Any]) -> None:
    tensors["tokens"][-1] += 1


WRONG: dict[str, tuple[Callable[[Entries], Entries], str]] = {
    "two blocks in each other's place": (swap_two, "is another block"),
    "blocks in another order": (of_reference(reversed_blocks), "does not follow the block before"),
    "no first block": (of_reference(without_first), "does not follow the block before"),
    "no last block": (of_reference(without_last), "blocks hold 40 tokens, it speaks of 43"),
    "a block twice": (of_reference(twice_the_last), "does not follow the block before"),
    "another token": (of_reference(other_token), "holds other tokens"),
    "another last token": (of_reference(other_last_token), "holds other tokens"),
    "numbers that are not finite": (not_finite, "no finite number"),
    "another model": (of_another_model, "or of another model"),
    "no reference": (
        lambda entries: {n: data for n, data in entries.items() if n != exchange.REFERENCE},
        "reference.safetensors",
    ),
    "no block": (
        lambda entries: {n: d for n, d in entries.items() if n != blocks_of(entries)[2]},
        "blocks/",
    ),
    "no boundary state": (
        lambda entries: {n: d for n, d in entries.items() if not n.startswith("windows/")},
        "windows/",
    ),
    "a state in a block's place": (
        lambda entries: (
            entries
            | {
                blocks_of(entries)[0]: next(
                    d for n, d in entries.items() if n.startswith("windows/")
                )
            }
        ),
        "is another block",
    ),
    "a block that is cut short": (
        lambda entries: entries | {blocks_of(entries)[0]: entries[blocks_of(entries)[0]][:-1]},
        "ends early|cannot be read|does not fit|tensors of",
    ),
    "nothing": (lambda entries: {}, "reference.safetensors"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_contradicts_itself_is_refused_and_nothing_is_taken_in(
    what: str, export: Entries, quick_path: Path
) -> None:
    change, said = WRONG[what]
    file = written(quick_path / "file", change(export))
    with Store(quick_path / "store", COLD) as store:
        with pytest.raises(StoreError, match=rf"not a whole export.*({said}).*nothing was publish"):
            store.import_reference(file)
        assert not store.references() and store.stats().cold.n_blocks == 0
        assert not list((store.path / "unproven").glob("*")) and store.verify().is_good
        assert not store.take_events()


def test_a_file_as_it_was_exported_is_taken_in_by_any_zip(
    export: Entries, quick_path: Path
) -> None:
    file = written(quick_path / "file", export)
    with Store(quick_path / "store", COLD) as store:
        ref = store.import_reference(file)
        assert (ref.name, ref.revision, ref.n_stored) == ("a", 1, 43)
        assert load_all(store, HISTORY) == 43 and load_all(store, HISTORY, 42) == 20
        assert store.get("a").tokens == HISTORY.tokens


def test_a_file_that_is_compressed_or_said_to_be_larger_than_it_is_is_refused(
    export: Entries, quick_path: Path
) -> None:
    file = written(quick_path / "file", export, zipfile.ZIP_DEFLATED)
    with Store(quick_path / "store", COLD) as store:
        with pytest.raises(StoreError, match="is compressed, which an export never is"):
            store.import_reference(file)
        data = bytearray(written(file, export).read_bytes())
        at = data.index(b"PK\x01\x02") + 20  # sizes, in the table at the end
        data[at : at + 8] = (1 << 31).to_bytes(4, "little") * 2
        file.write_bytes(data)
        with pytest.raises(StoreError, match="said to be larger than the file"):
            store.import_reference(file)
        assert not store.references()


def test_whatever_byte_of_the_archives_own_is_changed_it_is_taken_in_whole_or_refused(
    quick_path: Path,
) -> None:
    """Encrypted, of a later version, with sizes and places that cannot be."""
    file, tokens = quick_path / "file", tokens_of(0, 9)
    with Store(quick_path / "one", COLD) as store:
        store.save("a", KEY, tokens).wait()
        store.export_reference("a", file)
    good = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        (entry,) = archive.infolist()
    begin = entry.header_offset + 30 + len(entry.filename)
    own = [*range(begin), *range(begin + entry.file_size, len(good))]
    n_refused = 0
    with Store(quick_path / "two", COLD) as store:
        for at in own:
            for byte in {0, 0xFF, good[at] ^ 1, good[at] ^ 0x80} - {good[at]}:
                file.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
                try:
                    ref = store.import_reference(file)
                except StoreError as error:
                    assert "nothing was published" in str(error) and not store.reference_names()
                    n_refused += 1
                else:
                    assert ref.tokens == tokens
                    store.delete("a")
    assert n_refused > len(own)


def test_how_far_it_is_is_told_and_ascends(quick_path: Path) -> None:
    told: list[tuple[float, str]] = []
    with Store(quick_path / "one", COLD) as store:
        save(store, "a", HISTORY)
        n = store.export_reference(
            "a", quick_path / "file", on_progress=lambda *said: told.append(said)
        )
        assert n == (quick_path / "file").stat().st_size
    assert [part for part, _ in told] == [i / 7 for i in range(7)] + [1.0]
    assert told[0][1] == "writing block 1 of 7" and told[-1][1] == "exported"
    told.clear()
    with Store(quick_path / "two", COLD) as store:
        store.import_reference(quick_path / "file", on_progress=lambda *said: told.append(said))
    assert [part for part, _ in told] == [i / 7 for i in range(7)] + [1.0]
    assert told[0][1] == "verifying block 1 of 7" and told[-1][1] == "verified"


@pytest.mark.parametrize("n_gone", range(6))
def test_an_export_holds_what_can_be_restored_before_a_block_that_is_gone(
    quick_path: Path, n_gone: int
) -> None:
    key = make_key()
    history = History(key, tokens_of(0, 43))
    with Store(quick_path / "one", COLD) as store:
        save(store, "a", history)
        gone = store.get("a").blocks[n_gone]
        (store.path / "blocks" / f"{gone.hex()}.safetensors").unlink()
        store.export_reference("a", quick_path / "file")
    with Store(quick_path / "two", COLD) as store:
        ref = store.import_reference(quick_path / "file")
        assert (ref.n_stored, len(ref.blocks)) == (8 * n_gone, n_gone)
        assert load_all(store, history) == 8 * n_gone and ref.tokens == history.tokens
        assert store.verify().is_good


def test_a_boundary_state_that_is_gone_is_left_out(quick_path: Path) -> None:
    with Store(quick_path / "one", COLD) as store:
        save(store, "a", HISTORY, boundaries=(20,))
        gone = store.get("a").boundaries[1].address
        (store.path / "windows" / f"{gone.hex()}.safetensors").unlink()
        store.export_reference("a", quick_path / "file")
    with Store(quick_path / "two", COLD) as store:
        ref = store.import_reference(quick_path / "file")
        assert [boundary.length for boundary in ref.boundaries] == [20]
        assert (ref.n_stored, load_all(store, HISTORY)) == (43, 20)


def test_an_export_that_cannot_be_written_leaves_no_file_and_the_one_before(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file, letter = quick_path / "file", quick_path / "letter"
    letter.write_bytes(b"mine")
    with Store(quick_path / "store", COLD) as store:
        save(store, "a", HISTORY)
        file.write_bytes(b"before")
        (quick_path / f"file.{os.getpid()}.partial").symlink_to(letter)
        with monkeypatch.context() as patch:
            patch.setattr(exchange, "_add", full)
            with pytest.raises(StoreError, match=r"file cannot be written \(No space.*another pla"):
                store.export_reference("a", file)
            patch.setattr(exchange, "_add", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.export_reference("a", file)
        assert file.read_bytes() == b"before" and letter.read_bytes() == b"mine"
        left = {path.name for path in quick_path.iterdir()}
        assert left == {"file", "letter", "store"}
        with pytest.raises(UnknownReferenceError):
            store.export_reference("b", file)
        with pytest.raises(StoreError, match="cannot be written"):
            store.export_reference("a", quick_path / "none" / "file")
        synced: list[int] = []
        fsync = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or fsync(fd)
        )
        size = store.export_reference("a", file)
        assert synced == [size], "all of it, before it has its name"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8", "int8", "k16v8"])
def test_rows_of_any_type_are_taken_in_unless_one_is_no_number(
    dtype: str, quick_path: Path
) -> None:
    key, file = make_key(kv_dtype=dtype), quick_path / "file"
    history = History(key, tokens_of(0, 20))
    with Store(quick_path / "one", COLD) as store:
        save(store, "a", history)
        store.export_reference("a", file)
    with Store(quick_path / "two", COLD) as store:
        store.import_reference(file)
        assert load_all(store, history) == 20
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    odd = {"float32": np.nan, "float16": np.inf, "uint16": 0xFF80, "uint8": 0xFF}

    def spoil(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
        name = "k.0.scales" if dtype == "int8" else "k.0"
        tensors[name].flat[-1] = odd[tensors[name].dtype.name]

    written(file, changed(entries, blocks_of(entries)[0], spoil))
    with Store(quick_path / "three", COLD) as store:
        with pytest.raises(StoreError, match=r"'k.0.*' holds what is no finite number"):
            store.import_reference(file)
        assert not store.references()


def png(color: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (color, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_pictures_go_along_and_each_has_the_pixels_that_its_name_says(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat, dog, owl = (Picture.read(png(color)) for color in (1, 2, 3))
    file = quick_path / "file"

    def taken(store: Store, *names: str, **options: bool) -> Reference:
        return store.import_reference(
            file, pictures_of=lambda ref: names if ref.name == "a" else (), **options
        )

    with Store(quick_path / "one", COLD) as store:
        save(store, "a", HISTORY)
        sent = {picture.name: picture.data for picture in (cat, dog)}
        size = store.export_reference("a", file, pictures=sent)
        assert size == file.stat().st_size
    with Store(quick_path / "two", COLD) as store:
        with pytest.raises(StoreError, match="names 2 pictures and has 1 of them; export it again"):
            taken(store, cat.name, owl.name, brings_all=True)
        monkeypatch.setattr(exchange, "MOST_BYTES", len(cat.data) - 1)
        with pytest.raises(StoreError, match="bytes, of at most"):
            taken(store, cat.name)
        monkeypatch.setattr(exchange, "MOST_BYTES", len(cat.data))
        assert not store.references() and store.stats().n_pictures == 0
        assert taken(store, cat.name, owl.name).name == "a"
        assert (store.picture(cat.name), store.picture(dog.name)) == (cat.data, None)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    wrong = {"other pixels": owl.data, "is none": b"x" * len(cat.data)}
    for said, data in wrong.items():
        written(file, entries | {f"pictures/{cat.name}": data})
        with (
            Store(quick_path / "three", COLD) as store,
            pytest.raises(StoreError, match=rf"picture {cat.name} .*{said}.*nothing was published"),
        ):
            taken(store, cat.name)


def test_what_is_imported_is_nobodys_before_a_model_agrees_or_it_is_saved_here(
    export: Entries, quick_path: Path
) -> None:
    file = written(quick_path / "file", export)
    with Store(quick_path / "store", COLD) as store:
        addresses = store.import_reference(file).addresses
        assert all(map(store.is_unproven, addresses))
        store.prove(min(addresses))
        store.prove(min(addresses))
        assert not store.is_unproven(min(addresses))
    with Store(quick_path / "store", COLD) as store:
        before = {path: path.stat().st_ino for path in (store.path / "blocks").iterdir()}
        save(store, "mine", HISTORY, may_read=False)  # which waits for no answer, and so is written
        healed = {path for path, inode in before.items() if path.stat().st_ino != inode}
        unproven = {address.hex() for address in addresses if store.is_unproven(address)}
        ends = {b.address.hex() for b in store.get("a").boundaries if b.length == 20}
        assert unproven == ends - {min(addresses).hex()}, "nothing of ours is at 20 tokens"
        assert len(healed) == len(before) - (min(addresses) in store.get("a").blocks)
        assert load_all(store, HISTORY) == 43


def test_blocks_that_are_there_already_are_not_called_unproven(
    export: Entries, quick_path: Path
) -> None:
    file = written(quick_path / "file", export)
    with Store(quick_path / "store", COLD) as store:
        save(store, "mine", HISTORY)
        ref = store.import_reference(file, adopt=lambda ref: replace(ref, name="theirs"))
        unproven = [address for address in ref.addresses if store.is_unproven(address)]
        assert unproven == [ref.boundaries[0].address]


def test_a_name_that_is_taken_is_refused_before_anything_is_taken_in(
    export: Entries, quick_path: Path
) -> None:
    file = written(quick_path / "file", export)
    with Store(quick_path / "store", COLD) as store:
        store.save("a", KEY, [1, 2]).wait()
        with pytest.raises(StoreError, match="there is a history 'a' already"):
            store.import_reference(file)
        assert store.stats().cold.n_blocks == 0
        forge_export(file, facts(name="b", revision=7))
        assert store.import_reference(file).revision == 1
        assert store.get("b").revision == 1
