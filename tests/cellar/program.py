"""A user's program, as strict as a type checker can be: ``make types`` holds it to that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import kvcellar as kv
from kvcellar.cellar import Answer, ToolCall, Why

QUESTIONS = ("Why is the sky blue?", "Why is grass green?")


def best(answers: Sequence[Answer]) -> int:
    """Return the number of the likeliest answer."""
    likely = [answer.mean_logprob or float("-inf") for answer in answers]
    return likely.index(max(likely))


WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern"]}}},
}


def ask(agent: kv.Agent) -> str:
    """Have a tool called, say its result, and ask for a value."""
    answer = agent.say("?", tools=[WEATHER], tool_choice="required", max_tokens=64)
    calls: tuple[ToolCall, ...] = answer.calls
    results = [call.result({"degrees": 22}) for call in calls]
    agent.say(results or "Go on.", tool_choice="none", max_tokens=4)
    wanted = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
    found = agent.say("A point.", tools=[], response_format=wanted, max_tokens=64)
    agent.branch(2).say(["One.", [{"role": "user", "content": "Two."}]], max_tokens=2)
    return f"{found.value}{found.reasoning}"


def talk(cellar: kv.Cellar, out: list[str]) -> kv.Agent:
    """Talk with an agent, fork it, go back, and choose among branches."""
    poet: kv.Agent = cellar.agent("poet", system="You write verse.")
    answer: Answer = poet.say("A line about rain.", max_tokens=8, temperature=0)
    out.append(answer.text)
    with poet.stream("Another one.", max_tokens=8, seed=1) as stream:
        out.append("".join(stream))
    out.append(stream.answer.text)
    twin = poet.fork("twin", turn=1)
    twin.say("Or about snow.", max_tokens=4, stop=["\n"])
    why: Why = twin.why()
    out.append(str(why))
    branches = poet.branch(3)
    answers = branches.say("And now the sun.", max_tokens=4, temperature=0.9, seed=7)
    kept = branches.keep(best(answers))
    out.append(ask(twin))
    poet.rewind(-1)
    poet.undo()
    return kept


async def talk_too(folder: Path) -> list[str]:
    """Do some of it in an event loop, beside each other."""
    async with kv.open_async("demo", store=folder, capacity=1024) as cellar:
        agents = [await cellar.agent(f"asked-{number}") for number in range(len(QUESTIONS))]
        said = [
            agent.say(text, max_tokens=4) for agent, text in zip(agents, QUESTIONS, strict=True)
        ]
        return [answer.text for answer in await asyncio.gather(*said)]


def main(folder: Path) -> list[str]:
    """Run all of it in stores below a folder."""
    out: list[str] = []
    with kv.open("demo", store=folder / "one", kv_dtype="int8", capacity=2048) as cellar:
        out.append(talk(cellar, out).name)
        texts: list[Answer] = cellar.complete(["def ", "class "], max_tokens=4, temperature=0)
        out.append(texts[0].text + str(cellar.complete("import ", max_tokens=2)))
    return out + asyncio.run(talk_too(folder / "two"))
