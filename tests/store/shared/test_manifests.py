"""Manifests in a shared place: whatever lies there is a state or is refused as damaged."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.store import Store, StoreConfig
from kvcellar.store.shared.manifests import Manifest, register_of, unpack_manifest
from kvcellar.store.values.format import DamagedError, FileBytes, read_from
from tests.store.fakes import FULL, WINDOW, History, make_key, save, tokens_of
from tests.store.forging import forged

NAME = "poet"

TEXTS = ("fingerprint", "layout", "facts", "metadata")

NUMBERS = st.sampled_from([-1, 0, 1, 2, 39, 40, 41, 1 << 31, (1 << 63) - 1, -(1 << 63)])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | NUMBERS,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A manifest with blocks, states of windows, and a state before it."""
    root = tmp_path_factory.mktemp("manifests")
    place = root / "place"
    place.mkdir()
    key = make_key(groups=[FULL, WINDOW])
    with Store(root / "one", StoreConfig(warm_bytes=0), shared=place.as_uri()) as store:
        for serial in (1, 2):
            tokens = tokens_of(serial, 40)
            history = History(key, tokens)
            save(store, NAME, history, metadata={"serial": serial}, boundaries=(20,))
        store.flush()
    (folder,) = (place / register_of(NAME)).parent.glob(Path(register_of(NAME)).name)
    return max(folder.iterdir()).read_bytes()


def outcome(data: bytes) -> Manifest | str:
    try:
        return unpack_manifest(register_of(NAME), data)
    except DamagedError as error:
        return str(error)


def read(data: bytes) -> FileBytes:
    return read_from(io.BytesIO(data), len(data))


def test_a_manifest_is_read_as_it_was_written(whole: bytes) -> None:
    manifest = outcome(whole)
    assert isinstance(manifest, Manifest)
    assert manifest.ref.name == NAME and manifest.infos and manifest.behind


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_no_changed_byte_and_no_cut_is_taken_for_a_state(
    whole: bytes, at: float, flip: int, cut: bool
) -> None:
    n = int(at * len(whole))
    changed = whole[:n] if cut else whole[:n] + bytes([whole[n] ^ flip]) + whole[n + 1 :]
    said = outcome(changed)
    assert isinstance(said, str) and said


@given(data=st.data())
def test_whatever_a_manifest_says_with_a_right_checksum_is_a_state_or_damaged(
    whole: bytes, data: Any
) -> None:
    def change(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
        for name in data.draw(st.sets(st.sampled_from(TEXTS), max_size=2)):
            value = json.loads(metadata[name]) if name != "fingerprint" else None
            if isinstance(value, dict) and value and data.draw(st.booleans()):
                value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)
                metadata[name] = json.dumps(value)
            else:
                metadata[name] = data.draw(st.text(max_size=8) | JSON.map(json.dumps))
        for name in data.draw(st.sets(st.sampled_from(sorted(tensors)), max_size=2)):
            array = tensors.pop(name)
            how = data.draw(st.sampled_from(["gone", "short", "number", "other"]))
            if how == "short":
                tensors[name] = array[: data.draw(st.integers(0, len(array)))]
            elif how == "number" and array.size:
                number = data.draw(NUMBERS)
                if np.iinfo(array.dtype).min <= number <= np.iinfo(array.dtype).max:
                    array.flat[data.draw(st.integers(0, array.size - 1))] = number
                tensors[name] = array
            elif how == "other":
                tensors[name] = np.zeros((2, 3), np.float32)

    found = outcome(forged(read(whole), change))
    if isinstance(found, Manifest):
        assert len(found.infos) == len(found.ref.blocks) + len(found.ref.boundaries)
        assert all(0 <= info.start <= len(found.ref.tokens) for info in found.infos)
    else:
        assert found
