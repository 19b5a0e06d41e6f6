"""One file: any change of any byte is found, and any safetensors library reads it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvcellar.history import History as TokenHistory
from kvcellar.store.values.blocks import Kind, Link, read_sealed, unsealed_block
from kvcellar.store.values.blocks import address_of as address
from kvcellar.store.values.format import DamagedError, Tensor, pack, read_file, read_header
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
