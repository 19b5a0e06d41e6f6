"""Whatever comes for a picture is read, or refused in our words, and leaves nothing behind."""

from __future__ import annotations

import base64
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.agents import AgentManager
from kvcellar.errors import PictureError, StoreError
from kvcellar.pictures.given import decode_picture
from kvcellar.pictures.picture import Picture
from kvcellar.store import Store
from tests.agents.fakes import eager as eager
from tests.agents.fakes import manager, run
from tests.pictures.fakes import make_seeing_host
from tests.pictures.hostile import TURNED, damaged, pictures
from tests.pictures.test_agents import CAT, look
from tests.server.live import Live, serving

NO_CLOCK = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", pictures())
def test_every_kind_of_picture_is_read(kind: str) -> None:
    data = pictures()[kind]
    picture = Picture.read(data)
    is_turned = "EXIF" in kind or (
        (kind.startswith(("JPEG ", "WEBP RGB")))
        and ("progressive" not in kind and "lossless" not in kind)
    )
    assert (picture.width, picture.height) == ((24, 32) if is_turned else (32, 24)), TURNED
    assert picture.media_type == f"image/{kind.partition(' ')[0].lower().removesuffix('s')}"
    assert Picture.read(picture.as_png()) == picture


@NO_CLOCK
@given(damaged())
def test_a_damaged_picture_is_read_or_refused(data: bytes) -> None:
    try:
        picture = Picture.read(data)
    except PictureError as error:
        assert len(str(error)) < 500
    else:
        assert Picture.read(picture.as_png()) == picture, "its pixels name it, and nothing else"


def test_what_is_damaged_beside_the_pixels_is_no_matter() -> None:
    data = pictures()["JPEG RGB"]
    at = data.index(b"Exif\0\0") + 6
    pixels = None
    for bad in range(at, at + 80):
        for value in (0, 1, 0x7F, 0xFF):
            other = bytearray(data)
            other[bad] = value
            image = Picture.read(bytes(other)).pixels()
            image = image if image.width == 32 else image.transpose(2)
            assert pixels is None or np.abs(np.asarray(image).mean() - pixels) < 1e-9
            pixels = np.asarray(image).mean()


TEXTS = st.one_of(
    st.text(max_size=80),
    st.builds(
        lambda head, kind, more, body: f"{head}{kind}{more},{body}",
        st.sampled_from(["data:", "DATA:", "data", "data:;", " data:"]),
        st.sampled_from(
            ["image/png", "IMAGE/PNG", "image/*", "", "text/html", "a" * 300, "\0", "é"]
        ),
        st.sampled_from([";base64", "; base64", ";charset=x;base64", "", ";", ";base64" * 60]),
        st.one_of(
            st.text(max_size=40),
            st.binary(max_size=40).map(lambda one: base64.b64encode(one).decode()),
            st.sampled_from(["%", "%zz", "%41%3D", "====", "A", "AA==AA=="]),
        ),
    ),
    st.sampled_from(["http:", "ftp://a/b", "//a", "/v1/pictures/", "file:/a", "C:\\a", "\ud800"]),
)


@NO_CLOCK
@given(TEXTS)
def test_an_odd_text_for_a_picture_is_decoded_or_refused(text: str) -> None:
    try:
        found = decode_picture(text)
    except PictureError as error:
        assert len(str(error)) < 500
    else:
        assert found


# Through the server -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(
        tmp_path_factory.mktemp("seeing"),
        load=lambda path, progress: make_seeing_host(path),
        offered={"seeing": "seeing"},
    ) as live:
        live.post("/v1/agents", {"id": "eye"})
        live.host()
        yield live


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _in_chat(source: Any) -> tuple[str, Any]:
    part = {"type": "image_url", "image_url": {"url": source}}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}


def _in_result(source: Any) -> tuple[str, Any]:
    part = {"type": "image_url", "image_url": source}
    call = {"id": "a", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [part]},
    ]
    return "/v1/chat/completions", {"messages": said}


def _in_responses(source: Any) -> tuple[str, Any]:
    part = {"type": "input_image", "image_url": source}
    return "/v1/responses", {"input": [{"role": "user", "content": [part]}]}


def _in_screen(source: Any) -> tuple[str, Any]:
    output = {"type": "computer_screenshot", "image_url": source}
    item = {"type": "computer_call_output", "call_id": "a", "output": output}
    return "/v1/responses", {"input": [item, {"role": "user", "content": "what?"}]}


def _in_messages(source: Any) -> tuple[str, Any]:
    kind, _, data = str(source)[5:].partition(";base64,")
    given_as = {"type": "base64", "media_type": kind, "data": data if data else source}
    part = {"type": "image", "source": given_as}
    return "/v1/messages", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}


def _in_ollama(source: Any) -> tuple[str, Any]:
    said = [{"role": "user", "content": "", "images": [source]}]
    return "/api/chat", {"model": "seeing", "messages": said, "stream": False}


def _in_agent(source: Any) -> tuple[str, Any]:
    return "/v1/agents/eye/generate", {"text": "What?", "images": [source]}


def _in_conversation(source: Any) -> tuple[str, Any]:
    part = {"type": "input_image", "image_url": source}
    return "/v1/conversations", {"items": [{"role": "user", "content": [part]}]}


SHAPES = [
    _in_chat,
    _in_result,
    _in_responses,
    _in_screen,
    _in_messages,
    _in_ollama,
    _in_agent,
    _in_conversation,
]
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=20), TEXTS),
    lambda part: st.one_of(
        st.lists(part, max_size=2),
        st.dictionaries(st.sampled_from(["url", "image_url", "type", "detail", "data"]), part),
    ),
    max_leaves=4,
)


def _kept(live: Live) -> set[str]:
    """The files of pictures that a server has; in memory are no more bytes than there may be."""
    shelf = live.service.models.registry.shelf
    assert shelf._n_bytes <= shelf.most_bytes
    folder = live.service.store.path / "pictures"
    return {one.name for one in folder.iterdir()} if folder.exists() else set()


@NO_CLOCK
@given(st.sampled_from(SHAPES), st.one_of(damaged().map(_url), ODD), st.booleans())
def test_what_is_sent_for_a_picture_is_answered_or_refused_and_leaves_nothing(
    seeing: Live, shape: Any, source: Any, is_streamed: bool
) -> None:
    path, body = shape(source)
    if path not in ("/v1/agents/eye/generate", "/v1/conversations", "/api/chat"):
        body["stream"] = is_streamed
    if path in ("/v1/chat/completions", "/v1/agents/eye/generate"):
        body["max_tokens"] = 2
    if path == "/v1/responses":
        body["max_output_tokens"] = 2
    before = _kept(seeing)
    response = seeing.http.post(path, content=_json_of(body), headers=JSON)
    assert response.status_code < 500, (path, source, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        said = error if isinstance(error, str) else error["message"]
        assert said and len(said) < 2000
        assert _kept(seeing) == before, "what is refused leaves nothing"
    elif path == "/v1/agents/eye/generate":
        seeing.post("/v1/agents/eye/rewind", {"turn": 0})
    seeing.until(seeing.is_still, "the end")


JSON = {"Content-Type": "application/json"}


def _json_of(body: Any) -> bytes:
    return json.dumps(body).encode()  # also texts that UTF-8 has not


# In exports and in shared places ------------------------------------------------------------------


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent of a picture, as a file."""
    folder = tmp_path_factory.mktemp("export")
    with manager(folder / "store", make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        run(agents.sleep.export("eye", folder / "eye.zip"))
    return folder / "eye.zip"


def _with_picture(export: Path, data: bytes) -> Path:
    """The export with another file in the place of its picture's."""
    made = export.with_name("other.zip")
    with zipfile.ZipFile(export) as known, zipfile.ZipFile(made, "w") as other:
        for info in known.infolist():
            is_picture = CAT.name in info.filename
            other.writestr(info, data if is_picture else known.read(info))
    return made


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with manager(tmp_path_factory.mktemp("empty"), make_seeing_host) as agents:
        yield agents


def _is_cats(data: bytes) -> bool:
    try:
        return Picture.read(data).name == CAT.name
    except PictureError:
        return False


@NO_CLOCK
@given(damaged())
def test_an_export_with_a_damaged_picture_is_taken_in_whole_or_not_at_all(
    export: Path, empty: AgentManager, data: bytes
) -> None:
    folder = empty.store.path
    before = {one for one in folder.rglob("*") if one.is_file()}
    assert not _is_cats(data)
    with pytest.raises(StoreError, match=CAT.name):
        run(empty.sleep.import_file(_with_picture(export, data)))
    assert {one for one in folder.rglob("*") if one.is_file()} == before
    assert empty.directory.infos() == []


@NO_CLOCK
@given(damaged())
def test_a_damaged_picture_of_a_shared_place_is_not_used(sharing: Any, data: bytes) -> None:
    store, place = sharing
    file = place / "pictures" / CAT.name[:2] / CAT.name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    assert store.picture(CAT.name) is None
    assert any(CAT.name in event.subject for event in store.take_events())
    assert not list(store.path.glob(f"pictures/{CAT.name}*"))
    file.write_bytes(CAT.data)
    assert store.shared.pictures.get(CAT.name) == CAT.data, "a whole one is"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store, and the place that it shares."""
    folder = tmp_path_factory.mktemp("sharing")
    with Store(folder / "store", shared=str(folder / "place")) as store:
        yield store, folder / "place"
