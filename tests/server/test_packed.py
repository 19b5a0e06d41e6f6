"""Bodies that come packed are read; what cannot be unpacked, or not within bounds, is refused."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib

import pytest

from kvcellar.deploy.gateway import unpacked
from kvcellar.server.front.encodings import Unpacking

SAID = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 2, "temperature": 0}
ROUTE = "/v1/chat/completions"


def zstd(data):
    return pytest.importorskip("backports.zstd").compress(data)


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKERS = {
    "gzip": gzip.compress,
    "x-gzip": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstd,
    "identity": bytes,
}


def post(live, body, encoding, route=ROUTE):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return live.http.post(route, content=body, headers=headers)


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_packed_body_is_read(live, encoding, in_pieces):
    packed = PACKERS[encoding](json.dumps(SAID).encode())
    pieces = (packed[i : i + 7] for i in range(0, len(packed), 7)) if in_pieces else packed
    said = post(live, pieces, encoding)
    assert said.status_code == 200, said.text
    assert said.json()["choices"] == live.post(ROUTE, SAID)["choices"]


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "x"])
def test_another_encoding_is_refused_and_told_what_is_read(live, encoding):
    said = post(live, b"x", encoding)
    assert said.status_code == 415
    assert said.headers["accept-encoding"] == "gzip, deflate, zstd, identity"
    assert "gzip, deflate, zstd" in said.json()["error"]["message"]
    said = post(live, b"x", encoding, "/v1/messages").json()["error"]
    assert said["details"] == {"error_code": "request_body_encoding_unsupported"}


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_body_that_is_not_packed_as_it_says_is_refused(live, encoding):
    packed = PACKERS[encoding](json.dumps(SAID).encode())
    for body in (json.dumps(SAID).encode(), packed[:-9], packed[:4], packed + b"more"):
        said = post(live, body, encoding)
        assert said.status_code == 400, (body, said.text)
        assert said.json()["error"]["code"] == "request_body_encoding_invalid"
    said = post(live, packed[:-9], encoding, "/v1/messages").json()["error"]
    assert said["details"] == {"error_code": "request_body_encoding_invalid"}


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("route", [ROUTE, "/v1/completions", "/v1/embeddings"])
def test_a_bomb_is_refused_before_it_is_unpacked(live, encoding, route):
    bomb = PACKERS[encoding](b'{"x": "' + bytes(300 << 20) + b'"}')
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        said = post(live, bomb, encoding, route)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said.status_code == 413, said.text
    assert said.json()["error"]["code"] == "request_body_too_large_after_decoding"
    assert most < 100 << 20


def test_a_long_conversation_is_too_long_packed_or_not(live):
    words = " ".join(str(i) for i in range(400_000))
    body = json.dumps({**SAID, "messages": [{"role": "user", "content": words}]}).encode()
    plain = live.http.post(ROUTE, content=body).json()["error"]
    said = post(live, gzip.compress(body), "gzip").json()["error"]
    assert said["code"] == plain["code"] == "context_length_exceeded"


def test_what_is_unpacked_comes_in_small_pieces():
    bomb = gzip.compress(bytes(1 << 20))
    sizes = [len(piece) for piece in Unpacking("gzip").pieces(bomb, is_last=True)]
    assert sum(sizes) == 1 << 20 and max(sizes) <= 64 << 10


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (ROUTE, SAID),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/messages", SAID),
        ("/v1/messages/count_tokens", {"messages": SAID["messages"]}),
        ("/v1/conversations", {}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/agents", {}),
        ("/api/chat", {"model": "demo", "messages": SAID["messages"], "stream": False}),
        ("/tokenize", {"content": "x"}),
    ],
)
def test_a_request_without_a_type_is_json(live, route, body):
    request = live.http.build_request("POST", route, content=json.dumps(body).encode())
    assert "content-type" not in request.headers
    assert live.http.send(request).is_success
    broken = live.http.post(route, content=b"{")
    assert broken.status_code == 400 and "no JSON" in broken.text
    form = live.http.post(route, data={"x": "y"})
    assert form.status_code == (400 if route.startswith("/api/") else 415)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (ROUTE, SAID),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/messages", SAID),
        ("/api/chat", {"model": "demo", "messages": SAID["messages"]}),
        ("/api/generate", {"model": "demo", "prompt": "x", "options": {"num_predict": 2}}),
    ],
)
def test_a_proxy_is_told_not_to_hold_a_stream_back(live, route, body):
    said = live.http.post(route, json={**body, "stream": True})
    assert said.is_success and said.headers["x-accel-buffering"] == "no"


def test_a_gateway_reads_what_its_replica_would_and_leaves_it_what_has_to_be_refused():
    body = json.dumps(SAID).encode()
    assert unpacked(gzip.compress(body), "gzip", 1 << 20) == body
    assert unpacked(body, None, 1 << 20) is None
    for packed, encoding in ((gzip.compress(bytes(2 << 20)), "gzip"), (body, "gzip"), (body, "br")):
        assert unpacked(packed, encoding, 1 << 20) is None
