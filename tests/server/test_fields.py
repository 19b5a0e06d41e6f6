"""A field is honoured, known to be harmless, or refused by its name: never ignored in silence."""

from __future__ import annotations

import pytest

SAID = {"role": "user", "content": "Say something."}
PLAIN = {
    "/v1/chat/completions": {"messages": [SAID], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [SAID], "max_tokens": 2},
}
STOPS = {"/v1/messages": "stop_sequences"}


def refusal(live, path, **more):
    response = live.http.post(path, json={**PLAIN[path], **more})
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


# Bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PLAIN)
def test_a_temperature_that_no_protocol_has_is_refused(live, path):
    assert "temperature" in refusal(live, path, temperature=99)
    live.post(path, {**PLAIN[path], "temperature": 2})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_stop_texts_are_bounded_in_number_and_length(live, path):
    name = STOPS.get(path, "stop")
    assert name in refusal(live, path, **{name: [f"stop {i}" for i in range(1000)]})
    assert "characters" in refusal(live, path, **{name: ["x" * 999 + str(i) for i in range(9)]})
    live.post(path, {**PLAIN[path], name: [f"stop {i}" for i in range(64)]})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_bias_is_for_a_token_and_within_openais_bounds(live, path):
    for bias in ({"9" * 5000: 1}, {"x": 1}, {"-1": 1}, {"1": 1e308}, {"1": 101}):
        assert "logit_bias" in refusal(live, path, logit_bias=bias)
    live.post(path, {**PLAIN[path], "logit_bias": {"1": -100, "2": 100}})


# Tools and content -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("/v1/chat/completions", "required"),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f"}}),
        ("/v1/responses", "required"),
        ("/v1/responses", {"type": "function", "name": "f"}),
        ("/v1/messages", {"type": "any"}),
        ("/v1/messages", {"type": "tool", "name": "f"}),
    ],
)
def test_a_call_that_has_to_be_made_needs_tools(live, path, choice):
    assert "no tools" in refusal(live, path, tool_choice=choice)
    assert "no tools" in refusal(live, path, tool_choice=choice, tools=[])


IMAGE = {"url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": IMAGE}),
        ("/v1/chat/completions", "messages", {"type": "input_audio", "input_audio": {}}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": "data:"}),
        ("/v1/responses", "input", {"type": "input_file", "file_id": "x"}),
        ("/v1/messages", "messages", {"type": "image", "source": {}}),
        ("/v1/messages", "messages", {"type": "document", "source": {}}),
    ],
)
def test_a_part_that_is_no_text_is_refused_also_where_it_has_text_beside(live, path, field, part):
    for more in ({}, {"text": "What is this?"}):
        said = {"role": "user", "content": [{**part, **more}]}
        assert f"type {part['type']!r}" in refusal(live, path, **{field: [said]})
