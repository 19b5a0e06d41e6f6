"""Whatever the OpenAPI document allows, and what it does not, is answered and never breaks it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.server.live import PATIENCE_S, load_demo, serving

pytestmark = pytest.mark.filterwarnings("ignore")

ENDLESS = "/events"
N_EXAMPLES = int(os.environ.get("KVCELLAR_FUZZ", "4"))
"""Of each route, right ones and as many wrong ones."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """A cache of few cells: whatever is asked for, the answer is short."""
    with serving(tmp_path_factory.mktemp("fuzzed"), load=load_demo(64), max_tokens=4) as live:
        live.post("/v1/agents", {"id": "somebody"})
        yield live


@pytest.mark.slow
def test_every_route_answers_whatever_comes(fuzzed):
    document = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json").exclude(path=ENDLESS)
    n_routes = 0
    for found in document.get_all_operations():
        operation = found.ok()
        modes = [GenerationMode.POSITIVE]
        if operation.body or list(operation.query) or list(operation.headers):
            modes.append(GenerationMode.NEGATIVE)  # of a path alone every text is right
        for mode in modes:

            @settings(
                max_examples=N_EXAMPLES,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def answers(case):
                response = case.call(timeout=PATIENCE_S)
                said = f"{case.method} {case.path}: {response.status_code} {response.text[:500]}"
                # 507: it does not fit in the few cells; 503: nothing is ready. Both with numbers.
                assert response.status_code < 500 or response.status_code in (503, 507), said
                if response.status_code >= 400 and case.path != "/ready":
                    error = response.json()["error"]
                    is_ollamas = case.path.startswith("/api/")
                    assert error if is_ollamas else error["message"] and error["type"], said

            answers()
        n_routes += 1
    assert n_routes >= 25


def test_nothing_is_left_behind_by_all_of_it(fuzzed):
    fuzzed.until(fuzzed.is_still, "the end of all requests")


def test_the_document_has_every_route(fuzzed):
    paths = fuzzed.get("/openapi.json")["paths"]
    verbs = ("generate", "fork", "rewind", "keep", "pause", "resume", "export", "why")
    assert {
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/agents",
        "/v1/agents/import",
        "/v1/cache",
        "/health",
        "/ready",
        "/metrics",
        *(f"/v1/agents/{{agent_id}}/{verb}" for verb in verbs),
    } <= paths.keys()


# Every field, by every kind of wrong value --------------------------------------------------------

DEEP = "[" * 5000 + "]" * 5000
WRONG = [
    "null",
    "true",
    "-1",
    "0",
    "1e308",
    "-1e308",
    "0.5",
    str(2**70),
    str(-(2**70)),
    "7" * 5000,
    "7" * 400,
    "NaN",
    "-Infinity",
    "1e999",
    '""',
    '"x"',
    '"' + "long " * 20_000 + '"',
    r'"\ud83d"',
    r'"\u0000"',
    "[]",
    "{}",
    "[null]",
    "[[[{}]]]",
    '{"a": {"b": []}}',
    '{"' + "9" * 5000 + '": 1}',
    r'{"\ud83d": NaN}',
    DEEP,
    '{"a": ' * 5000 + "1" + "}" * 5000,
]
"""As JSON, or what is nearly that."""

PLACE = "@@@"
"""Stands where a value is put in."""


def bodies_with_place(document, schema, value, n_deep=0):
    """Bodies that have a place in them: for the whole, each field, and each field of a field."""
    schema = resolved(document, schema)
    yield PLACE
    for option in [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]:
        for inside in bodies_with_place(document, option, value, n_deep):
            if inside != PLACE:
                yield inside
    if n_deep > 4:
        return
    known = value if isinstance(value, dict) else {}
    for name, field in schema.get("properties", {}).items():
        for inside in bodies_with_place(document, field, known.get(name), n_deep + 1):
            yield {**known, name: inside}
    if "items" in schema:
        first = value[0] if isinstance(value, list) and value else None
        for inside in bodies_with_place(document, schema["items"], first, n_deep + 1):
            yield [inside]


def resolved(document, schema):
    while "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
    return schema


SAID = {"role": "user", "content": "x"}
FUNCTION = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
BODIES = {
    "/v1/chat/completions": {
        "messages": [SAID],
        "max_tokens": 1,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "none",
    },
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": [SAID], "max_output_tokens": 1, "tools": [], "store": False},
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "max_tokens": 1,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"},
    },
    "/v1/messages/count_tokens": {"messages": [SAID], "system": "x"},
    "/v1/agents": {"system": "x"},
    "/v1/agents/somebody/fork": {"turn": 0},
    "/v1/agents/somebody/rewind": {"turn": 0},
    "/v1/agents/somebody/generate": {"text": "x", "max_tokens": 1},
}


def called(arguments):
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, SAID], "max_tokens": 1}


def told(role, kind):
    block = {"type": kind, "id": "c", "tool_use_id": "c", "name": "f", "input": PLACE}
    block |= {"content": PLACE, "source": PLACE}
    return {"messages": [{"role": role, "content": [block]}, SAID], "max_tokens": 1}


def schemas_with(inside):
    schema = {"type": "object", "properties": {"a": inside}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    yield {"messages": [SAID], "max_tokens": 1, "response_format": form}
    yield {"messages": [SAID], "max_tokens": 1, "tools": [tool]}


MORE = {
    "/v1/chat/completions": [
        *map(called, (PLACE, {"a": PLACE}, DEEP, "NaN", r'{"a": "\ud83d"}')),
        *schemas_with(PLACE),
        *schemas_with({"enum": [PLACE]}),
        {"messages": [SAID], "max_tokens": 1, "logit_bias": {"5": PLACE}},
        {"messages": [SAID], "max_tokens": 1, "metadata": {"a": PLACE}, "unknown": PLACE},
    ],
    "/v1/completions": [
        {"prompt": [PLACE, PLACE], "max_tokens": 1, "echo": True},
        {"prompt": [[PLACE]], "max_tokens": 1, "echo": True, "logprobs": 1},
    ],
    "/v1/responses": [
        {
            "input": [
                {"type": kind, "call_id": "c", "name": "f", "arguments": PLACE, "output": PLACE},
                SAID,
            ],
            "max_output_tokens": 1,
        }
        for kind in ("function_call", "function_call_output", "reasoning", "custom_tool_call")
    ],
    "/v1/messages": [
        told("assistant", "tool_use"),
        told("user", "tool_result"),
        told("assistant", "thinking"),
        told("user", "server_tool_use"),
    ],
}


def bodies_of(document, path):
    """JSON, or nearly, with every wrong value in every field; in fields of fields every third."""
    route = path.replace("somebody", "{agent_id}")
    content = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    found = [*bodies_with_place(document, content["schema"], BODIES[path]), *MORE.get(path, ())]
    for i, text in enumerate(dict.fromkeys(map(json.dumps, found))):
        is_inside = text.count("{") > json.dumps(BODIES[path]).count("{")
        for j, wrong in enumerate(WRONG):
            if not is_inside or (i + j) % 3 == 0:
                yield text.replace(json.dumps(PLACE), wrong)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.slow
def test_no_value_of_any_field_is_an_error_of_the_servers(fuzzed, path):
    document = fuzzed.get("/openapi.json")
    bodies = list(bodies_of(document, path))
    assert len(bodies) >= 3 * len(WRONG)
    headers = {"content-type": "application/json"}
    client = httpx.Client(base_url=fuzzed.url, timeout=PATIENCE_S)
    with client, ThreadPoolExecutor(4) as pool:

        def send(body):
            return body, client.post(path, content=body, headers=headers)

        for body, response in pool.map(send, bodies):
            said = f"{response.status_code} {response.text[:500]} for {body[:2000]}"
            assert response.status_code < 500 or response.status_code in (503, 507), said
            assert "Traceback" not in response.text, said
            if response.status_code >= 400:
                assert response.json()["error"]["message"], said
    fuzzed.until(fuzzed.is_still, "the end of all requests")
    assert fuzzed.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["choices"]
