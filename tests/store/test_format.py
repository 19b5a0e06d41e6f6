"""One file: any change of any byte is found, and any safetensors library reads it."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from kvcellar.backends.host_memory import HEADROOM, empty_arrays
from kvcellar.history import History as TokenHistory
from kvcellar.store.values.blocks import Kind, Link, read_sealed, unsealed_block
from kvcellar.store.values.blocks import address_of as address
from kvcellar.store.values.format import (
    BrokenError,
    DamagedError,
    Tensor,
    pack,
    read_file,
    read_from,
    read_header,
)
from kvcellar.store.values.references import Reference
from tests.store.fakes import History, make_key

FACTS_OF_VERSION_1 = {
    "name",
    "n_stored",
    "parent",
    "parent_position",
    "is_pinned",
    "is_evicted",
    "revision",
    "saved_at",
}
"""Facts of a reference that every program which knows version 1 may look for."""


def small_block(path: Path) -> tuple[Path, bytes]:
    key = make_key(block_tokens=2)
    history = History(key, [5, 6])
    tokens = np.array([5, 6])
    link = Link(address(Kind.BLOCK, key.root, tokens), key.root, 0, 2)
    sealed = unsealed_block(key, link, tokens, history.read_rows(0, 2)).seal("exact")
    file = path / "block"
    file.write_bytes(sealed.file.data.tobytes())
    return file, link.address


def test_a_file_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    file, _ = small_block(tmp_path)
    tensors = load_file(file)
    assert tensors["tokens"].tolist() == [5, 6]
    assert tensors["positions"].tolist() == [0, 1]
    assert tensors["k.0"].shape == (2, 2, 2, 8)
    assert tensors["v.0"].shape == (2, 2, 2, 4)
    history = History(make_key(block_tokens=2), [5, 6])
    assert np.array_equal(tensors["k.0"], history.read_rows(0, 2)[0].k.data)


def test_any_flipped_bit_is_found(quick_path: Path) -> None:
    file, name = small_block(quick_path)
    read_sealed(file, name)
    good = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(bad)
        with pytest.raises(DamagedError):
            read_sealed(file, name)


def test_any_missing_or_added_end_is_found(tmp_path: Path) -> None:
    file, name = small_block(tmp_path)
    good = file.read_bytes()
    for n in range(0, len(good), 7):
        file.write_bytes(good[:n])
        with pytest.raises(DamagedError):
            read_sealed(file, name)
    file.write_bytes(good + b"\0")
    with pytest.raises(DamagedError):
        read_sealed(file, name)


def test_the_file_of_another_address_is_refused(tmp_path: Path) -> None:
    file, name = small_block(tmp_path)
    with pytest.raises(DamagedError, match="it is the file of"):
        read_sealed(file, bytes(reversed(name)))


def test_tensors_are_aligned_whatever_their_types(tmp_path: Path) -> None:
    tensors = {
        "a": Tensor("U8", np.arange(3, dtype=np.uint8)),
        "b": Tensor("F32", np.arange(5, dtype=np.float32)),
        "c": Tensor("F16", np.arange(7, dtype=np.float16)),
        "d": Tensor("BF16", np.arange(9, dtype=np.uint16)),
        "e": Tensor("I64", np.arange(2)),
        "none": Tensor("F32", np.empty((2, 0), np.float32)),
    }
    path = tmp_path / "file"
    path.write_bytes(pack(tensors, {"version": "1", "note": 'quotes " and ü'}).data.tobytes())
    file = read_file(path)
    assert file.metadata["note"] == 'quotes " and ü'
    for name, (_, array) in tensors.items():
        assert file.tensors[name].tobytes() == array.tobytes()
        assert file.tensors[name].flags.aligned


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pack({}, {"version": "2"}).data.tobytes())
    with pytest.raises(DamagedError, match="format version '2', 1 is known"):
        read_header(path)


def test_a_reference_has_every_fact_that_older_programs_of_this_version_look_for() -> None:
    facts = json.loads(Reference("a", "model", "{}", TokenHistory([1])).pack().metadata["facts"])
    assert set(facts) >= FACTS_OF_VERSION_1


def test_a_block_s_file_is_made_around_rows_where_they_have_come_to() -> None:
    for shapes in ([((2, 3, 5, 4), np.uint8), ((2, 3, 5, 2), np.float16), ((7,), np.uint16)], []):
        arrays, memory = empty_arrays(shapes)
        for i, array in enumerate(arrays):
            array[...] = np.arange(array.size).reshape(array.shape) % 200 + i
        names = {np.uint8: "U8", np.float16: "F16", np.uint16: "BF16"}
        tensors = {"tokens": Tensor("I64", np.arange(9))}
        tensors |= {f"{i}": Tensor(names[a.dtype.type], a) for i, a in enumerate(arrays)}
        apart = pack(tensors, {"version": "1"})
        around = pack(tensors, {"version": "1"}, memory)
        assert around.data.tobytes() == apart.data.tobytes()
        assert np.shares_memory(around.data, memory)
        for i, array in enumerate(arrays):
            assert np.shares_memory(around.tensors[f"{i}"], array)


def test_rows_that_are_not_all_that_a_piece_holds_are_copied() -> None:
    arrays, memory = empty_arrays([((4, 8), np.uint8), ((4, 8), np.uint8)])
    for array in arrays:
        array[...] = 3
    large = Tensor("U8", np.zeros(HEADROOM, np.uint8))
    for chosen in (arrays[:1], arrays[1:], arrays[::-1], [arrays[0], arrays[1][:2]], None):
        tensors = {
            f"{i}": Tensor("U8", a) for i, a in enumerate(arrays if chosen is None else chosen)
        }
        if chosen is None:
            tensors = {"a": large, **tensors}
        file = pack(tensors, {"version": "1"}, memory)
        assert not np.shares_memory(file.data, memory)
        assert file.data.tobytes() == pack(tensors, {"version": "1"}).data.tobytes()


# Headers that somebody wrote with a valid checksum ------------------------------------------------

START = '{"__metadata__":{"checksum":"xxh3_128:'


def raw(rest: str, body: bytes = b"", length: int | None = None) -> bytes:
    """A file whose header goes on with ``rest`` behind its checksum, which is right."""
    text = (START + "0" * 32 + rest).encode()
    file = (len(text) if length is None else length).to_bytes(8, "little") + text + body
    at = 8 + len(START)
    return file[:at] + xxhash.xxh3_128_hexdigest(file).encode() + file[at + 32 :]


def header(**tensors: object) -> str:
    return '","version":"1"},' + json.dumps(tensors)[1:]


def tensor(start: Any = 0, stop: Any = 3, shape: Any = (3,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def read(data: bytes) -> dict[str, Any]:
    return read_from(io.BytesIO(data), len(data)).tensors


def test_a_header_by_hand_is_read() -> None:
    found = read(raw(header(a=tensor(), b=tensor(3, 5, (1,), "F16")), b"abc\x00\x3c"))
    assert (found["a"].tobytes(), found["b"].tolist()) == (b"abc", [1.0])
    empty = read(raw(header(a=tensor(0, 0, (0, 1 << 48)))))
    assert empty["a"].shape == (0, 1 << 48)


@pytest.mark.parametrize(
    "rest",
    [
        header(a=tensor(1, 4)),
        header(a=tensor(0, 4)),
        header(a=tensor(0, 2, (2,))),  # a byte of the body is nobody's
        header(a=tensor(0, 2, (2,)), b=tensor(1, 3, (2,))),
        header(a=tensor(0, 1, (1,)), b=tensor(2, 3, (1,))),
        header(a=tensor(0, 3), b=tensor(0, 3)),
        header(a=tensor(0, 6, (6,))),
        header(a=tensor(0, 3, (-3,))),
        header(a=tensor(0, 3, (-3, -1))),
        header(a=tensor(0, 3, (3.0,))),
        header(a=tensor(0, 1, (True,)), b=tensor(1, 3, (2,))),
        header(a=tensor(0, 3, 3)),
        header(a=tensor(0, 3, None)),
        header(a=tensor(0, 3, (3,), "X9")),
        header(a=tensor(0, 3, (3,), None)),
        header(a=tensor(0, 3, (3,), "F16")),
        header(a=tensor(None, 3)),
        header(a=tensor(0, "3")),
        header(a={"dtype": "U8", "shape": [3]}),
        header(a={"dtype": "U8", "shape": [3], "data_offsets": [0, 1, 3]}),
        header(a=[0, 3]),
        header(a=None),
        header(a=tensor(), b=tensor(3, 3, (0, (1 << 48) + 1))),
        header(a=tensor(), b=tensor(3, 3, (0, 1 << 48, 1 << 48))),
        header(a=tensor(), b=tensor(3, 3, [0] * 200)),
        '","version":"2"},' + header(a=tensor())[17:],
        '"},' + header(a=tensor())[17:],
        '","version":1},' + header(a=tensor())[17:],
        '","version":"1","more":5},' + header(a=tensor())[17:],
        '","version":"1"}',
        '","version":"1"},' + '"a":' + "[" * 100_000,
        '","version":"1"},"__metadata__":[],' + header(a=tensor())[17:],
        '","version":"1"},"__metadata__":null,' + header(a=tensor())[17:],
    ],
)
def test_a_header_that_says_what_cannot_be_is_damaged(rest: str, tmp_path: Path) -> None:
    file = raw(rest, b"abc")
    with pytest.raises(DamagedError) as error:
        read(file)
    assert not isinstance(error.value, BrokenError), "its bytes are what somebody wrote"
    (tmp_path / "file").write_bytes(file)
    with pytest.raises(DamagedError):
        read_file(tmp_path / "file")


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"1234567",
        bytes(8),
        (9).to_bytes(8, "little") + b"{" * 8,
        raw(header(a=tensor()), b"abc", 1 << 40),
        raw(header(a=tensor()), b"abc")[:-1],
        raw(header(a=tensor()), b"abc") + b"d",
        raw(header(a=tensor()), b"abc").replace(b"xxh3_128", b"xxh3_64:"),
        raw(header(a=tensor()), b"abc").replace(b"abc", b"abd"),
    ],
)
def test_bytes_that_nobody_wrote_are_broken(file: bytes, tmp_path: Path) -> None:
    with pytest.raises(BrokenError):
        read(file)
    with pytest.raises(BrokenError):
        read_from(io.BytesIO(file), len(file) + 1)
    (tmp_path / "file").write_bytes(file)
    with pytest.raises(BrokenError):
        read_file(tmp_path / "file")


def test_a_file_that_is_given_piece_by_piece_is_read_whole(tmp_path: Path) -> None:
    class Slow(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:1000])

    array = np.arange(1 << 17)  # several chunks, the last one short
    data = pack({"a": Tensor("I64", array[:-3])}, {"version": "1"}).data.tobytes()
    file = read_from(Slow(data), len(data))
    assert np.array_equal(file.tensors["a"], array[:-3])
    assert file.checksum == file.metadata["checksum"].removeprefix("xxh3_128:")
    assert len(file.checksum) == 32 and file.data.tobytes() == data
    for at in (len(data) - 1, len(data) // 2, len(data) - (1 << 18)):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(BrokenError, match="checksum does not fit"):
            read_from(io.BytesIO(bad), len(bad))


def test_a_header_alone_gives_metadata_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tokens = np.array([5, 2**62])
    tensors = {"a": Tensor("U8", np.arange(9, dtype=np.uint8)), "tokens": Tensor("I64", tokens)}
    whole = pack({**tensors, "z": Tensor("I64", np.arange(3))}, {"version": "1", "x": "y"})
    path.write_bytes(whole.data.tobytes())
    metadata, found = read_header(path)
    assert metadata == whole.metadata and found is not None and found.tolist() == tokens.tolist()
    path.write_bytes(pack({}, {"version": "1"}).data.tobytes())
    assert read_header(path)[1] is None
    for bad in (
        raw(header(tokens=tensor(0, 16, (2,), "F32")), bytes(8)),
        raw(header(tokens=tensor(0, 8, (2,), "F32")), bytes(8)),
        raw(header(tokens=tensor(0, 8, (1, 1), "I64")), bytes(8)),
        raw(header(tokens=tensor(0, 8, (), "I64")), bytes(8)),
        b"",
        b"1234567",
        (9).to_bytes(8, "little") + b"{" * 8,
    ):
        path.write_bytes(bad)
        with pytest.raises(DamagedError):
            read_header(path)


def test_what_is_no_file_of_ours_is_damaged_and_what_cannot_be_read_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        for read_it in (read_file, read_header):
            with pytest.raises(DamagedError, match="it is"):
                read_it(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")

    def refused(*_: object) -> int:
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr("kvcellar.store.values.format.open_own", refused)
    for read_it in (read_file, read_header):
        with pytest.raises(OSError, match="no answer"):
            read_it(tmp_path / "none")
