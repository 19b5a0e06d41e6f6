"""Tools, forms of answers, messages and thoughts from Python: what comes back is values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvcellar as kv
from kvcellar.cellar import Asking, Cellar, ToolCall
from kvcellar.errors import AgentError, ConfigError, GrammarError, PromptError
from kvcellar.hosting.loader import Hosting
from tests.server.scripted import scripted_host

pytestmark = pytest.mark.kernel
SHORT: Asking = {"temperature": 0.0, "max_tokens": 6}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


@contextmanager
def scripted(
    folder: Path, monkeypatch: Any, script: Callable[[int], str], **more: Any
) -> Iterator[Cellar]:
    """A cellar of a model that says in its n-th answer what the script has at n."""
    monkeypatch.setattr(Hosting, "open", lambda *_: scripted_host(script, **more))
    with kv.open("demo", store=folder) as cellar:
        yield cellar


@pytest.fixture(scope="module")
def cellar(tmp_path_factory):
    with kv.open("demo", store=tmp_path_factory.mktemp("store"), capacity=4096) as opened:
        yield opened


def test_calls_come_back_as_values_and_their_results_are_said_as_messages(tmp_path, monkeypatch):
    answers = ["Let me see.\n" + CALL, "22 degrees.", "Still 22."]
    with scripted(tmp_path, monkeypatch, lambda n: answers[n]) as cellar:
        agent = cellar.agent("asked", system="Be brief.")
        answer = agent.say("How warm is it?", tools=[WEATHER])
        (call,) = answer.calls
        assert (call.name, call.arguments) == ("weather", {"city": "Bern"}) and call.id
        assert (answer.text, answer.finish_reason) == ("Let me see.", "tool_calls")
        after = agent.say([call.result({"degrees": 22})])
        assert (after.text, after.calls, after.finish_reason) == ("22 degrees.", (), "stop")
        assert agent.why().miss is None
        assert agent.say("And now?").text == "Still 22."  # with the tools that it has
        said = agent.messages
        assert [m["role"] for m in said] == [
            *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
        ]
        assert json.loads(said[3]["content"]) == {"degrees": 22}
        assert said[2]["tool_calls"][0]["function"]["name"] == "weather"
        assert agent.system == "Be brief."


def test_a_model_whose_template_knows_no_tools_is_told_of_them_once(cellar):
    agent = cellar.agent("told", system="Be brief.")
    how: Asking = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0.0}
    for text in ("One.", "Two."):
        (call,) = agent.say(text, max_tokens=80, **how).calls
        assert call.name == "weather" and isinstance(call.arguments["city"], str)
    assert agent.why().miss is None and agent.system == "Be brief."
    assert cellar.agent("told", system="Be brief.").name == "told"
    assert [m["role"] for m in agent.messages][1:] == ["user", "assistant"] * 2
    free = agent.say("Three.", tools=[], **SHORT)
    assert not free.calls and agent.messages[0]["content"] == "Be brief."


def test_a_schema_is_what_the_answer_is_and_its_value_is_at_hand(cellar):
    in_words = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    for wanted in (POINT, in_words):
        answer = cellar.agent().say("A point.", response_format=wanted, temperature=0)
        assert answer.value == json.loads(answer.text)
        assert answer.value["x"] in (1, 2) and answer.value["y"] in ("a", "b")
    both = cellar.complete(
        ["A point: ", [{"role": "user", "content": "A point."}]], response_format=POINT
    )
    assert all(one.value.keys() == {"x", "y"} for one in both)
    cut = cellar.agent().say("A point.", response_format=POINT, max_tokens=2)
    with pytest.raises(AgentError, match="was cut after 2 tokens and is no whole JSON"):
        _ = cut.value


def test_what_a_model_thinks_is_apart_from_what_it_says(tmp_path, monkeypatch):
    answers = [THOUGHT + "Rain.", THOUGHT + CALL, THOUGHT + '{"x": 1, "y": "a"}']
    with scripted(tmp_path, monkeypatch, lambda n: answers[n]) as cellar:
        agent = cellar.agent("thinker")
        with agent.stream("The weather?") as stream:
            assert "".join(stream) == "Rain."
        assert (stream.answer.reasoning, stream.answer.text) == ("It may rain.", "Rain.")
        called = agent.say("Where?", tools=[WEATHER])
        assert called.reasoning == "It may rain." and called.calls[0].arguments["city"] == "Bern"
        assert agent.messages[1]["reasoning_content"] == "It may rain."
        (alone,) = cellar.complete([[{"role": "user", "content": "The weather?"}]])
        assert (alone.reasoning, alone.text) == ("It may rain.", "Rain.")


def test_messages_are_said_behind_the_history_whoever_sends_them(cellar):
    agent = cellar.agent("several")
    agent.say("One.", **SHORT)
    call = ToolCall("weather", {"city": "Bern"}, "c1")
    function = {"name": "weather", "arguments": json.dumps(call.arguments)}
    asked = {"id": "c1", "type": "function", "function": function}
    new = [
        {"role": "user", "content": "Two."},
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        call.result("warm"),
    ]
    answer = agent.say(new, **SHORT)
    assert answer.usage.cached_tokens > 0 and agent.why().miss is None
    roles = [m["role"] for m in agent.messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    agent.say({"role": "user", "content": "Three."}, **SHORT)
    begun = [{"role": "user", "content": "Four."}, {"role": "assistant", "content": "I "}]
    assert agent.say(begun, **SHORT).text and agent.messages[-1]["content"].startswith("I ")
    for wrong in ([], [3], 7):
        with pytest.raises(PromptError, match=r"no message to answer|a str, or messages"):
            agent.say(wrong)  # type: ignore[arg-type]


def test_branches_are_told_each_its_own_in_one_batch(cellar):
    trunk = cellar.agent("many")
    trunk.say("One.", **SHORT)
    branches = trunk.branch(3)
    own = ["Red.", [{"role": "user", "content": "Green."}], "Blue."]
    answers = branches.say(own, **SHORT)
    assert [one.messages[-2]["content"] for one in branches] == ["Red.", "Green.", "Blue."]
    assert all(answer.usage.cached_tokens > 0 for answer in answers)
    branches.say([{"role": "user", "content": "All."}], **SHORT)
    assert [one.messages[-2]["content"] for one in branches] == ["All."] * 3
    with pytest.raises(ConfigError, match="2 texts were given for 3 branches"):
        branches.say(["Red.", "Green."], **SHORT)


def test_what_an_answer_cannot_be_is_refused_and_nothing_is_said(cellar):
    agent = cellar.agent("refused")
    never = {"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}}
    for error, match, how in (
        (ConfigError, "tool_choice is 'other', and there are the tools weather", "other"),
        (ConfigError, "a tool is a mapping with name", [3]),
        (GrammarError, "response_format of properties.a.uniqueItems", never),
        (ConfigError, "response_format is a mapping", "json"),
    ):
        more: Any = {"response_format": how}
        if how == "other":
            more = {"tools": [WEATHER], "tool_choice": how}
        elif isinstance(how, list):
            more = {"tools": how}
        with pytest.raises(error, match=match):
            agent.say("Hello", **more)
    with pytest.raises(ConfigError, match="has no tools; give messages"):
        cellar.complete("Hello", tools=[WEATHER])
    assert not agent.messages


def test_the_twin_for_asyncio_takes_the_same(tmp_path):
    async def main() -> None:
        async with kv.open_async("demo", store=tmp_path, capacity=2048) as cellar:
            agent = await cellar.agent("one")
            said = await agent.say("A point.", response_format=POINT, temperature=0)
            assert said.value["x"] in (1, 2)
            called = await agent.say("?", tools=[WEATHER], tool_choice="weather", max_tokens=80)
            await agent.say(called.calls[0].result("warm"), tool_choice="none", max_tokens=4)
            branches = await agent.branch(2)
            await branches.say(["Red.", "Blue."], tool_choice="none", max_tokens=4)
            assert [one.messages[-2]["content"] for one in branches] == ["Red.", "Blue."]

    asyncio.run(main())


def test_what_open_gives_can_be_annotated_with_names_of_the_package():
    assert kv.Agent is kv.cellar.Agent and kv.Cellar is Cellar
    assert kv.AsyncAgent is kv.cellar.AsyncAgent and kv.AsyncCellar is kv.cellar.AsyncCellar
    with pytest.raises(AttributeError, match="no attribute 'Kellar'"):
        _ = kv.Kellar  # type: ignore[attr-defined]
