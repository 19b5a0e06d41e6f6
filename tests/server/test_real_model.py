"""A real model in 80 MB, held to a call and to a schema, through both makers' own clients."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from kvcellar.agents import open_host
from tests.real_models import SMOLLM2
from tests.server.live import PATIENCE_S, serving

ASK = "What is the weather in Paris? Use the tool."
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
DESCRIBE = "Describe a cat: its name, its age in years, and its colours."
CAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "colours": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    """The model, served from its GGUF file."""

    def load(path, progress):
        return open_host(path, capacity=2048, progress=progress)

    folder, path = tmp_path_factory.mktemp("smol"), str(SMOLLM2.found())
    with serving(folder, offered={"smol": path}, load=load) as live:
        yield live


@pytest.fixture(scope="module")
def of_openai(smol):
    return openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def of_anthropic(smol):
    return anthropic.Anthropic(base_url=smol.url, api_key="none", timeout=PATIENCE_S)


def is_weather(name, arguments):
    return (
        name == "weather"
        and set(arguments) == {"city", "unit"}
        and arguments["unit"] in ("celsius", "fahrenheit")
        and arguments["city"] == "Paris"
    )


def is_cat(text):
    cat = json.loads(text)
    return (
        set(cat) == set(CAT["required"])
        and cat["name"]
        and 0 <= cat["age"] <= 30
        and all(isinstance(colour, str) for colour in cat["colours"])
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_it_calls_the_tool_that_it_has_to_through_openais_client(of_openai, is_streamed):
    asked = {
        "model": "smol",
        "messages": [{"role": "user", "content": ASK}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 80,
    }
    if is_streamed:
        with of_openai.chat.completions.stream(**asked) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = of_openai.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls
    assert is_weather(call.function.name, json.loads(call.function.arguments))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_it_calls_the_tool_that_it_has_to_through_anthropics_client(of_anthropic, is_streamed):
    asked = {
        "model": "smol",
        "messages": [{"role": "user", "content": ASK}],
        "tools": [{"name": "weather", "description": "", "input_schema": WEATHER}],
        "tool_choice": {"type": "any"},
        "max_tokens": 80,
        "extra_body": {"temperature": 0},
    }
    if is_streamed:
        with of_anthropic.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = of_anthropic.messages.create(**asked)
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert is_weather(block.name, block.input)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_it_answers_a_schema_through_openais_client(of_openai, is_streamed):
    schema = {"name": "cat", "schema": CAT, "strict": True}
    asked = {
        "model": "smol",
        "messages": [{"role": "user", "content": DESCRIBE}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "temperature": 0,
        "max_tokens": 120,
    }
    if is_streamed:
        with of_openai.chat.completions.stream(**asked) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = of_openai.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "stop" and is_cat(choice.message.content)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_it_answers_a_schema_through_anthropics_client(of_anthropic, is_streamed):
    asked = {
        "model": "smol",
        "messages": [{"role": "user", "content": DESCRIBE}],
        "output_config": {"format": {"type": "json_schema", "schema": CAT}},
        "max_tokens": 120,
        "extra_body": {"temperature": 0},
    }
    if is_streamed:
        with of_anthropic.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = of_anthropic.messages.create(**asked)
    assert message.stop_reason == "end_turn" and is_cat(message.content[0].text)
