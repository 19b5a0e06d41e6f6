"""A field is honoured, known to be harmless, or refused by its name: never ignored in silence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcellar.server.schemas.anthropic import MessagesRequest
from kvcellar.server.schemas.fields import HARMLESS, REFUSED, SWITCHES
from kvcellar.server.schemas.openai import ChatRequest, CompletionRequest
from kvcellar.server.schemas.responses import ResponseRequest

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


def test_a_field_of_the_wrong_type_is_named_as_the_client_knows_it(live):
    body = {**PLAIN["/v1/chat/completions"], "stop": 5}
    error = live.http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "stop"
    assert (
        error["message"] == "stop: Input should be a valid string, or Input should be a valid list"
    )
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}
    error = live.http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages.0.content"
    assert "messages.0.content.0.text: Input should be a valid string" in error["message"]


# Bounds ------------------------------------------------------------------------------------------


FLAGS = [
    ("/v1/completions", {"prompt": [True]}, "prompt"),
    ("/v1/completions", {"prompt": [[1, 2], [3, False]]}, "prompt"),
    ("/v1/completions", {"prompt": "x", "n": True}, "n"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [True]}, "stop_token_ids"),
    ("/v1/chat/completions", {"messages": [SAID], "temperature": False}, "temperature"),
    ("/v1/chat/completions", {"messages": [SAID], "logit_bias": {"1": True}}, "logit_bias"),
    ("/v1/messages", {"messages": [SAID], "max_tokens": True}, "max_tokens"),
    ("/v1/responses", {"input": "x", "max_output_tokens": True}, "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "body", "name"), FLAGS)
def test_a_flag_is_no_number(live, path, body, name):
    said = live.http.post(path, json=body)
    assert said.status_code == 400 and name in said.text and "number" in said.text, said.text


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


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ('{"a": ' * 1500 + "1" + "}" * 1500, "nested"),
        ('{"a": ' * 200 + "1" + "}" * 200, "user.a.a.a.a.a... is nested more than 128 levels deep"),
        ("1" * 5000, "cannot be read: Exceeds the limit"),
        ("NaN", "user is nan"),
        ("[1e999]", "user.0 is inf"),
        ('"\xff"', "no UTF-8"),
        ('{"a": 1', "the body is no JSON: Expecting ',' delimiter, at character "),
    ],
)
@pytest.mark.parametrize("n_more", [0, 9000])
def test_what_cannot_be_read_is_said_whatever_the_length(live, inside, said, n_more):
    more = '"x": "' + " " * n_more + '", ' if n_more else ""
    body = f'{{"messages": [], {more}"user": {inside}}}'.encode("latin-1")
    headers = {"content-type": "application/json"}
    response = live.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"], response.text


# Tools and content -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("/v1/chat/completions", "required"),
        ("/v1/chat/completions", "any"),
        ("/v1/responses", {"type": "any"}),
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


# Fields that no schema declares -------------------------------------------------------------------

ASKS = {
    "suffix": "end",
    "lora": "name",
    "typical_p": 0.5,
    "mirostat": 2,
    "options": {"num_ctx": 4096},
    "length_penalty": 0.5,
    "use_beam_search": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "chat_template": "{{ messages }}",
    "truncate_prompt_tokens": 5,
    "modalities": ["text", "audio"],
    "background": True,
    "functions": [{"name": "f"}],
}
"""Values that would change the answer."""


@pytest.mark.parametrize("path", PLAIN)
def test_a_field_that_would_change_the_answer_is_refused_by_its_name(live, path):
    for name, value in ASKS.items():
        response = live.http.post(path, json={**PLAIN[path], name: value})
        assert response.status_code == 400, (name, response.text)
        error = response.json()["error"]
        assert error["message"].startswith(f"{name} is not honoured: ")
        assert error.get("param", name) == name


@pytest.mark.parametrize("path", PLAIN)
def test_a_field_that_asks_for_nothing_is_no_reason_to_refuse(live, path):
    neutral = {name: given[0] for name, (_, given) in REFUSED.items() if given}
    live.post(path, {**PLAIN[path], **neutral})
    live.post(path, {**PLAIN[path], **dict.fromkeys(REFUSED)})
    asks = {name for name, (_, given) in REFUSED.items() if True in given} | SWITCHES
    off = {name: False for name in REFUSED if name not in asks}
    live.post(path, {**PLAIN[path], **off, "cache_salt": ""})


@pytest.mark.parametrize("path", PLAIN)
def test_thinking_is_not_left_on_in_silence_where_it_is_switched_off_by_another_name(live, path):
    for name in SWITCHES - ({"enable_thinking"} if path == "/v1/chat/completions" else set()):
        assert "chat_template_kwargs" in refusal(live, path, **{name: False})


@pytest.mark.parametrize("path", PLAIN)
def test_a_field_that_says_nothing_about_the_answer_is_taken(live, path):
    schemas = (ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest)
    honoured = {name for schema in schemas for name in schema.model_fields}
    body = {**PLAIN[path], **{name: {"a": "b"} for name in HARMLESS if name not in honoured}}
    response = live.http.post(path, json=body)
    assert response.is_success and "x-kvcellar-ignored" not in response.headers, response.text


@pytest.mark.parametrize(
    ("path", "name", "value", "route"),
    [
        ("/v1/responses", "max_tokens", 5, "/v1/chat/completions|/v1/completions|/v1/messages"),
        ("/v1/responses", "messages", [SAID], "/v1/chat/completions|/v1/messages"),
        ("/v1/chat/completions", "echo", True, "/v1/completions"),
        ("/v1/chat/completions", "max_output_tokens", 5, "/v1/responses"),
        ("/v1/messages", "stop", ["x"], "/v1/"),
        ("/v1/messages", "presence_penalty", 0.5, "/v1/"),
        ("/v1/completions", "tools", [{"type": "function", "function": {"name": "f"}}], "/v1/"),
    ],
)
def test_a_field_of_another_protocol_is_refused_with_its_route(live, path, name, value, route):
    said = refusal(live, path, **{name: value})
    assert re.match(f"{name} is not honoured: this route has no such field, ({route})", said)


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("/v1/chat/completions", "temprature", "temperature"),
        ("/v1/chat/completions", "maxTokens", "max_tokens"),
        ("/v1/completions", "max_token", "max_tokens"),
        ("/v1/responses", "max-output-tokens", "max_output_tokens"),
        ("/v1/messages", "stop_sequence", "stop_sequences"),
    ],
)
def test_a_misspelt_field_is_refused_with_what_was_meant(live, path, name, meant):
    assert refusal(live, path, **{name: 5}).endswith(f"do you mean {meant}?")


@pytest.mark.parametrize("path", PLAIN)
def test_a_field_that_nobody_knows_is_said_to_be_ignored(live, path):
    body = {**PLAIN[path], "quantum_mode": 1, "née\n": 2}
    response = live.http.post(path, json=body)
    assert response.is_success, response.text
    assert response.headers["x-kvcellar-ignored"] == "quantum_mode, ?"
    assert response.json()["kvcellar"]["ignored"] == ["quantum_mode", "?"]
    streamed = live.http.post(path, json={**body, "stream": True})
    assert streamed.is_success and streamed.headers["x-kvcellar-ignored"] == "quantum_mode, ?"
    many = {f"unknown_{i}": i for i in range(1000)}
    assert "more than 20 fields" in refusal(live, path, **many)


@pytest.mark.parametrize(
    ("route", "setting", "named"),
    [
        ("/v1/chat/completions", {"reasoning": {"effort": "low", "x": 1}}, "reasoning.x"),
        ("/v1/chat/completions", {"stream_options": {"include_usag": True}}, "stream_options"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
        ),
        ("/v1/messages", {"output_config": {"effort": "low", "x": 1}}, "output_config.x"),
        ("/v1/responses", {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
    ],
)
def test_what_nobody_knows_inside_of_a_setting_is_named(live, route, setting, named):
    asked = (
        {"input": "x"}
        if route == "/v1/responses"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    most = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    body = {**asked, most: 2, **setting}
    if "stream_options" in setting:
        body["stream"] = True
    response = live.http.post(route, json=body)
    assert response.is_success, response.text
    assert named in response.headers["x-kvcellar-ignored"]


def test_the_agents_own_routes_take_no_field_that_they_do_not_know(live):
    made = live.post("/v1/agents", {"system": "x"})["id"]
    for path, body in (
        ("/v1/agents", {"name": "x"}),
        (f"/v1/agents/{made}/fork", {"at": 1}),
        (f"/v1/agents/{made}/rewind", {"turns": 1}),
        (f"/v1/agents/{made}/generate", {"text": "x", "quantum_mode": 1}),
        (f"/v1/agents/{made}/generate", {"text": "x", "messages": [SAID]}),
    ):
        response = live.http.post(path, json=body)
        assert response.status_code == 400, response.text
        assert list(body)[-1] in response.json()["error"]["message"]


def test_every_field_is_in_the_docs():
    text = Path(__file__).parents[2].joinpath("docs/http.md").read_text()
    named = set(re.findall(r"`([A-Za-z_]+)`", text))
    schemas = (ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest)
    honoured = {
        field.alias or name for schema in schemas for name, field in schema.model_fields.items()
    }
    assert {*HARMLESS, *REFUSED, *honoured} <= named


# Other names and values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "given", "own"),
    [
        ("/v1/chat/completions", {"n_predict": 3}, {"max_tokens": 3}),
        ("/v1/chat/completions", {"num_predict": 3}, {"max_completion_tokens": 3}),
        ("/v1/completions", {"max_new_tokens": 3}, {"max_tokens": 3}),
        ("/v1/completions", {"min_new_tokens": 2}, {"min_tokens": 2}),
        ("/v1/responses", {"n_predict": 3}, {"max_output_tokens": 3}),
        ("/v1/completions", {"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ("/v1/completions", {"repeat_penalty": 1.5, "repeat_last_n": 0}, {}),
        ("/v1/completions", {"top_k": -1}, {"top_k": 0}),
        ("/v1/messages", {"top_k": -1}, {"top_k": 0}),
        ("/v1/completions", {"top_p": 0, "temperature": 1}, {"top_k": 1}),
        (
            "/v1/completions",
            {"logit_bias": [[65, 5], [66, False]]},
            {"logit_bias": {"65": 5, "66": -100}},
        ),
        ("/v1/completions", {"stop": "", "logit_bias": [], "seed": "", "grammar": ""}, {}),
        ("/v1/chat/completions", {"stop": [""], "tool_choice": "", "tools": []}, {}),
        ("/v1/chat/completions", {"response_format": {}, "model": "", "agent_id": ""}, {}),
        ("/v1/chat/completions", {"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ("/v1/responses", {"stream_options": {"include_obfuscation": False}}, {}),
        ("/v1/responses", {"top_logprobs": 0, "tool_choice": {"type": "none"}}, {}),
    ],
)
def test_names_and_values_of_other_servers_mean_what_they_mean_there(live, path, given, own):
    plain = {"/v1/messages": {"messages": [SAID], "max_tokens": 6}, "/v1/responses": {"input": "x"}}
    plain |= {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [SAID]}}
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    limit = {} if "_tokens" in str(own) else {name: 6}
    body = {**plain[path], "temperature": 0, **limit}
    answers = [live.post(path, {**body, **fields}) for fields in (given, own)]
    same = ("choices", "content", "usage") if path != "/v1/responses" else ("usage",)
    told = [{key: one.get(key) for key in same} for one in answers]
    for one in told:
        for part in ("prompt_tokens_details", "input_tokens_details"):
            one["usage"].pop(part, None)
        for part in ("cache_read_input_tokens", "input_tokens"):
            one["usage"].pop(part, None)
    assert told[0] == told[1]


def test_no_limit_goes_on_to_the_end_of_the_context(live):
    prompt = [65] * (live.host().context - 5)
    body = {"prompt": prompt, "max_tokens": -1, "ignore_eos": True, "temperature": 0}
    answer = live.post("/v1/completions", body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["kvcellar"] and 4 <= answer["usage"]["completion_tokens"] <= 6


def test_a_seed_of_minus_one_is_any_and_two_names_of_one_field_have_one_value(live):
    path = "/v1/completions"
    body = {"prompt": "x", "max_tokens": 12, "temperature": 2, "seed": -1, "ignore_eos": True}
    texts = {live.post(path, body)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1
    assert "give one of them" in refusal(live, path, n_predict=5)
    assert "at least 1 token" in refusal(live, "/v1/chat/completions", max_tokens=0)


def test_a_penalty_that_holds_for_more_than_was_asked_is_said_to(live):
    body = {"prompt": "x", "max_tokens": 2, "repeat_penalty": 1.1}
    (note,) = live.post("/v1/completions", body)["kvcellar"]["notes"]
    assert "not for the last 64" in note
    assert not live.post("/v1/completions", {**body, "repeat_last_n": -1})["kvcellar"]["notes"]


# Several at once ---------------------------------------------------------------------------------


def test_fields_that_contradict_each_other_are_refused(live):
    path = "/v1/chat/completions"
    assert "max_completion_tokens" in refusal(live, path, max_completion_tokens=5)
    assert "logprobs: true" in refusal(live, path, top_logprobs=3)
    assert "best_of 5" in refusal(live, "/v1/completions", best_of=5)
    live.post("/v1/completions", {**PLAIN["/v1/completions"], "best_of": 2, "n": 2})


def test_log_probabilities_come_also_where_an_answer_may_have_calls(live):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    more = {"tools": [tool], "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    body = {"messages": [SAID], "temperature": 0, **more}
    answer = live.post("/v1/chat/completions", {**body, "tool_choice": "required"})
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 8
    assert "".join(token["token"] for token in content).startswith("<tool_call>")


def test_an_answer_ends_with_a_token_that_is_asked_for(live):
    body = {"prompt": "import", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    host = live.host()
    whole = live.post("/v1/completions", body)
    ids = host.tokenizer.encode(whole["choices"][0]["text"])
    cut = live.post("/v1/completions", {**body, "stop_token_ids": [ids[3]]})
    assert cut["usage"]["completion_tokens"] == ids.index(ids[3]) + 1
    assert cut["choices"][0]["finish_reason"] == "stop"


# What an answer has to be -------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
GBNF = 'root ::= "yes" | no\nno ::= "no" "!"'
FORMS = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}'),
    ({"guided_json": SCHEMA}, '{"a": 1}'),
    ({"guided_json": json.dumps(SCHEMA)}, '{"a": 1}'),
    ({"json_schema": SCHEMA}, '{"a": 1}'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}'),
    ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    ({"regex": "(ab){2}"}, "abab"),
    ({"structured_outputs": {"regex": "x+y"}}, "x+y"),
    ({"guided_choice": ["Oslo", "Ro/me\n"]}, "Oslo|Ro/me\n"),
    ({"structured_outputs": {"choice": ["é€😀"]}}, "é€😀"),
    ({"guided_grammar": GBNF}, "yes|no!"),
    ({"grammar": GBNF}, "yes|no!"),
    ({"grammar": 'start: "a" B\nB: /[bc]{2}/'}, "a[bc]{2}"),
]


@pytest.mark.parametrize(("form", "wanted"), FORMS)
def test_an_answer_is_of_the_form_that_is_asked_for(live, form, wanted):
    pattern = wanted if "{" not in wanted or "[" in wanted else re.escape(wanted)
    body = {"max_tokens": 60, "temperature": 1.5, "seed": 7, **form}
    chat = live.post("/v1/chat/completions", {"messages": [SAID], **body})
    plain = live.post("/v1/completions", {"prompt": "x", **body})
    for text in (chat["choices"][0]["message"]["content"], plain["choices"][0]["text"]):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"guided_regex": "(?!x)["}, "no grammar can be made of guided_regex"),
        ({"guided_choice": []}, "guided_choice: there is nothing to choose from"),
        ({"grammar": "no grammar at all"}, "no grammar can be made of grammar"),
        ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json is a text that is no JSON schema"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "both say what the answer has to be"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_form_that_cannot_be_held_is_refused_by_its_field(live, path, form, said):
    assert said in refusal(live, path, **form)


def test_a_completion_says_what_of_a_schema_it_is_not_held_to(live):
    schema = {**SCHEMA, "not": {"required": ["b"]}}
    form = {"name": "x", "schema": schema, "strict": False}
    more = {"response_format": {"type": "json_schema", "json_schema": form}, "max_tokens": 40}
    body = {**PLAIN["/v1/completions"], **more}
    answer = live.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == '{"a": 1}'
    assert "not" in answer["kvcellar"]["notes"][0]
    form["strict"] = True
    assert "response_format" in refusal(live, "/v1/completions", **more)


def test_a_form_and_tools_go_together_where_it_is_a_schema(live):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    path, more = "/v1/chat/completions", {"tools": [tool], "max_tokens": 40, "temperature": 0}
    assert "guided_choice says what" in refusal(live, path, guided_choice=["a"], **more)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {**PLAIN[path], **more, "response_format": schema}
    forced = live.post(path, {**body, "tool_choice": "required"})["choices"][0]
    assert forced["message"]["tool_calls"]
    none = live.post(path, {**body, "tool_choice": "none"})["choices"][0]["message"]
    assert none["content"] == '{"a": 1}'
    either = live.post(path, body)["choices"][0]["message"]
    assert either.get("tool_calls") or either["content"] == '{"a": 1}'
    named = live.post(path, {**PLAIN[path], **more, "guided_choice": ["a"], "tool_choice": "none"})
    assert named["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_an_answer_has_the_tokens_that_it_must_have(live, path):
    host = live.host()
    ends = {str(token_id): 100 for token_id in host.eos_token_ids}
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**PLAIN[path], name: 9, "temperature": 0, "logit_bias": ends}

    def n_of(**more):
        usage = live.post(path, {**body, **more})["usage"]
        return usage.get("completion_tokens", usage.get("output_tokens"))

    assert n_of() == 1
    assert n_of(min_tokens=5) == 6
    assert "min_tokens must be 0 to max_tokens" in refusal(live, path, min_tokens=10**400)
