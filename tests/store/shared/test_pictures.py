"""Pictures among machines: handed in once before what names them, and believed by their pixels."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from kvcellar.pictures.picture import Picture
from kvcellar.store import EventKind, Store
from kvcellar.store.shared.folders import FolderPlace
from kvcellar.store.shared.histories import Pulled
from tests.store.fakes import History, make_key, save, tokens_of

KEY = make_key()


def picture_of(color: int) -> Picture:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (color, 0, 0)).save(file, "PNG")
    return Picture.read(file.getvalue())


CAT, DOG = picture_of(1), picture_of(2)


def shown(store: Store, serial: int, *pictures: Picture) -> None:
    """Have a history that names pictures handed in."""
    for picture in pictures:
        store.put_picture(picture.name, picture.data)
    metadata = {"serial": serial, "shown": [picture.name for picture in pictures]}
    save(store, "poet@1", History(KEY, tokens_of(1, 9 + serial)), metadata=metadata)
    assert store.shared is not None and store.shared.flush(180)


def files(share: Path) -> dict[str, Path]:
    return {path.name: path for path in (share / "pictures").rglob("*") if path.is_file()}


def test_a_picture_is_handed_in_once_and_found_by_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    written: list[str] = []
    write = FolderPlace.write

    def noted(place: FolderPlace, key: str, data: bytes) -> None:
        written.append(key)
        write(place, key, data)

    monkeypatch.setattr(FolderPlace, "write", noted)
    with Store(tmp_path / "a", shared=str(share)) as ours:
        ours.put_picture(DOG.name, DOG.data)  # which no history names
        shown(ours, 1, CAT)
        shown(ours, 2, CAT)
        assert [key for key in written if key.startswith("pictures/")] == [
            f"pictures/{CAT.name[:2]}/{CAT.name}"
        ]
        assert ours.shared is not None and ours.shared.pictures.has(CAT.name)
        assert not ours.shared.pictures.has(DOG.name)
    written.clear()
    with Store(tmp_path / "b", shared=str(share)) as theirs:
        assert (theirs.picture(CAT.name), theirs.picture(DOG.name)) == (CAT.data, None)
        files(share)[CAT.name].unlink()
        assert theirs.picture(CAT.name) == CAT.data, "it is on this disk now"
        assert theirs.shared is not None and theirs.shared.pull("poet@1") is Pulled.TAKEN
        shown(theirs, 3, CAT)
    assert set(files(share)) == {CAT.name} and not theirs.take_events()


@pytest.mark.parametrize("said", ["has other pixels", "picture"])
def test_a_file_that_is_not_the_picture_of_its_name_is_not_used_and_is_mended(
    tmp_path: Path, said: str
) -> None:
    share = tmp_path / "share"
    with Store(tmp_path / "a", shared=str(share)) as ours:
        shown(ours, 1, CAT)
    files(share)[CAT.name].write_bytes(DOG.data if "pixels" in said else b"x")
    with Store(tmp_path / "b", shared=str(share)) as theirs:
        assert theirs.picture(CAT.name) is None
        (event,) = theirs.take_events()
        assert (event.kind, said in event.detail) == (EventKind.DAMAGED, True)
        assert event.subject.endswith(CAT.name) and event.detail.endswith("it is not used")
    with Store(tmp_path / "a", shared=str(share)) as ours:
        shown(ours, 2, CAT)
    with Store(tmp_path / "b", shared=str(share)) as theirs:
        assert theirs.picture(CAT.name) == CAT.data
