"""A server whose engine has stopped says so at once, to everybody, and ends in order."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from kvcellar.engine.kv.residency import Residency
from tests.server.live import serving

LONG = "tell me a long story about a cellar and all that is kept in it"


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a book is torn in /home/somebody")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
}
MOST = {"/v1/responses": "max_output_tokens"}


def body_of(path: str, **more: Any) -> dict[str, Any]:
    most = MOST.get(path, "max_tokens")
    return {"model": "demo", most: 1000, "temperature": 0, **BODIES[path], **more}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.slow
def test_an_engine_that_stops_ends_its_streams_with_an_error_and_refuses_what_comes_later(
    path, tmp_path, monkeypatch
):
    allot, is_torn = Residency.make_room_for, threading.Event()

    def torn_later(self: Any, stretches: Any, n_slots: int) -> bool:
        if is_torn.is_set():
            raises()
        time.sleep(0.01)  # so that the answer is not over before it is torn
        return allot(self, stretches, n_slots)

    monkeypatch.setattr(Residency, "make_room_for", torn_later)
    with serving(tmp_path) as live:
        live.get("/health")
        lines: list[str] = []
        with live.http.stream("POST", path, json=body_of(path, stream=True)) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                lines.append(line)
                is_torn.set()
        said = "\n".join(lines)
        assert "error" in said and "has stopped after RuntimeError" in said
        assert "/home/somebody" not in said

        for other in BODIES:
            for is_stream in (False, True):
                refused = live.http.post(other, json=body_of(other, stream=is_stream))
                assert refused.status_code == 503, refused.text
                assert "has stopped after RuntimeError" in refused.text
                assert "/home/somebody" not in refused.text

        health = live.http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        (model,) = health.json()["models"]
        assert model["state"] == "failed" and "has stopped after RuntimeError" in model["detail"]
        ready = live.http.get("/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert live.http.get("/v1/cache").status_code == 200
        assert live.http.get("/metrics").status_code == 200
        assert json.loads(live.http.get("/v1/models").text)["data"]
