"""LangChain's OpenAI client against the server."""

from __future__ import annotations

import warnings
from typing import Literal

import pytest
from pydantic import BaseModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

from tests.server.live import PATIENCE_S


@tool
def look_up(where: Literal["map", "book"]) -> str:
    """Look something up."""
    return f"{where}: nothing"


class Choice(BaseModel):
    """A choice."""

    colour: Literal["red", "blue"]


@pytest.fixture
def model(live):
    return ChatOpenAI(
        model="demo",
        base_url=f"{live.url}/v1",
        api_key="none",
        max_tokens=80,
        temperature=0,
        timeout=PATIENCE_S,
        max_retries=0,
    )


def test_messages_stream_with_their_usage(model):
    chunks = list(model.stream([HumanMessage("import os")], stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == model.invoke([HumanMessage("import os")]).content
    assert total.usage_metadata["output_tokens"] > 0


def test_tools_are_called_and_answered(model):
    bound = model.bind_tools([look_up], tool_choice="look_up")
    question = HumanMessage("Where is it?")
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    result = ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"])
    after = model.bind_tools([look_up], tool_choice="none").invoke([question, answer, result])
    cached = after.usage_metadata["input_token_details"]["cache_read"]
    usage = answer.usage_metadata
    # All of the question; of the call, what was sampled in the tokens that its text has.
    assert usage["input_tokens"] < cached < usage["input_tokens"] + usage["output_tokens"]


def test_structured_output_is_of_its_type(model):
    found = model.with_structured_output(Choice).invoke("Red or blue?")
    assert found.colour in ("red", "blue")
