"""Thoughts and calls on the agents' own routes: apart from the text, whoever asked and however."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvcellar.agents import Turn
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.text.live_text import AnswerPieces, Begun, LiveText
from kvcellar.agents.text.reading import Reading
from kvcellar.dialects import DIALECTS, CallPart, ReasoningPart, TextPart, choose_dialect
from kvcellar.dialects.messages import apart, say_tools
from kvcellar.engine import SamplingParams
from tests.dialects.corpus import FORMATS, TOOLS, outputs, with_tokens
from tests.server.live import Live, serving
from tests.server.scripted import QWEN, scripted_host
from tests.server.test_reasoning import TOOL
from tests.store.fakes import make_key

THOUGHT = "<think>\nThe file has it.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
SCRIPT = [f"{THOUGHT}I look.\n{CALL}", f"{THOUGHT}It says 1."]
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that knows no tools, no calls and no thoughts."""

OPENED = QWEN.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
"""A template whose prompts open a thought."""


def scripted(folder: Any, **how: Any) -> Any:
    return serving(folder, load=lambda *_: scripted_host(lambda n: SCRIPT[n % 2], **how))


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("apart")) as server:
        yield server


def make(live: Live, name: str) -> None:
    live.post("/v1/agents", {"id": name, "tools": [TOOL]})


def streamed(live: Live, name: str, body: Any) -> list[tuple[str, Any]]:
    path = f"/v1/agents/{name}/generate"
    with live.http.stream("POST", path, json={**body, "stream": True}) as response:
        return told(response.iter_lines())


def told(lines: Any) -> list[tuple[str, Any]]:
    found, name = [], ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            found.append((name, json.loads(line[6:])))
            if name == "end":
                break
    return found


def joined(pieces: list[Any]) -> dict[str, Any]:
    """What a client makes of the pieces of an answer."""
    calls: dict[int, Any] = {}
    for piece in pieces:
        for one in piece.get("tool_calls", ()):
            call = calls.setdefault(one["index"], {"function": {"arguments": ""}})
            call["function"]["arguments"] += one["function"].get("arguments", "")
            call["function"].setdefault("name", one["function"].get("name"))
            call.update({key: one[key] for key in ("id", "type") if key in one})
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "reasoning_content": "".join(piece.get("reasoning_content", "") for piece in pieces),
        "tool_calls": [calls[i] for i in sorted(calls)],
    }


def plain(calls: Any) -> list[Any]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


READ = [("read", {"path": "a.py"})]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_of_an_agents_own_route_has_thoughts_and_calls_apart(live, is_streamed):
    name = f"asked-{is_streamed}"
    make(live, name)
    body = {"text": "What does it say?"}
    if is_streamed:
        *pieces, (kind, end) = streamed(live, name, body)
        assert kind == "end" and {kind for kind, _ in pieces} == {"token"}
        made = joined([piece for _, piece in pieces])
        assert made == {key: end[key] for key in made}
        assert all("<" not in piece["text"] for _, piece in pieces)
    else:
        end = live.post(f"/v1/agents/{name}/generate", body)
    assert (end["text"], end["reasoning_content"]) == ("I look.", "The file has it.")
    assert plain(end["tool_calls"]) == READ and end["finish_reason"] == "tool_calls"
    more = live.post(f"/v1/agents/{name}/generate", {"text": "x = 1", "role": "tool"})
    assert (more["text"], more["finish_reason"]) == ("It says 1.", "stop")
    assert "tool_calls" not in more and more["usage"]["miss"] is None
    shown = live.get(f"/v1/agents/{name}")["messages"]
    assert [message["role"] for message in shown] == ["user", "assistant", "tool", "assistant"]
    assert shown[1]["reasoning_content"] == "The file has it." and shown[1]["content"] == "I look."
    assert plain(shown[1]["tool_calls"]) == READ
    assert shown[3]["content"] == "It says 1."


@pytest.mark.parametrize("template", [QWEN, PLAIN])
@pytest.mark.parametrize("by", ["raw", "chat", "agents"])
def test_messages_are_apart_whoever_asked_for_them_and_whatever_the_template_knows(
    tmp_path, by, template
):
    with scripted(tmp_path, template=template) as live:
        user = {"role": "user", "content": "What does it say?"}
        if by == "raw":  # as the command line and Python take turns
            make(live, "one")
            turn = Turn("one", user["content"], params=SamplingParams(max_tokens=200))

            async def take() -> None:
                async for _ in live.service.agents.turns.generate(turn):
                    pass

            live.run(take())
            said = live.service.agents.directory.conversation("one")[-1]["content"]
            assert "<tool_call>" in said and "<think>" in said
        elif by == "chat":
            body = {"messages": [user], "tools": [TOOL]}
            head = {"X-Agent-Id": "one", "X-Agent-Create": "true"}
            live.post("/v1/chat/completions", body, headers=head)
        else:
            make(live, "one")
            live.post("/v1/agents/one/generate", {"text": user["content"]})
        asked, said = live.get("/v1/agents/one")["messages"]
        assert asked == user
        assert (said["content"], said["reasoning_content"]) == ("I look.", "The file has it.")
        assert plain(said["tool_calls"]) == READ
        again = live.get("/v1/agents/one")["messages"]
        assert again[1] == said, "ids of calls stay"
        (found,) = live.get("/v1/agents?search=look")["data"]
        assert found["found"][0]["text"] == "look"
        assert not live.get("/v1/agents?search=tool_call")["data"]


def test_an_agent_without_tools_says_what_looks_like_a_call_as_in_chat(live):
    live.post("/v1/agents", {"id": "toolless"})
    end = live.post("/v1/agents/toolless/generate", {"text": "Hello?"})
    assert end["text"] == f"I look.\n{CALL}" and "tool_calls" not in end
    assert live.get("/v1/agents/toolless")["messages"][-1]["content"] == end["text"]


@pytest.mark.parametrize("n_tokens", [6, 60])
@pytest.mark.parametrize("template", [QWEN, PLAIN, OPENED])
def test_an_answer_that_was_cut_in_a_thought_or_a_call_is_gone_on_with(
    tmp_path, template, n_tokens
):
    with scripted(tmp_path, template=template) as live:
        make(live, "whole")
        make(live, "cut")
        whole = live.post("/v1/agents/whole/generate", {"text": "Well?"})
        assert whole["reasoning_content"] == "The file has it."
        first = live.post("/v1/agents/cut/generate", {"text": "Well?", "max_tokens": n_tokens})
        assert first["finish_reason"] == "length"
        shown = live.get("/v1/agents/cut")["messages"][-1]
        assert "<think>" not in (shown["content"] or "") and shown["reasoning_content"]
        *pieces, (_, last) = streamed(live, "cut", {"go_on": True})
        assert joined([piece for _, piece in pieces])["tool_calls"] == last["tool_calls"]
        assert plain(last["tool_calls"]) == READ
        assert last["usage"]["cached_tokens"] >= last["usage"]["prompt_tokens"] - 2
        both, alone = (live.get(f"/v1/agents/{one}") for one in ("cut", "whole"))
        for one in (both, alone):
            for call in one["messages"][-1]["tool_calls"]:
                del call["id"]
        assert both["messages"] == alone["messages"]
        assert both["n_tokens"] == alone["n_tokens"]


def test_whoever_comes_late_is_told_the_parts_of_the_answer_so_far():
    reading = Reading(choose_dialect(QWEN), True, True, [TOOL], reads_calls=True)

    async def look() -> list[Any]:
        text, agent = LiveText(), AgentRecord("late", "scripted", make_key())
        with text.turn(agent, "Q?", reading):
            text.say("late", f"{THOUGHT}I lo")
            text.say("late", f"ok.\n{CALL[:50]}")
            listener = text.listen("late")
            events = [await anext(listener)]
            text.say("late", CALL[50:])
            events.append(await anext(listener))
        events.append(await anext(listener))
        await listener.aclose()
        return events

    begun, more, _ = asyncio.run(look())
    assert isinstance(begun, Begun) and isinstance(more, AnswerPieces)
    thought, said, opened, arguments = begun.parts
    assert thought == ReasoningPart("The file has it.") and said == TextPart("I look.")
    assert isinstance(opened, CallPart) and isinstance(arguments, CallPart)
    assert opened.call.name == "read" and opened.text == ""
    whole = arguments.text + "".join(part.text for part in more.parts)
    assert json.loads(whole) == {"path": "a.py"}


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_history_has_as_text_is_split_in_every_dialect(name):
    dialect = DIALECTS[name]
    for output in outputs():
        if output.dialect != name or output.is_broken or output.forges or not output.calls:
            continue
        talk = [
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": output.plain()},
        ]
        for messages, tools in ((talk, TOOLS), (say_tools(talk, TOOLS, dialect), None)):
            *_, said = apart(messages, dialect, tools)
            assert plain(said["tool_calls"]) == output.calls, output
            assert said.get("reasoning_content", "") == with_tokens(output.reasoning, {})
