"""Pictures in requests of every protocol: what a model gets that reads them; what is refused."""

from __future__ import annotations

import base64
import io
import itertools
import json
import zipfile
from dataclasses import replace

import anthropic
import ollama
import openai
import pytest
from PIL import Image

from kvcellar.agents import open_host
from kvcellar.errors import PictureLostError
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.tokens import NAME_DIGITS, placeholders
from kvcellar.store.disk.exchange import REFERENCE, reference_of
from tests.mmproj_files import make_gguf, write_old_vocabulary
from tests.pictures.fakes import PAD, as_read, make_seeing_host, picture_file
from tests.server.live import serving
from tests.vision_checkpoints import make_vision_checkpoint

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LINE = "[image: left out, this model reads text alone]"
FILE, OTHER = picture_file(1), picture_file(2, 40, 16, "JPEG")
NAME, SECOND = Picture.read(FILE).name, Picture.read(OTHER).name


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A server whose model reads pictures; each is text that follows from its name."""
    folder = tmp_path_factory.mktemp("seeing")
    with serving(
        folder,
        load=lambda path, progress: make_seeing_host(path),
        offered={"seeing": "seeing"},
        guest_keys=("guest",),
        api_key="owner",
    ) as server:
        server.http.headers["Authorization"] = "Bearer owner"
        yield server


@pytest.fixture
def closing():
    """Has a client closed when the test has ended."""
    opened = []

    def later(client):
        opened.append(client)
        return client

    yield later
    for client in opened:
        getattr(client, "_client", client).close()


def said_by(live, agent_id):
    """What an agent's model was told: messages, and the pictures in the order of its tokens."""
    return live.service.agents.directory.conversation(agent_id)


def agent_of(answer):
    return answer["kvcellar"]["agent_id"]


def placed(*pictures):
    return [{"name": name, "at": at} for name, at in pictures]


# What comes in ------------------------------------------------------------------------------------


def test_a_picture_of_chat_completions_stands_where_it_was_sent(seeing):
    content = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": url_of(FILE), "detail": "high"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": url_of(OTHER, "image/jpeg")},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = seeing.post(CHAT, body)
    message = said_by(seeing, agent_of(answer))[0]
    assert message["content"] == "Look:and"
    assert message["pictures"] == placed((NAME, 5), (SECOND, 8))
    assert answer["kvcellar"]["ignored"] == ["image_url.detail"]
    assert not any("left out" in note for note in answer["kvcellar"]["notes"])
    # as if the text of its pictures had been written there
    agent = seeing.service.agents.directory.agent(agent_of(answer))
    read = as_read(agent.tokens[:])
    assert len(read) >= answer["usage"]["prompt_tokens"] > 12 + 10


def test_a_picture_of_responses_is_shown_again_as_a_link(seeing):
    content = [
        {"type": "input_image", "image_url": url_of(FILE), "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    items = [
        {"role": "user", "content": content},
        {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_image", "image_url": url_of(OTHER)}],
        },
        {"type": "computer_call", "call_id": "b", "action": {"type": "screenshot"}},
        {
            "type": "computer_call_output",
            "call_id": "b",
            "output": {"type": "computer_screenshot", "image_url": url_of(FILE)},
        },
    ]
    first = seeing.post(RESPONSES, {"input": items, "max_output_tokens": 4})
    said = said_by(seeing, agent_of(first))
    assert said[0] == {
        "role": "user",
        "content": "What is it?",
        "pictures": placed((NAME, 0)),
    }
    assert said[2]["pictures"] == placed((SECOND, 0)) and said[2]["content"] == ""
    assert said[4]["pictures"] == placed((NAME, len(said[4]["content"])))
    assert "base64" not in json.dumps(said)
    listed = seeing.get(f"{RESPONSES}/{first['id']}/input_items?order=asc")["data"]
    link = f"/v1/pictures/{NAME}"
    assert listed[0]["content"][0] == {"type": "input_image", "image_url": link, "detail": "auto"}
    assert listed[2]["output"][0]["image_url"] == f"/v1/pictures/{SECOND}"
    assert listed[4]["output"]["image_url"] == link
    shown = seeing.http.get(link)
    assert shown.content == FILE and shown.headers["content-type"] == "image/png"
    assert shown.headers["x-content-type-options"] == "nosniff"
    assert shown.headers["cache-control"] == "private, max-age=31536000, immutable"
    # what was listed is an input again, and the conversation goes on from what was stored
    after = {"role": "user", "content": "And?"}
    body = {"max_output_tokens": 2, "store": False}
    again = seeing.post(RESPONSES, {**body, "input": [*listed, *first["output"], after]})
    known = seeing.post(RESPONSES, {**body, "input": [after], "previous_response_id": first["id"]})
    assert again["usage"]["input_tokens"] == known["usage"]["input_tokens"]
    assert known["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_a_picture_that_lies_in_a_conversation_is_read(seeing):
    content = [{"type": "input_image", "image_url": url_of(FILE)}]
    items = [{"type": "message", "role": "user", "content": content}]
    talk = seeing.post("/v1/conversations", {"items": items})["id"]
    body = {"conversation": talk, "input": "What is it?", "max_output_tokens": 4}
    first = seeing.post(RESPONSES, body)
    said = said_by(seeing, agent_of(first))
    assert said[0]["pictures"] == placed((NAME, 0)) and said[1]["content"] == "What is it?"
    second = seeing.post(RESPONSES, {**body, "input": "And?"})
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    listed = seeing.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")["data"]
    assert listed[0]["content"][0]["image_url"] == f"/v1/pictures/{NAME}"


def test_a_stored_response_is_gone_on_from_though_its_picture_was_lost(seeing):
    file = picture_file(80)
    name = Picture.read(file).name
    part = {"type": "input_image", "image_url": url_of(file), "detail": "auto"}
    body = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 4}
    first = seeing.post(RESPONSES, body)
    for lost in (seeing.service.store.path / "pictures").glob(f"{name}-*"):
        lost.unlink()
    shelf, looks = seeing.service.models.registry.shelf, seeing.host().looks
    with shelf._lock:
        del shelf._kept[name]
        shelf._n_bytes -= len(file)
    looks._known.clear()
    with pytest.raises(PictureLostError):
        shelf.get(name)
    more = {"previous_response_id": first["id"], "max_output_tokens": 4}
    second = seeing.post(RESPONSES, {"input": "What is it?", **more})
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 12
    link = {**part, "image_url": f"/v1/pictures/{name}"}
    response = seeing.http.post(RESPONSES, json={"input": [{"role": "user", "content": [link]}]})
    assert response.status_code == 400 and "not here any more" in response.text


def test_a_conversation_keeps_its_pictures_by_their_links(seeing, live):
    file = picture_file(79)
    name = Picture.read(file).name
    part = {"type": "input_image", "image_url": url_of(file), "detail": "auto"}
    message = {"type": "message", "role": "user", "content": [part]}
    output = {"type": "computer_screenshot", "image_url": url_of(file)}
    screen = {"type": "computer_call_output", "call_id": "a", "output": output}
    for server in (seeing, live):
        talk = server.post("/v1/conversations", {"items": [message]})["id"]
        (shown,) = server.post(f"/v1/conversations/{talk}/items", {"items": [screen]})["data"]
        assert shown["output"]["image_url"].startswith(f"/v1/pictures/{name}")
        listed = server.get(f"/v1/conversations/{talk}/items?order=asc")["data"]
        assert listed[0]["content"][0]["image_url"].startswith(f"/v1/pictures/{name}")
        assert server.service.store.picture(name) == file
        assert b"base64" not in server.service.store.document(talk)
        bad = {"items": [{**message, "content": [{**part, "image_url": url_of(b"none")}]}]}
        answer = server.http.post(f"/v1/conversations/{talk}/items", json=bad)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_image"
        assert answer.json()["error"]["param"] == "items"
        assert len(server.get(f"/v1/conversations/{talk}/items?order=asc")["data"]) == 2
        body = {"conversation": talk, "input": "What is it?", "max_output_tokens": 4}
        said = said_by(server, agent_of(server.post(RESPONSES, body)))
        if server is seeing:
            assert said[0]["pictures"] == placed((name, 0))
        else:
            assert said[0]["content"] == LINE
    far = {**part, "image_url": "https://a.example/far.png"}
    talk = seeing.post("/v1/conversations", {"items": [{**message, "content": [far]}]})["id"]
    (item,) = seeing.get(f"/v1/conversations/{talk}/items")["data"]
    assert item["content"][0]["image_url"] == "https://a.example/far.png"


def test_a_picture_of_messages_is_read_also_in_results_of_tools(seeing):
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": url_of(FILE)[22:]},
    }
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "This:"}, image],
                }
            ],
        },
    ]
    body = {"messages": messages, "max_tokens": 4}
    answer = seeing.post(MESSAGES, body)
    said = said_by(seeing, agent_of(answer))
    assert said[0] == {"role": "user", "content": "What is it?", "pictures": placed((NAME, 0))}
    assert said[2]["content"] == "This:" and said[2]["pictures"] == placed((NAME, 5))
    counted = seeing.post(f"{MESSAGES}/count_tokens", {"messages": messages})["input_tokens"]
    usage = answer["usage"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert counted == sum(usage[part] for part in parts)


def test_a_thread_keeps_a_picture_by_its_link(seeing):
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": url_of(FILE)[22:]},
    }
    body = {"max_tokens": 4, "thread": {"type": "create"}}
    first = seeing.post(MESSAGES, {**body, "messages": [{"role": "user", "content": [image]}]})
    thread = {"type": "continue", "previous_message_id": first["id"]}
    said = {"messages": [{"role": "user", "content": "And?"}], "max_tokens": 4, "thread": thread}
    second = seeing.post(MESSAGES, said)
    assert said_by(seeing, agent_of(second))[0]["pictures"] == placed((NAME, 0))
    assert second["usage"]["cache_read_input_tokens"] > 0


def test_pictures_of_ollama_stand_before_the_text(seeing):
    raw = base64.b64encode(FILE).decode()
    chat = {
        "model": "seeing",
        "messages": [{"role": "user", "content": "What?", "images": [raw, url_of(OTHER)]}],
        "stream": False,
        "options": {"num_predict": 4},
    }
    answer = seeing.http.post("/api/chat", json=chat)
    assert answer.status_code == 200, answer.text
    said = said_by(seeing, answer.headers["x-agent-id"])[0]
    assert said["content"] == "What?" and said["pictures"] == placed((NAME, 0), (SECOND, 0))
    asked = {"model": "seeing", "prompt": "What?", "images": [raw], "stream": False}
    answer = seeing.http.post("/api/generate", json={**asked, "options": {"num_predict": 4}})
    assert answer.status_code == 200, answer.text
    said = said_by(seeing, answer.headers["x-agent-id"])[0]
    assert said["content"] == "What?" and said["pictures"] == placed((NAME, 0))


def test_an_agent_is_shown_a_picture_and_shows_it_again(seeing):
    seeing.post("/v1/agents", {"id": "viewer"})
    body = {"text": "What?", "images": [url_of(FILE)], "max_tokens": 4}
    seeing.post("/v1/agents/viewer/generate", body)
    message = seeing.get("/v1/agents/viewer")["messages"][0]
    link = f"/v1/pictures/{NAME}"
    assert message["content"] == "What?"
    assert message["pictures"] == [{"name": NAME, "at": 0, "url": link}]
    seeing.post("/v1/agents/viewer/generate", {**body, "text": "", "images": [link]})
    told = seeing.get("/v1/agents/viewer")["messages"]
    assert told[2]["content"] == "" and told[2]["pictures"][0]["name"] == NAME
    text = seeing.http.get("/v1/agents/viewer/export?format=markdown").text
    assert text.count(f"![picture {NAME}]({link})") == 2
    value = seeing.get("/v1/agents/viewer/export?format=json")
    assert value["messages"][0]["pictures"][0]["url"] == link and "base64" not in json.dumps(value)


def test_the_cells_of_pictures_are_told(seeing):
    seeing.post("/v1/agents", {"id": "cells"})
    seeing.post("/v1/agents/cells/generate", {"text": "!", "max_tokens": 1})
    before = seeing.get("/v1/cache")["models"][0]["picture_runs"]
    other = url_of(picture_file(77, 48, 40))
    seeing.post("/v1/agents/cells/generate", {"text": "?", "images": [other], "max_tokens": 4})
    runs = seeing.get("/v1/cache")["models"][0]["picture_runs"]
    assert sum(n for _, n in runs) - sum(n for _, n in before) == 6 * 5
    assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(runs))


def test_a_model_that_reads_text_alone_goes_on_with_a_line(live):
    part = {"type": "image_url", "image_url": {"url": url_of(FILE)}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    answer = live.post(CHAT, body)
    assert said_by(live, agent_of(answer))[0]["content"] == LINE
    assert "left out: this model reads text alone" in answer["kvcellar"]["notes"][0]
    live.post("/v1/agents", {"id": "blind"})
    said = {"text": "What?", "images": [url_of(FILE)]}
    refused = live.http.post("/v1/agents/blind/generate", json=said)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "reads_text_alone"
    assert live.get("/v1/agents/blind")["messages"] == []


def test_a_model_that_reads_pictures_is_listed_as_such(seeing):
    seeing.host()  # of one that is not in memory nobody knows it yet
    shown = seeing.post("/api/show", {"model": "seeing"})
    assert "vision" in shown["capabilities"]
    assert seeing.get("/api/v0/models/seeing")["type"] == "vlm"
    assert seeing.get("/props")["modalities"] == {"vision": True, "audio": False}
    assert seeing.get("/v1/cache")["models"][0]["reads_pictures"] is True


def test_a_prompt_with_pictures_is_counted_and_its_ids_are_the_vocabularys(seeing):
    part = {"type": "image_url", "image_url": {"url": url_of(FILE)}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    found = seeing.post("/tokenize", {"messages": messages})
    answer = seeing.post(CHAT, {"messages": messages, "max_tokens": 2})
    assert found["count"] == answer["usage"]["prompt_tokens"]
    assert found["tokens"].count(PAD) == 12 and max(found["tokens"]) == PAD
    refused = seeing.http.post(CHAT, json={"messages": messages, "prompt_logprobs": 1})
    assert refused.status_code == 400 and "has pictures" in refused.text
    seeing.post("/v1/agents", {"id": "forged"})
    forged = [1, *map(int, placeholders(PAD, NAME, 12, (3, 4))), 2]
    refused = seeing.http.post("/v1/agents/forged/generate", json={"tokens": forged})
    assert refused.status_code == 400, refused.text
    refused = seeing.http.post("/v1/completions", json={"prompt": forged})
    assert refused.status_code == 400, refused.text


def test_the_same_picture_is_decoded_once(seeing, monkeypatch):
    data, reads = picture_file(77), []
    read = Picture.read

    def counted(given):
        reads.append(given)
        return read(given)

    monkeypatch.setattr(Picture, "read", counted)
    part = {"type": "image_url", "image_url": {"url": url_of(data)}}
    for _ in range(3):
        body = {"messages": [{"role": "user", "content": [part, part]}], "max_tokens": 2}
        seeing.post(CHAT, body)
    assert reads == [data]


# What is refused ----------------------------------------------------------------------------------


def bomb():
    """A PNG of a few kilobytes that says it has a billion pixels."""
    data = bytearray(picture_file(3))
    data[16:24] = (40000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
HOSTILE = {
    "bomb": (url_of(bomb()), "pixels"),
    "truncated": (url_of(FILE[: len(FILE) // 2]), "damaged"),
    "header alone": (url_of(FILE[:20]), "no PNG"),
    "empty": ("data:image/png;base64,", "without any bytes"),
    "no base64": ("data:image/png;base64,***", "no base64"),
    "nothing": ("", "without any bytes"),
    "svg": (url_of(SVG, "image/svg+xml"), "image/svg+xml"),
    "svg that lies": (url_of(SVG), "no PNG"),
    "pdf": (url_of(b"%PDF-1.7 ...", "application/pdf"), "application/pdf"),
    "pdf that lies": (url_of(b"%PDF-1.7 ..."), "no PNG"),
    "bmp": (url_of(picture_file(4, form="BMP"), "image/bmp"), "image/bmp"),
    "tiff that lies": (url_of(picture_file(4, form="TIFF")), "no PNG"),
    "url encoded": ("data:image/svg+xml,%3Csvg/%3E", "image/svg+xml"),
    "file": ("file:///etc/passwd", "no address that is fetched"),
    "this machine": ("http://127.0.0.1/a.png", "private network"),
    "elsewhere": ("https://example.com/a.png", "--allow-fetch example.com"),
    "unknown link": (f"/v1/pictures/{'0' * NAME_DIGITS}", "not here"),
    "no link": ("/v1/pictures/../agents", "no picture"),
}


def in_chat(source):
    part = {"type": "image_url", "image_url": {"url": source}}
    return CHAT, {"messages": [{"role": "user", "content": [part]}]}


def in_responses(source):
    part = {"type": "input_image", "image_url": source}
    return RESPONSES, {"input": [{"role": "user", "content": [part]}]}


def in_messages(source):
    given = {"type": "url", "url": source}
    if source.startswith("data:"):
        kind, _, data = source[5:].partition(";base64,")
        given = {"type": "base64", "media_type": kind, "data": data}
    part = {"type": "image", "source": given}
    said = [{"role": "user", "content": [part]}]
    return MESSAGES, {"messages": said, "max_tokens": 4}


def in_ollama(source):
    said = [{"role": "user", "content": "", "images": [source]}]
    return "/api/chat", {"model": "seeing", "messages": said}


def in_an_agent(source):
    return "/v1/agents/hostile/generate", {"text": "What?", "images": [source]}


PROTOCOLS = [in_chat, in_responses, in_messages, in_ollama, in_an_agent]


@pytest.mark.parametrize("write", PROTOCOLS)
def test_a_hostile_picture_is_a_clear_400_and_nothing_else(seeing, write):
    seeing.http.post("/v1/agents", json={"id": "hostile"})
    before = [one["id"] for one in seeing.get("/v1/agents")["data"]]
    for name, (source, words) in HOSTILE.items():
        if write is in_messages and name == "url encoded":
            continue
        path, body = write(source)
        for more in ({}, {"stream": True}):
            response = seeing.http.post(path, json={**body, **more})
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            said = error if isinstance(error, str) else error["message"]
            assert words in said or (write is in_messages and "picture" in said), (name, said)
            assert len(said) < 500
            if path in (CHAT, RESPONSES):
                assert error["code"] in ("invalid_image", "fetch_not_allowed")
                assert error["param"] in ("messages", "input")
    assert [one["id"] for one in seeing.get("/v1/agents")["data"]] == before
    assert seeing.get("/v1/agents/hostile")["messages"] == []
    seeing.until(seeing.is_still, "the end of what was refused")


def test_too_large_and_too_many_are_refused(seeing, monkeypatch):
    monkeypatch.setattr("kvcellar.pictures.picture.MOST_BYTES", 100)
    path, body = in_chat(url_of(picture_file(91)))
    response = seeing.http.post(path, json=body)
    assert response.status_code == 400 and "at most 100" in response.text
    many = [{"type": "image_url", "image_url": {"url": url_of(FILE)}}] * 257
    said = {"messages": [{"role": "user", "content": many}]}
    response = seeing.http.post(CHAT, json=said)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "too_many_images"


def test_a_picture_may_be_longer_than_the_context(seeing):
    data = picture_file(5, 1200, 900)
    assert len(data) > (1 << 20) + 3 * 4096
    path, body = in_chat(url_of(data))
    response = seeing.http.post(path, json=body)  # its tokens are what counts
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded" and error["needed"] < len(data) // 100


# Who sees what ------------------------------------------------------------------------------------


def test_a_name_shows_a_picture_to_nobody_else(seeing):
    link = f"/v1/pictures/{NAME}"
    path, body = in_chat(url_of(FILE))
    seeing.post(path, body | {"max_tokens": 2})
    assert seeing.http.get(link).status_code == 200
    assert seeing.http.get(link, headers={"Authorization": "Bearer wrong"}).status_code == 401
    guest = {"Authorization": "Bearer guest"}
    refused = seeing.http.get(link, headers=guest)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "picture_not_found"
    path, named = in_chat(link)
    refused = seeing.http.post(path, json=named, headers=guest)
    assert refused.status_code == 400 and "no picture" in refused.text
    path, own = in_responses(url_of(FILE))
    first = seeing.post(path, own | {"max_output_tokens": 2}, headers=guest)
    items = seeing.http.get(f"{RESPONSES}/{first['id']}/input_items", headers=guest).json()["data"]
    signed = items[0]["content"][0]["image_url"]
    assert signed.startswith(f"{link}?seen=")
    shown = seeing.http.get(signed, headers=guest)
    assert shown.status_code == 200 and Picture.read(shown.content).name == NAME
    salted = {"X-Cache-Salt": "other"}
    assert seeing.http.get(signed, headers=guest | salted).status_code == 404
    path, named = in_chat(signed)
    assert seeing.http.post(path, json=named | {"max_tokens": 2}, headers=guest).status_code == 200


def test_an_agent_of_a_guest_takes_no_pictures_of_others_along(seeing, tmp_path):
    """Neither the file that somebody else has sent, nor a picture that it was never shown."""
    exif = Image.Exif()
    exif[0x010E] = "SECRET"
    file = io.BytesIO()
    Image.open(io.BytesIO(picture_file(31))).save(file, "PNG", exif=exif)
    path, own = in_chat(url_of(file.getvalue()))
    seeing.post(path, own | {"max_tokens": 2})
    name = Picture.read(file.getvalue()).name
    guest = {"Authorization": "Bearer guest"}
    make = {**guest, "X-Agent-Create": "true"}
    seeing.post("/v1/agents", {"id": "shown"}, headers=guest)
    body = {"text": "?", "images": [url_of(picture_file(31))], "max_tokens": 2}
    seeing.post("/v1/agents/shown/generate", body, headers=guest)
    seeing.post("/v1/agents", {"id": "told"}, headers=guest)
    seeing.post("/v1/agents/told/generate", {"text": f"{name}!", "max_tokens": 2}, headers=guest)
    exports = {}
    for agent in ("shown", "told"):
        exports[agent] = tmp_path / agent
        got = seeing.http.get(f"/v1/agents/{agent}/export", headers=guest)
        exports[agent].write_bytes(got.content)
        with zipfile.ZipFile(exports[agent]) as archive:
            pictures = [one for one in archive.namelist() if one.startswith("pictures/")]
            assert pictures == ([f"pictures/{name}"] if agent == "shown" else [])
            assert all(b"SECRET" not in archive.read(one) for one in pictures)
    seeing.http.delete("/v1/agents/told", headers=guest)
    ref = reference_of(exports["told"])
    facts = json.loads(json.dumps(dict(ref.metadata)))
    facts["messages"][0]["pictures"] = [{"name": name, "at": 0}]
    with zipfile.ZipFile(exports["told"]) as archive:
        entries = {one: archive.read(one) for one in archive.namelist()}
    entries[REFERENCE] = bytes(replace(ref, metadata=facts).pack().data)
    with zipfile.ZipFile(tmp_path / "forged", "w") as archive:
        for one, data in entries.items():
            archive.writestr(one, data)
    forged = (tmp_path / "forged").read_bytes()
    refused = seeing.http.post("/v1/agents/import", content=forged, headers=make)
    assert refused.status_code == 400 and "names 1 pictures and has 0" in refused.text
    whole = seeing.http.post(
        "/v1/agents/import?id=again", content=exports["shown"].read_bytes(), headers=guest
    )
    assert whole.status_code < 300, whole.text


def test_a_name_that_is_none_is_a_404(seeing):
    for name in ("0" * NAME_DIGITS, "x", "..%2f..%2fetc", NAME + "0", NAME.upper() + "?"):
        assert seeing.http.get(f"/v1/pictures/{name}").status_code == 404, name


# Programs -----------------------------------------------------------------------------------------


def test_the_sdks_send_pictures(seeing, closing):
    client = closing(openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="owner", max_retries=0))
    part = {"type": "image_url", "image_url": {"url": url_of(FILE), "detail": "low"}}
    said = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    chat = client.chat.completions.create(model="seeing", messages=said, max_tokens=4)
    item = {"type": "input_image", "image_url": url_of(FILE), "detail": "auto"}
    response = client.responses.create(
        model="seeing",
        input=[{"role": "user", "content": [item, {"type": "input_text", "text": "What?"}]}],
        max_output_tokens=4,
    )
    assert response.usage.input_tokens == chat.usage.prompt_tokens > 12
    items = client.responses.input_items.list(response.id).data
    assert items[0].content[0].image_url == f"/v1/pictures/{NAME}"
    with pytest.raises(openai.BadRequestError, match="no PNG") as refused:
        bad = [{"type": "image_url", "image_url": {"url": url_of(b"x")}}]
        client.chat.completions.create(model="seeing", messages=[{"role": "user", "content": bad}])
    assert refused.value.code == "invalid_image"

    claude = closing(anthropic.Anthropic(base_url=seeing.url, api_key="owner", max_retries=0))
    source = {"type": "base64", "media_type": "image/png", "data": url_of(FILE)[22:]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    asked = {"model": "seeing", "messages": [{"role": "user", "content": blocks}]}
    message = claude.messages.create(**asked, max_tokens=4)
    n = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert n == chat.usage.prompt_tokens == claude.messages.count_tokens(**asked).input_tokens
    with pytest.raises(anthropic.BadRequestError, match="no PNG"):
        bad = {"type": "image", "source": {**source, "data": base64.b64encode(SVG).decode()}}
        claude.messages.create(
            model="seeing", messages=[{"role": "user", "content": [bad]}], max_tokens=4
        )

    own = closing(ollama.Client(seeing.url, headers={"Authorization": "Bearer owner"}))
    said = [{"role": "user", "content": "What?", "images": [FILE]}]
    answer = own.chat("seeing", messages=said, options={"num_predict": 4})
    assert answer.prompt_eval_count == chat.usage.prompt_tokens
    generated = own.generate("seeing", "What?", images=[FILE], options={"num_predict": 4})
    assert generated.prompt_eval_count == chat.usage.prompt_tokens
    with pytest.raises(ollama.ResponseError, match="no PNG"):
        own.generate("seeing", "What?", images=[SVG])


def test_a_checkpoint_reads_pictures_of_all_protocols_alike(tmp_path, closing):
    path = str(make_vision_checkpoint(tmp_path / "model"))

    def load(name, progress):
        return open_host(name, capacity=1024, dtype="float32", progress=progress)

    with serving(tmp_path / "store", load=load, offered={"seeing": path}) as live:
        how = {"temperature": 0, "seed": 1}
        part = {"type": "image_url", "image_url": {"url": url_of(FILE)}}
        said = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        client = closing(openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0))
        chat = client.chat.completions.create(model="seeing", messages=said, max_tokens=4, **how)
        claude = closing(anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0))
        source = {"type": "base64", "media_type": "image/png", "data": url_of(FILE)[22:]}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        asked = [{"role": "user", "content": blocks}]
        message = claude.messages.create(
            model="seeing", messages=asked, max_tokens=4, extra_body={"temperature": 0}
        )
        own = closing(ollama.Client(live.url)).chat(
            "seeing",
            messages=[{"role": "user", "content": "What?", "images": [FILE]}],
            options={"num_predict": 4, "temperature": 0},
        )
        texts = {chat.choices[0].message.content, message.content[0].text, own.message.content}
        assert len(texts) == 1
        n = message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert n == chat.usage.prompt_tokens == own.prompt_eval_count > 12
        assert message.usage.cache_read_input_tokens > 0  # it is the same history
        other = {"type": "image_url", "image_url": {"url": url_of(OTHER, "image/jpeg")}}
        said = [{"role": "user", "content": [other, {"type": "text", "text": "What?"}]}]
        chat = client.chat.completions.create(model="seeing", messages=said, max_tokens=4, **how)
        assert chat.usage.prompt_tokens_details.cached_tokens < 8


def test_a_template_of_text_alone_is_shown_pictures_by_a_server(tmp_path, closing):
    path = str(make_gguf(tmp_path / "model", "llava", vocabulary=write_old_vocabulary))

    def load(name, progress):
        return open_host(name, capacity=1024, dtype="float32", progress=progress)

    with serving(tmp_path / "store", load=load, offered={"old": path}) as live:
        client = closing(openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0))

        def ask(*content):
            said = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": {"url": url_of(part)}}
                for part in content
            ]
            answer = client.chat.completions.create(
                model="old",
                messages=[{"role": "user", "content": said}],
                max_tokens=4,
                temperature=0,
                seed=1,
            )
            return answer.usage.prompt_tokens, answer.choices[0].message.content

        cat, dog = picture_file(1), picture_file(2, 40, 16)
        none, one = ask("Look: and what?"), ask("Look:", cat, " and what?")
        rows = 16  # of a square of 16 pixels, by patches of 4
        assert one[0] == none[0] + rows
        both = [ask(cat, "Look: and what?", dog), ask("Look:", cat, dog, " and what?")]
        assert [n for n, _ in both] == [none[0] + 2 * rows] * 2
        spelt = ask("Look: <unk> and <image>", cat)
        assert spelt[0] == ask("Look: ~~~~~ and ~~~~~~~")[0] + rows
        other = ask("Look:", dog, " and what?")
        assert len({one[1], other[1], none[1], *(text for _, text in both)}) > 2
