"""OpenAI's own client against the server."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.live import PATIENCE_S

HELLO = [{"role": "user", "content": "def add(a, b):"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def client(live):
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    ) as found:
        yield found


def ask(client, messages=HELLO, **more):
    more.setdefault("max_tokens", 12)
    more.setdefault("temperature", 0)
    if not {"tools", "response_format"} & more.keys():
        more["extra_body"] = {"ignore_eos": True, **more.get("extra_body", {})}
    return client.chat.completions.create(model="demo", messages=messages, **more)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="'other' is not served; there are: demo"):
        client.models.retrieve("other")


@pytest.mark.card(first=True)
def test_a_stream_says_what_the_whole_answer_says(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.card
def test_a_conversation_that_goes_on_is_not_computed_again(client):
    messages = [{"role": "user", "content": "import os. " * 20}]
    first = ask(client, messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Then?"},
    ]
    second = ask(client, messages)
    history = first.usage.prompt_tokens + first.usage.completion_tokens
    # All but an answer whose text is read in other tokens; the last sampled one was never computed.
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached <= history - 1
    miss = second.model_extra["kvcellar"]["miss"]
    assert (miss and miss["cause"]) == (None if cached == history - 1 else "retokenised")


@pytest.mark.card
def test_choices_share_the_prompt_and_differ_by_their_draws(client, live):
    before = live.engine()
    prompt = [{"role": "user", "content": "class Shared: " * 30}]
    answer = ask(client, prompt, n=3, temperature=1.5, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and [c.index for c in answer.choices] == [0, 1, 2]
    n = answer.usage.prompt_tokens
    computed = live.engine().computed_tokens - before.computed_tokens
    assert computed < n + 3 * 12 + 3, "the prompt was computed once"
    assert answer.usage.completion_tokens == 3 * 12
    again = ask(client, prompt, n=3, temperature=1.5, seed=5)
    assert [choice.message.content for choice in again.choices] == texts


@pytest.mark.card
def test_choices_stream_side_by_side(client):
    texts = {0: "", 1: ""}
    for chunk in ask(client, n=2, stream=True, temperature=1, seed=9):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    whole = ask(client, n=2, temperature=1, seed=9)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


@pytest.mark.card
def test_an_answer_ends_before_a_stop_text(client):
    text = ask(client, max_tokens=30).choices[0].message.content
    stop = text[6:9]
    cut = ask(client, max_tokens=30, stop=[stop, "never"])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.card
def test_log_probabilities_come_with_their_alternatives(client):
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5 and all(len(token.top_logprobs) == 3 for token in content)
    for token in content:
        assert token.logprob == max(other.logprob for other in token.top_logprobs) <= 0
        assert token.token == token.top_logprobs[0].token
    joined = "".join(token.token for token in content)
    assert joined.startswith(answer.choices[0].message.content)


class City(BaseModel):
    name: Literal["Oslo", "Rome", "Lima"]
    population: int = Field(ge=0, le=9)
    is_capital: bool


@pytest.mark.card
def test_an_answer_follows_a_schema(client):
    parsed = client.chat.completions.parse(
        model="demo", messages=HELLO, response_format=City, max_tokens=60, temperature=1.5, seed=3
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert parsed.choices[0].finish_reason == "stop"


@pytest.mark.card
def test_an_answer_is_an_object_where_that_is_asked_for(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
    answer = ask(client, response_format=schema, max_tokens=40)
    assert json.loads(answer.choices[0].message.content) == {"a": 1}
    with pytest.raises(openai.BadRequestError, match="no grammar can be made of response_format"):
        bad = {"name": "x", "schema": {"type": "frob"}}
        ask(client, response_format={"type": "json_schema", "json_schema": bad})


@pytest.mark.card
def test_a_forced_call_comes_with_arguments_of_its_schema(client):
    forced = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(client, tools=[TIME, WEATHER], tool_choice=forced, max_tokens=80)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and answer.choices[0].finish_reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2)
    assert answer.choices[0].message.content is None


@pytest.mark.card
def test_a_required_call_streams_in_pieces(client):
    pieces, name, call_id = [], None, None
    finish = None
    stream = ask(
        client,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        max_tokens=80,
    )
    for chunk in stream:
        (choice,) = chunk.choices
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or ():
            name, call_id = name or delta.function.name, call_id or delta.id
            pieces.append(delta.function.arguments)
    assert name == "get_weather" and call_id and finish == "tool_calls" and len(pieces) > 2
    assert set(json.loads("".join(pieces))) == {"city", "days"}


def test_a_call_and_its_result_stay_in_the_cache(client):
    messages = [{"role": "user", "content": "What is the weather in Oslo? " * 8}]
    more = {"tools": [TIME, WEATHER], "max_tokens": 80}
    first = ask(client, messages, tool_choice="required", parallel_tool_calls=False, **more)
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    call_id = message.tool_calls[0].id
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "Rain."})
    # Another client writes JSON another way; it is the same conversation.
    arguments = json.loads(message.tool_calls[0].function.arguments)
    spaced = json.dumps(dict(reversed(arguments.items())), indent=2)
    messages[1]["tool_calls"][0]["function"]["arguments"] = spaced
    second = ask(client, messages, tool_choice="none", **more)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    agents = [answer.model_extra["kvcellar"]["agent_id"] for answer in (first, second)]
    assert agents[0] == agents[1]


@pytest.mark.card
def test_tools_are_read_in_the_order_in_which_they_were_sent(client, live):
    for tools in ([WEATHER, TIME], [TIME, WEATHER]):
        answer = ask(client, [{"role": "user", "content": "Order?"}], tools=tools)
        agent = answer.model_extra["kvcellar"]["agent_id"]
        system = live.service.agents.directory.conversation(agent)[0]["content"]
        first, second = (system.index(tool["function"]["name"]) for tool in tools)
        assert first < second


@pytest.mark.card
def test_without_a_call_the_answer_is_text(client):
    answer = ask(client, tools=[WEATHER], tool_choice="auto")
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match="names 'nothing', which is no tool"):
        forced = {"type": "function", "function": {"name": "nothing"}}
        ask(client, tools=[WEATHER], tool_choice=forced)


@pytest.mark.card
def test_a_bias_bans_and_wins(client, live):
    first = ask(client, max_tokens=1, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
    host = live.host()
    banned, wanted = (host.tokenizer.encode(t.token)[0] for t in first.top_logprobs)
    other = ask(client, max_tokens=1, logit_bias={str(banned): -100})
    assert other.choices[0].message.content == host.tokenizer.decode([wanted])


@pytest.mark.card
def test_completions_continue_texts_and_tokens_alike(client, live):
    host = live.host()
    tokens = host.tokenizer.encode("import os\n")
    more = {"model": "demo", "max_tokens": 8, "temperature": 0}
    one = client.completions.create(prompt="import os\n", **more)
    two = client.completions.create(prompt=tokens, echo=True, logprobs=2, **more)
    assert two.choices[0].text == "import os\n" + one.choices[0].text
    assert len(two.choices[0].logprobs.tokens) == len(tokens) + 8
    assert two.usage.prompt_tokens_details.cached_tokens == 0, "a prompt is scored whole"
    three = client.completions.create(prompt=tokens, **more)
    assert three.choices[0].text == one.choices[0].text
    assert three.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1
    chunks = list(client.completions.create(prompt=["import os\n", "x ="], stream=True, **more))
    text = "".join(c.choices[0].text for c in chunks if c.choices and not c.choices[0].index)
    assert text == one.choices[0].text
    assert {c.choices[0].index for c in chunks} == {0, 1}
    drawn = client.completions.create(prompt="x", n=2, **{**more, "temperature": 2}, seed=1)
    assert drawn.choices[0].text != drawn.choices[1].text


@pytest.mark.card
def test_the_asynchronous_client_streams_many_at_once(live):
    async def one(client, i):
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"Number {i}."}],
            max_tokens=6,
            stream=True,
        )
        return [chunk async for chunk in stream]

    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(8)))

    for chunks in asyncio.run(all_of_them()):
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")


@pytest.mark.card
def test_a_named_agent_takes_the_turn_and_is_there_afterwards(client, live):
    more = {"extra_body": {"agent_id": "named-by-body"}}
    create = {"X-Agent-Create": "true"}
    answer = ask(client, extra_headers=create, **more)
    assert answer.model_extra["kvcellar"]["agent_id"] == "named-by-body"
    ask(client, extra_headers={"X-Agent-Id": "named-by-header", **create})
    ids = {agent["id"] for agent in live.get("/v1/agents")["data"]}
    assert {"named-by-body", "named-by-header"} <= ids
    with pytest.raises(openai.BadRequestError, match="names two agents"):
        ask(client, extra_headers={"X-Agent-Id": "other"}, **more)
    with pytest.raises(openai.BadRequestError, match="cannot name an agent"):
        ask(client, extra_headers=create, extra_body={"agent_id": "../../etc/passwd"})


def test_a_prompt_beyond_the_context_is_refused_with_numbers(client):
    with pytest.raises(
        openai.BadRequestError, match="maximum context length is 4096 tokens"
    ) as caught:
        ask(client, [{"role": "user", "content": "word " * 6000}])
    assert caught.value.code == "context_length_exceeded"


def test_what_cannot_be_sent_is_said(client):
    with pytest.raises(openai.BadRequestError, match="part of type 'smell'"):
        part = {"type": "smell", "smell": {"url": "data:"}}
        ask(client, [{"role": "user", "content": [part]}])
    with pytest.raises(openai.BadRequestError, match="messages: List should have at least 1 item"):
        ask(client, [])
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be greater"):
        ask(client, temperature=-1)


def test_curl_sees_a_stream_of_events(live):
    # "temperature" 0: what chance says may be the end of the text at once
    settings = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"stream": True, "messages": HELLO, **settings})
    done = subprocess.run(
        ["curl", "-sN", f"{live.url}/v1/chat/completions", "--json", body],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    lines = [line for line in done.stdout.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]" and len(lines) >= 6
