"""What agents that people use send, as recorded from them: their kinds of tools, items and fields.

The shapes are those of Claude Code 2.1.197, Codex 0.169.0 and OpenCode 1.18.33; the texts are ours.
`make clients` runs the programs themselves.
"""

from __future__ import annotations

import json

import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
LIMIT = 9007199254740991


def schema(required=(), **properties):
    return {
        "$schema": DRAFT,
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


CLAUDE_TOOLS = [
    {"name": name, "description": f"Tool {name}.", "input_schema": parameters}
    for name, parameters in (
        ("Bash", schema(["command"], command={"type": "string"}, timeout={"type": "number"})),
        ("WebFetch", schema(["url"], url={"type": "string", "format": "uri"})),
        (
            "TaskCreate",
            schema(
                ["subject"],
                subject={"type": "string"},
                metadata={
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": {},
                },
            ),
        ),
        (
            "Workflow",
            schema(
                script={"type": "string", "maxLength": 524288},
                args={},
                resumeFromRunId={"type": "string", "pattern": "^wf_[a-z0-9-]{6,}$"},
            ),
        ),
        (
            "ReportFindings",
            schema(
                ["findings"],
                findings={
                    "maxItems": 32,
                    "type": "array",
                    "items": schema(
                        ["file"],
                        file={"type": "string"},
                        line={"type": "integer", "minimum": -LIMIT, "maximum": LIMIT},
                    ),
                },
            ),
        ),
    )
]

CODEX_TOOLS = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Run a command.",
        "strict": False,
        "parameters": schema(["cmd"], cmd={"type": "string"}, tty={"type": "boolean"}),
    },
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for sub-agents.",
        "tools": [
            {
                "type": "function",
                "name": "close_agent",
                "strict": False,
                "parameters": schema(["target"], target={"type": "string"}),
            }
        ],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edit files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "web_search", "external_web_access": False},
]

OPENCODE_TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
    for name, parameters in (
        (
            "bash",
            {
                "$schema": DRAFT,
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "timeout": {
                        "minimum": -LIMIT,
                        "exclusiveMinimum": 0,
                        "type": "integer",
                        "maximum": LIMIT,
                    },
                },
                "required": ["command"],
            },
        ),
        ("todowrite", {"$schema": DRAFT, "type": "object", "properties": {}, "required": []}),
    )
]


def claude(messages, **more):
    """A body of Claude Code's."""
    return {
        "model": "demo",
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"s"}'},
        "max_tokens": 12,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }


def codex(items, **more):
    """A body of Codex's."""
    return {
        "model": "demo",
        "stream": True,
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a216ab-75ea-7ab1-9be4-4b4133b2e279",
        "client_metadata": {"thread_id": "01a216ab-75ea-7ab1-9be4-4b4133b2e279"},
        "max_output_tokens": 12,
        **more,
    }


def opencode(messages, **more):
    """A body of OpenCode's."""
    return {
        "model": "demo",
        "max_tokens": 12,
        "messages": messages,
        "tools": OPENCODE_TOOLS,
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def item(role, *texts):
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "id": "msg_0", "role": role, "content": parts}


def streamed(live, path, body, **headers):
    """The events of a streamed answer, which has none of an error."""
    with live.http.stream("POST", path, json=body, headers=headers) as response:
        text = "".join(response.iter_text())
    assert response.status_code == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not any("error" in (event.get("type") or "") for event in events)
    return events


def test_claude_code_completes_two_turns_and_the_second_reads_what_the_first_wrote(live):
    assert live.http.head("/").status_code == 200
    asked = [
        {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
        {"type": "text", "text": "Say hello.", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "user", "content": asked},
        {"role": "system", "content": "Available agent types: claude."},
    ]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    path = "/v1/messages?beta=true"
    first = streamed(live, path, claude(messages), **headers)
    text = "".join(e["delta"].get("text", "") for e in first if e["type"] == "content_block_delta")
    answer = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    more = {"role": "user", "content": [{"type": "text", "text": "And again."}]}
    second = streamed(live, path, claude([*messages, answer, more]), **headers)
    usage = second[-2]["usage"]
    assert second[-2]["type"] == "message_delta"
    assert not any("tool" in note for note in second[-2]["kvcellar"]["notes"])
    kinds = ("", "cache_read_", "cache_creation_")
    before = sum(first[-2]["usage"][f"{kind}input_tokens"] for kind in kinds)
    assert usage["cache_read_input_tokens"] >= before > 300


def test_codex_completes_two_turns_and_is_told_what_was_left_out(live):
    items = [item("developer", "You are an agent."), item("user", "<cwd>/</cwd>", "Say hello.")]
    first = streamed(live, "/v1/responses", codex(items))
    end = first[-1]["response"]
    assert [note.split()[1] for note in end["kvcellar"]["notes"]] == [
        "multi_agent_v1",
        "apply_patch",
        "web_search",
    ]
    (said,) = end["output"]
    text = said["content"][0]["text"]
    later = [
        item("assistant", text),
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        item("user", "And again."),
    ]
    second = streamed(live, "/v1/responses", codex([*items, *later]))[-1]["response"]
    usage = second["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= end["usage"]["input_tokens"] > 100


def test_opencode_completes_two_turns_beside_its_title(live):
    headers = {"x-session-affinity": "ses_de95", "x-session-id": "ses_de95"}
    path = "/v1/chat/completions"
    title = [
        {"role": "system", "content": "You are a title generator."},
        {"role": "user", "content": "Generate a title for this conversation:\n"},
        {"role": "user", "content": '"Say hello."'},
    ]
    streamed(live, path, opencode(title, tools=None, tool_choice=None), **headers)
    messages = [
        {"role": "system", "content": "You are an interactive tool."},
        {"role": "user", "content": "Say hello."},
    ]
    first = streamed(live, path, opencode(messages), **headers)
    parts = [e["choices"][0]["delta"].get("content") or "" for e in first if e["choices"]]
    answer = {"role": "assistant", "content": "".join(parts)}
    more = {"role": "user", "content": "And again."}
    second = streamed(live, path, opencode([*messages, answer, more]), **headers)
    usage = second[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first[-1]["usage"]["prompt_tokens"]


# Kinds of tools that are not run here -------------------------------------------------------------

F = {"name": "f", "description": "Do.", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {
    CHAT: {"type": "function", "function": F},
    RESPONSES: {"type": "function", **F},
    MESSAGES: {"name": "f", "description": "Do.", "input_schema": F["parameters"]},
}
OTHERS = [
    (CHAT, {"type": "custom", "custom": {"name": "patch", "description": "x"}}, "patch"),
    (CHAT, {"type": "web_search"}, "web_search"),
    (RESPONSES, CODEX_TOOLS[1], "multi_agent_v1"),
    (RESPONSES, {"type": "custom", "name": "patch", "format": {"type": "text"}}, "patch"),
    (RESPONSES, {"type": "web_search_preview", "search_context_size": "low"}, "web_search_preview"),
    (RESPONSES, {"type": "file_search", "vector_store_ids": ["v"]}, "file_search"),
    (RESPONSES, {"type": "mcp", "server_label": "s", "server_url": "https://x"}, "mcp"),
    (RESPONSES, {"type": "code_interpreter", "container": {"type": "auto"}}, "code_interpreter"),
    (RESPONSES, {"type": "local_shell"}, "local_shell"),
    (MESSAGES, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, "web_search"),
    (
        MESSAGES,
        {
            "type": "computer_20250124",
            "name": "computer",
            "display_width_px": 1024,
            "display_height_px": 768,
        },
        "computer",
    ),
    (MESSAGES, {"type": "bash_20250124", "name": "bash"}, "bash"),
    (MESSAGES, {"type": "mcp_toolset", "mcp_server_name": "s"}, "mcp_toolset"),
]


def body_of(path, said="Hi", **more):
    if path == RESPONSES:
        given = said if isinstance(said, list) else [item("user", said)]
        return {"input": given, "max_output_tokens": 4, "store": False, **more}
    given = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return {"messages": given, "max_tokens": 4, **more}


def forced(path, name, kind=None):
    if path == MESSAGES:
        return {"type": "tool", "name": name}
    if path == RESPONSES:
        return {"type": kind, **({"name": name} if name != kind else {})}
    return {"type": kind, **({kind: {"name": name}} if name != kind else {})}


@pytest.mark.parametrize(("path", "other", "name"), OTHERS)
def test_a_tool_that_is_not_run_here_is_left_out_and_named(live, path, other, name):
    plain = live.post(path, body_of(path, tools=[FUNCTION[path]]))
    answer = live.post(path, body_of(path, tools=[other, FUNCTION[path]]))
    (note,) = answer["kvcellar"]["notes"]
    assert name in note and other["type"] in note
    tokens = "prompt_tokens" if path == CHAT else "input_tokens"
    if path != MESSAGES:
        assert answer["usage"][tokens] == plain["usage"][tokens]
    alone = live.post(path, body_of(path, tools=[other]))
    assert alone["kvcellar"]["notes"] == [note]


@pytest.mark.parametrize(("path", "other", "name"), OTHERS)
def test_a_call_that_has_to_come_of_what_is_not_run_here_is_refused_by_name(
    live, path, other, name
):
    choice = forced(path, name, other["type"])
    body = body_of(path, tools=[other, FUNCTION[path]], tool_choice=choice)
    if path == RESPONSES and other["type"] == "namespace":
        choice["name"] = name
    response = live.http.post(path, json=body)
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]
    needed = {"type": "any"} if path == MESSAGES else "required"
    response = live.http.post(path, json=body_of(path, tools=[other], tool_choice=needed))
    assert response.status_code == 400 and name in response.json()["error"]["message"]
    calls = live.post(path, body_of(path, tools=[other, FUNCTION[path]], tool_choice=needed))
    assert calls["kvcellar"]["notes"]


def test_some_tools_may_be_allowed_of_all_that_are_told(live):
    g = {"name": "g", "parameters": F["parameters"]}
    names = [{"type": "function", "name": "g"}, {"type": "web_search"}]
    flat = {"type": "allowed_tools", "mode": "required", "tools": names}
    tools = [{"type": "function", **F}, {"type": "function", **g}, {"type": "web_search"}]
    body = body_of(RESPONSES, tools=tools, tool_choice=flat, max_output_tokens=60, temperature=0)
    (call,) = live.post(RESPONSES, body)["output"]
    assert call["type"] == "function_call" and call["name"] == "g"
    inside = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": inside}
    tools = [{"type": "function", "function": F}, {"type": "function", "function": g}]
    body = body_of(CHAT, tools=tools, tool_choice=choice, max_tokens=60, temperature=0)
    (call,) = live.post(CHAT, body)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "g"


@pytest.mark.parametrize(
    "said",
    [
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
        ],
        [
            {"type": "web_search_call", "id": "ws", "status": "completed",
             "action": {"type": "search", "query": "kv"}},
            {"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1}},
            {"type": "computer_call_output", "call_id": "c",
             "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}},
        ],
        [
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "c", "output": "a.py"},
            {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "t"}]},
            {"type": "mcp_call", "name": "t", "arguments": "{}", "output": "x", "error": None},
            {"type": "image_generation_call", "result": "data:image/png;base64,AAAA"},
            {"type": "a_kind_of_tomorrow", "content": {"deep": [1, None]}},
        ],
    ],
)  # fmt: skip
def test_what_other_tools_did_in_earlier_turns_is_told_as_text(live, said):
    items = [item("user", "Hi"), item("assistant", "So."), *said, item("user", "Go on")]
    answer = live.post(RESPONSES, body_of(RESPONSES, items, tools=CODEX_TOOLS, store=True))
    told = str(live.service.agents.directory.conversation(answer["id"]))
    for one in said:
        assert f"[{one['type']}" in told
    assert "base64" not in told


def test_what_anthropics_tools_did_in_earlier_turns_is_told_as_text(live):
    blocks = [
        {"type": "text", "text": "Let me look."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "kv"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "url": "u", "encrypted_content": "E"}],
        },
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
        },
        {"type": "mcp_tool_use", "id": "m", "name": "t", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [{"type": "text", "text": "Go on"}]},
    ]
    answer = live.post(MESSAGES, body_of(MESSAGES, messages))
    told = str(
        live.service.agents.directory.conversation(answer["kvcellar"]["agent_id"])[1]["content"]
    )
    assert told.startswith("Let me look.") and "kv" in told and "unavailable" in told
    for block in blocks[1:]:
        assert f"[{block['type']}" in told
    assert "encrypted" not in told
    counted = live.post(f"{MESSAGES}/count_tokens", {"messages": messages})
    usage = answer["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_calls_of_tools_that_take_text_are_told_as_text_in_chats(live):
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Done."},
    ]
    answer = live.post(CHAT, body_of(CHAT, messages))
    told = live.service.agents.directory.conversation(answer["kvcellar"]["agent_id"])
    assert told[1]["content"] == "[custom_tool_call patch: *** Begin]"
    assert told[2]["content"] == "[custom_tool_call_output patch: Done.]"


@pytest.mark.parametrize(
    "body", [{"name": "f"}, {"name": "f", "type": "custom"}, {"type": "custom"}]
)
def test_a_function_without_what_it_needs_is_refused_in_every_protocol(live, body):
    response = live.http.post(MESSAGES, json=body_of(MESSAGES, tools=[body]))
    assert response.status_code == 400 and "input_schema" in response.text
    for path in (CHAT, RESPONSES):
        response = live.http.post(path, json=body_of(path, tools=[{"type": "function"}]))
        assert response.status_code == 400 and "type function" in response.text


def test_notes_are_in_the_log_and_in_streams(live, caplog):
    tools = [OTHERS[9][1], FUNCTION[MESSAGES]]
    with caplog.at_level("INFO", "kvcellar.server"):
        events = streamed(live, MESSAGES, body_of(MESSAGES, tools=tools, stream=True))
        live.until(lambda: "web_search" in caplog.text, "the line of the log")
    assert "web_search" in events[-2]["kvcellar"]["notes"][0]


def test_head_is_answered_wherever_get_is_with_the_same_head_and_no_body(live):
    live.post("/v1/completions", {"prompt": [9], "max_tokens": 1})
    paths = [
        "/",
        "/viewer/main.js",
        "/health",
        "/ready",
        "/v1/models",
        "/v1/models/demo",
        "/v1/agents",
    ]
    paths += ["/v1/agents", "/metrics", "/v1/cache", "/openapi.json", "/v1/models/none", "/nowhere"]
    for path in paths:
        got, head = live.http.get(path), live.http.head(path)
        assert head.status_code == got.status_code and head.content == b"", path
        assert head.headers["content-type"] == got.headers["content-type"]
    head = live.http.head("/events")  # a stream that never ends by itself
    assert head.status_code == 200 and head.headers["content-type"].startswith("text/event-stream")
    assert live.http.head("/v1/messages").status_code == 405
    live.get("/health")


def test_an_answer_with_tools_and_a_schema_is_a_call_or_json(live):
    wanted = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "r", "schema": wanted}}
    body = body_of(CHAT, tools=[FUNCTION[CHAT]], response_format=response_format, max_tokens=80)
    message = live.post(CHAT, {**body, "temperature": 0})["choices"][0]["message"]
    if message.get("tool_calls"):
        assert message["tool_calls"][0]["function"]["name"] == "f"
    else:
        assert isinstance(json.loads(message["content"])["ok"], bool)
    required = {**body, "temperature": 0, "tool_choice": "required"}
    message = live.post(CHAT, required)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "f"


def test_a_required_call_comes_once(live):
    tools = [FUNCTION[CHAT]]
    body = body_of(CHAT, "Do it.", tools=tools, tool_choice="required", max_tokens=200)
    choice = live.post(CHAT, {**body, "temperature": 0})["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
