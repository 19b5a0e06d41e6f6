"""Requests of the shapes that agents send, to models whose chat templates are strict.

The shapes are those of Claude Code, Codex, OpenCode, Cline, Continue, Aider, Open WebUI, LangChain
and LlamaIndex; the texts are ours.
"""

from __future__ import annotations

import json

import pytest

from kvcellar.agents import open_host
from tests.models.strict_templates import TEMPLATES
from tests.server.live import serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
STRICT = ("mistral", "gemma", "llama", "qwen")
SHORT = {"max_tokens": 4, "temperature": 0}
PICTURE = "data:image/png;base64,AAAA"


@pytest.fixture(scope="module", params=STRICT)
def strict(request, tmp_path_factory):
    """A server whose model has a strict template."""

    def load(path, progress):
        template = TEMPLATES[request.param]
        return open_host(
            path, capacity=4096, dtype="float32", chat_template=template, progress=progress
        )

    with serving(tmp_path_factory.mktemp("strict"), load=load) as live:
        yield live


def function(name):
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"name": name, "description": f"The tool {name}.", "parameters": parameters}


def chat_call(number, name="read"):
    arguments = json.dumps({"path": f"file{number}"})
    return {
        "id": f"call_{number:024d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def chat_result(number, text):
    return {"role": "tool", "tool_call_id": f"call_{number:024d}", "content": text}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


OPENCODE = [
    [
        {"role": "system", "content": "You are an agent."},
        {"role": "system", "content": "The folder is /src."},
        {"role": "user", "content": parts("Fix the test.")},
    ],
    [
        {"role": "assistant", "content": "", "tool_calls": [chat_call(1), chat_call(2)]},
        chat_result(1, "first file"),
        chat_result(2, "second file"),
    ],
    [
        {"role": "assistant", "content": "I see.", "tool_calls": [chat_call(3)]},
        chat_result(3, "third file"),
        {"role": "user", "content": "No, stop."},
    ],
]
AIDER = [
    [
        {"role": "system", "content": "Act as an expert."},
        {"role": "user", "content": "I switched to a new code base."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "These are the files."},
        {"role": "user", "content": "Fix the test."},
    ],
    [{"role": "assistant", "content": "Done."}, {"role": "system", "content": "Be brief."}],
    [{"role": "user", "content": "Thanks."}, {"role": "user", "content": "Go on."}],
]
WEBUI = [
    [
        {"role": "assistant", "content": "Welcome!"},
        {
            "role": "user",
            "content": [
                *parts("What is this?"),
                {"type": "image_url", "image_url": {"url": PICTURE}},
            ],
        },
    ],
    [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}],
]


@pytest.mark.parametrize("rounds", [OPENCODE, AIDER, WEBUI], ids=["opencode", "aider", "webui"])
def test_a_chat_goes_on_turn_by_turn_with_what_came_before_in_the_cache(strict, rounds):
    tools = [{"type": "function", "function": function("read")}] if rounds is OPENCODE else None
    messages, n_before = [], 0
    for one in rounds:
        messages += one
        answer = strict.post(CHAT, {"messages": messages, "tools": tools, **SHORT})
        usage = answer["usage"]
        # an opening such as `<think>` is not there any more in the next turn
        assert usage["prompt_tokens_details"]["cached_tokens"] >= n_before - 24, answer
        n_before = usage["prompt_tokens"]


CLAUDE_TOOLS = [
    {
        "name": "Read",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
]


def claude_rounds():
    def use(number):
        return {
            "type": "tool_use",
            "id": f"toolu_{number:020d}",
            "name": "Read",
            "input": {"path": "a"},
        }

    def result(number, content):
        return {"type": "tool_result", "tool_use_id": f"toolu_{number:020d}", "content": content}

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "AA"}, "title": "paper.pdf"}
    text = {"type": "document", "source": {"type": "text", "data": "the notes"}}
    reminder = {"type": "text", "text": "<reminder>Be careful.</reminder>"}
    return [
        [
            {
                "role": "user",
                "content": [reminder, {"type": "text", "text": "Look at it."}, pdf, text],
            }
        ],
        [
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use(1), use(2)]},
            {"role": "user", "content": [result(1, [image]), result(2, "lines"), reminder]},
            {"role": "system", "content": "The user is away."},
        ],
        [
            {"role": "assistant", "content": [use(3)]},
            {"role": "user", "content": [result(3, [{"type": "text", "text": "more"}])]},
        ],
    ]


def test_claude_code_goes_on_turn_by_turn_with_what_came_before_in_the_cache(strict):
    messages, n_before = [], 0
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief."}]
    for one in claude_rounds():
        messages += one
        body = {"system": system, "messages": messages, "tools": CLAUDE_TOOLS}
        answer = strict.post(MESSAGES, {**body, **SHORT})
        counted = strict.post(f"{MESSAGES}/count_tokens", body)["input_tokens"]
        usage = answer["usage"]
        n_cached = usage["cache_read_input_tokens"]
        assert n_cached >= n_before - 24, answer
        n_before = usage["input_tokens"] + n_cached
        assert counted == n_before
    notes = " ".join(answer["kvcellar"]["notes"])
    assert "1 image in the messages left out" in notes and "1 file" in notes


def item(role, *content):
    given = ({"type": "input_text", "text": c} if isinstance(c, str) else c for c in content)
    return {"type": "message", "role": role, "content": list(given)}


CODEX = [
    [item("developer", "Rules."), item("user", "Context."), item("user", "Fix it.")],
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** x"},
        {"type": "function_call_output", "call_id": "call_1", "output": "lines"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
    ],
    [
        item("developer", "Now."),
        item("user", "See.", {"type": "input_image", "image_url": PICTURE}),
    ],
]


def test_codex_goes_on_turn_by_turn_with_what_came_before_in_the_cache(strict):
    items, n_before = [], 0
    tools = [
        {"type": "function", **function("read")},
        {"type": "custom", "name": "apply_patch"},
        {"type": "web_search"},
    ]
    for one in CODEX:
        items += one
        body = {"instructions": "You are Codex.", "input": items, "tools": tools, "store": False}
        usage = strict.post(RESPONSES, {**body, "max_output_tokens": 4, "temperature": 0})["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= n_before - 24
        n_before = usage["input_tokens"]


def test_an_item_that_is_named_is_the_one_that_was_answered(live):
    user = {"role": "user", "content": "Say something."}
    body = {"input": [user], "max_output_tokens": 6, "temperature": 0}
    first = live.post(RESPONSES, body)
    named = {"type": "item_reference", "id": first["output"][0]["id"]}
    after = {"role": "user", "content": "And?"}
    whole = live.post(RESPONSES, {**body, "input": [user, first["output"][0], after]})
    again = live.post(RESPONSES, {**body, "input": [user, named, after]})
    assert again["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert again["output"][0]["content"] == whole["output"][0]["content"]
    listed = live.get(f"{RESPONSES}/{again['id']}/input_items?order=asc")["data"]
    assert [item["type"] for item in listed] == ["message"] * 3
    for missing in ("msg_x", named["id"].replace("msg_", "rs_"), ""):
        items = [user, {"type": "item_reference", "id": missing}, after]
        refused = live.http.post(RESPONSES, json={**body, "input": items})
        assert refused.status_code == 404 and "send the item itself" in refused.text


def test_a_call_that_is_named_is_the_one_that_was_made(live):
    user = {"role": "user", "content": "Read."}
    tools = [{"type": "function", **function("read")}]
    more = {"tools": tools, "tool_choice": "required", "max_output_tokens": 60, "temperature": 0}
    (call,) = live.post(RESPONSES, {"input": [user], **more})["output"]
    items = [
        user,
        {"type": "item_reference", "id": call["id"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "lines"},
    ]
    answer = live.post(RESPONSES, {"input": items, "tools": tools, "max_output_tokens": 2})
    known = live.service.agents.directory.conversation(answer["kvcellar"]["agent_id"])
    assert "read" in json.dumps(known[-3]) and known[-2]["content"] == "lines"


# Media --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "field", "part", "line"),
    [
        (CHAT, "messages", {"type": "image_url", "image_url": {"url": PICTURE}}, "[image: "),
        (CHAT, "messages", {"type": "input_audio", "input_audio": {}}, "[sound: "),
        (CHAT, "messages", {"type": "file", "file": {"filename": "a.pdf"}}, "[file a.pdf: "),
        (RESPONSES, "input", {"type": "input_image", "image_url": PICTURE}, "[image: "),
        (RESPONSES, "input", {"type": "input_file", "filename": "b.pdf"}, "[file b.pdf: "),
        (MESSAGES, "messages", {"type": "image", "source": {"type": "url"}}, "[image: "),
        (MESSAGES, "messages", {"type": "document", "source": {}, "title": "c"}, "[file c: "),
    ],
)
def test_what_is_no_text_is_a_line_that_says_so(live, path, field, part, line):
    kind = {CHAT: "text", RESPONSES: "input_text", MESSAGES: "text"}[path]
    content = [{"type": kind, "text": "Look:"}, {**part, "text": "seen?"}]
    body = {field: [{"role": "user", "content": content}], "temperature": 0}
    body |= {"max_output_tokens": 2} if path == RESPONSES else {"max_tokens": 2}
    body |= {"store": False} if path == RESPONSES else {}
    answer = live.post(path, body)
    (agent,) = (answer["kvcellar"]["agent_id"],)
    said = live.service.agents.directory.conversation(agent)[0]["content"]
    assert said.startswith(f"Look:\n{line}left out") and said.endswith("]\nseen?")
    assert "left out: this model reads text alone" in answer["kvcellar"]["notes"][0]


def test_a_part_of_a_type_that_nobody_knows_is_refused(live):
    said = {"role": "user", "content": [{"type": "smell", "text": "x"}]}
    response = live.http.post(CHAT, json={"messages": [said]})
    assert response.status_code == 400 and "type 'smell'" in response.text


def test_a_call_of_the_older_kind_is_a_call(live):
    messages = [
        {"role": "user", "content": "Read."},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "read", "arguments": "{}"},
        },
        {"role": "function", "name": "read", "content": "lines"},
    ]
    answer = live.post(CHAT, {"messages": messages, **SHORT})
    known = live.service.agents.directory.conversation(answer["kvcellar"]["agent_id"])
    assert "read" in json.dumps(known[1]) and known[2]["role"] == "tool"


# Answers that are gone on with --------------------------------------------------------------------


def begun_chat(live, text, **more):
    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}]
    answer = live.post(CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0, **more})
    return answer["choices"][0]["message"]["content"], answer


@pytest.mark.parametrize(
    "more", [{}, {"continue_final_message": True, "add_generation_prompt": False}]
)
def test_an_answer_at_the_end_is_gone_on_with_and_comes_back_as_one(live, more):
    text, answer = begun_chat(live, "import os", **more)
    raw = live.post(
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "Say it."},
                {"role": "assistant", "content": [{"type": "text", "text": "import os"}]},
            ],
            "max_tokens": 8,
            "temperature": 0,
        },
    )
    assert raw["content"][0]["text"] == text and not text.startswith("import os")
    counted = live.post(
        f"{MESSAGES}/count_tokens",
        {
            "messages": [
                {"role": "user", "content": "Say it."},
                {"role": "assistant", "content": "import os"},
            ]
        },
    )
    usage = answer["usage"]
    assert counted["input_tokens"] == usage["prompt_tokens"]
    messages = [
        {"role": "user", "content": "Say it."},
        {"role": "assistant", "content": f"import os{text}"},
        {"role": "user", "content": "And?"},
    ]
    after = live.post(CHAT, {"messages": messages, **SHORT})
    assert after["kvcellar"]["agent_id"] in (
        answer["kvcellar"]["agent_id"],
        raw["kvcellar"]["agent_id"],
    )
    cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] - 1


def test_what_goes_on_is_what_would_have_come(live):
    messages = [{"role": "user", "content": "Write code."}]
    body = {"max_tokens": 12, "temperature": 0, "logprobs": True}
    whole = live.post(CHAT, {"messages": messages, **body})["choices"][0]
    tokens = [token["token"] for token in whole["logprobs"]["content"]]
    begun = "".join(tokens[:5])
    said = [*messages, {"role": "assistant", "content": begun}]
    rest = live.post(CHAT, {"messages": said, "max_tokens": 7, "temperature": 0})
    assert begun + rest["choices"][0]["message"]["content"] == whole["message"]["content"]
    streamed = live.http.post(CHAT, json={"messages": said, **SHORT, "stream": True}).text
    assert begun not in streamed.replace("\\n", "\n")


def test_what_cannot_be_gone_on_with_is_refused(live):
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    calling = {"role": "assistant", "content": "", "tool_calls": [chat_call(1)]}
    for messages, more, said in (
        ([user], {"continue_final_message": True}, "is no answer"),
        ([user], {"add_generation_prompt": False}, "is no answer"),
        ([user, answer], {"continue_final_message": False}, "is an answer"),
        ([user, calling], {"continue_final_message": True}, "is no answer"),
        ([user, calling], {}, "needs a message to answer"),
        ([answer], {}, "needs a message to answer"),
        (
            [user, answer],
            {"continue_final_message": True, "add_generation_prompt": True},
            "both true",
        ),
        ([user, answer], {"guided_regex": "a+"}, "guided_regex holds an answer"),
    ):
        response = live.http.post(CHAT, json={"messages": messages, **more})
        assert response.status_code == 400 and said in response.text, response.text


def test_a_named_agent_goes_on_with_a_new_message_and_a_begun_answer(live):
    headers = {"x-agent-id": "beginner", "x-agent-create": "true"}
    first = {"messages": [{"role": "user", "content": "One"}], **SHORT}
    live.post(CHAT, first, headers=headers)
    new = [{"role": "user", "content": "Two"}, {"role": "assistant", "content": "Well"}]
    answer = live.post(CHAT, {"messages": new, **SHORT}, headers=headers)
    assert answer["kvcellar"]["agent_id"] == "beginner"
    known = live.service.agents.directory.conversation("beginner")
    text = answer["choices"][0]["message"]["content"]
    assert [m["content"] for m in known][2:] == ["Two", f"Well{text}"]
    live.http.delete("/v1/agents/beginner")
