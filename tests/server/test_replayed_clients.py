"""A round of tools as clients send it back, in their shapes: what is odd in it is served around.

The shapes were recorded from Claude Code 2.1.332, Codex 0.171.0, OpenCode 1.18.33, Pi 0.73.1 and
Continue 1.5.47 by `make clients`; the texts are ours.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.test_clients import CHAT, MESSAGES, RESPONSES, claude, codex, opencode, streamed

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj"


def by_claude(call_id: str, name: str, given: dict[str, Any], **result: Any) -> list[Any]:
    """A call with the thought before it, which another provider signed, and its result."""
    thought = {"type": "thinking", "thinking": "", "signature": "EqQBCkgIBBABGAIi"}
    call = {"type": "tool_use", "id": call_id, "name": name, "input": given}
    said = {"type": "tool_result", "tool_use_id": call_id, **result}
    return [
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [said]},
    ]


CLAUDE = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>\nSign commits.\n</system-reminder>\n"},
            {"type": "text", "text": "Try all of it."},
        ],
    },
    {"role": "system", "content": "# Environment\n - Platform: linux"},
    *by_claude(
        "a",
        "ToolSearch",
        {"query": "select:WebFetch", "max_results": 5},
        content=[{"type": "tool_reference", "tool_name": "WebFetch"}],
    ),
    *by_claude(
        "b",
        "Read",
        {"file_path": "/p/a.png"},
        content=[
            {
                "type": "image",
                "source": {"type": "base64", "data": PICTURE, "media_type": "image/png"},
            }
        ],
    ),
    *by_claude("c", "Bash", {"command": "exit 3"}, content="Exit code 3", is_error=True),
    {"role": "system", "content": "[SYSTEM NOTIFICATION - NOT USER INPUT]\nA helper has ended."},
    *by_claude("d", "Read", {"file_path": "/p/b.py"}, content=[{"type": "text", "text": "1\tx"}]),
]


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"{kind}_1", **fields}


def by_codex(call_id: str, name: str, given: str, output: Any) -> list[Any]:
    content = [{"type": "reasoning_text", "text": "I try that."}]
    return [
        item("reasoning", summary=[], content=content, encrypted_content="gAAAAABm"),
        item("function_call", status="completed", name=name, arguments=given, call_id=call_id),
        item("function_call_output", call_id=call_id, output=output),
    ]


CODEX = [
    item(
        "message",
        role="developer",
        content=[
            {"type": "input_text", "text": "<skills_instructions>\nNone.\n"},
            {"type": "input_text", "text": "<permissions instructions>\nAll.\n"},
        ],
    ),
    item("message", role="user", content=[{"type": "input_text", "text": "<cwd>/p</cwd>"}]),
    item("message", role="user", content=[{"type": "input_text", "text": "Try all of it."}]),
    *by_codex(
        "a",
        "view_image",
        '{"path": "/p/a.png"}',
        [
            {
                "type": "input_image",
                "image_url": f"data:image/png;base64,{PICTURE}",
                "detail": "high",
            }
        ],
    ),
    *by_codex("b", "exec_command", '{"cmd": "exit 3"}', "Process exited with code 3"),
    item(
        "message",
        role="assistant",
        status="completed",
        content=[{"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}],
    ),
    item("message", role="user", content=[{"type": "input_text", "text": "Go on."}]),
]


def by_chat(call_id: str, name: str, given: str, result: str, **more: Any) -> list[Any]:
    function = {"name": name, "arguments": given}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return [
        {"role": "assistant", "tool_calls": calls, **more},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


OPENCODE = [
    {"role": "system", "content": "You are an interactive tool."},
    {"role": "user", "content": '"Try all of it."'},
    *by_chat(
        "a",
        "read",
        '{"filePath":"/p/a.png"}',
        "Image read successfully",
        content="",
        reasoning_content="I try that.",
    ),
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Attached media from tool result:"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
        ],
    },
    *by_chat("b", "bash", '{"command":"exit 3"}', "(no output)", content=""),
]
PI = [
    {"role": "developer", "content": "You are an expert."},
    {"role": "user", "content": [{"type": "text", "text": "Try all of it."}]},
    *by_chat(
        "a", "read", '{"path":"b.py"}', "x = 1", content=None, reasoning_content="I try that."
    ),
    *by_chat("b", "bash", '{"command":"exit 3"}', "", content=None),
]


def pi(messages: list[Any]) -> dict[str, Any]:
    tokens = {"max_tokens": None, "max_completion_tokens": 12}
    return opencode(messages, tool_choice=None, store=False, reasoning_effort="medium", **tokens)


SESSIONS = {
    "claude-code": (MESSAGES, CLAUDE, claude),
    "codex": (RESPONSES, CODEX, codex),
    "opencode": (CHAT, OPENCODE, opencode),
    "pi": (CHAT, PI, pi),
}


def usage_of(path: str, events: list[Any]) -> tuple[int, int]:
    """Tokens of a prompt, and those of them that came from the cache."""
    if path == CHAT:
        usage = events[-1]["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if path == RESPONSES:
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    usage = events[-2]["usage"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached


@pytest.mark.parametrize("client", SESSIONS)
def test_a_round_of_tools_is_answered_step_by_step_from_the_cache(live, client):
    path, messages, body_of = SESSIONS[client]
    results = [
        n
        for n, message in enumerate(messages, 1)
        if message.get("role") in ("user", "tool") or message.get("type") == "function_call_output"
    ]
    before = 0
    for n in results:
        if n < len(messages) and messages[n].get("role") in ("user", "system"):
            continue  # they come together
        n_prompt, cached = usage_of(path, streamed(live, path, body_of(messages[:n])))
        assert cached >= before - 16, f"of {before} tokens {cached} were there"  # the opening
        before = n_prompt
    assert before > 100
