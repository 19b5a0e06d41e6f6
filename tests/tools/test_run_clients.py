"""The script that runs agents against the server: what it makes of a log, and its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.live import serving
from tests.tools.scripts import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("run_clients")


def line(status: int = 200, **facts: int) -> dict[str, Any]:
    return {"method": "POST", "route": "/v1/messages", "status": status, **facts}


def test_a_turn_fails_on_a_refusal_on_silence_and_on_little_reuse(script: Any) -> None:
    good = line(input_tokens=20, cache_read_input_tokens=980)
    title = line(prompt_tokens=30, cached_tokens=0)
    said = f"... {script.ANSWER}"
    turn = script.Turn("c", "1", 2, [title, good])
    assert turn.main is good and turn.reuse == 0.98 and not turn.problems(said)
    assert "980" in script.table([turn]) and "0.980" in script.table([turn])
    assert script.Turn("c", "1", 2, [good, line(400)]).problems(said) == [
        "c 1, turn 2: POST /v1/messages was answered 400"
    ]
    little = line(prompt_tokens=1000, cached_tokens=940)
    assert "0.940" in script.Turn("c", "1", 2, [little]).problems(said)[0]
    assert not script.Turn("c", "1", 1, [little]).problems(said)
    assert "no answer was asked for" in script.Turn("c", "1", 1, []).problems("x")[0]
    assert "does not show" in script.Turn("c", "1", 1, [good]).problems("x")[0]


def test_the_model_that_is_made_says_its_sentence_and_ends(script: Any, tmp_path: Path) -> None:
    made = str(script.make_model(tmp_path / "made"))
    with serving(tmp_path / "store", offered={"made": made}) as live:
        messages = [{"role": "user", "content": "Say hello."}]
        body = {"messages": messages, "max_tokens": 64, "temperature": 1.0}
        choice = live.post("/v1/chat/completions", body)["choices"][0]
    assert choice["message"]["content"] == script.ANSWER and choice["finish_reason"] == "stop"
