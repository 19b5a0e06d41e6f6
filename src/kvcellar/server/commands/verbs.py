"""Verbs that commands ask of agents, the same in a process of their own and of a running server.

Values go in and come out as JSON has them, and are what ``--json`` prints. A verb that takes long
tells meanwhile: ``{"text": ...}`` and ``{"thought": ...}`` of an answer, and how far a restore or a
save is as ``{"report": [share, what]}``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvcellar.agents import AgentManager, ModelHost, Turn, salt_of
from kvcellar.agents.text.reading import conversation_apart, reading_of
from kvcellar.engine import (
    FinishEvent,
    GeneratedToken,
    Generation,
    Request,
)
from kvcellar.errors import EngineClosedError, ModelError, PictureError, PromptError
from kvcellar.history import History
from kvcellar.hosting.given_pictures import read_pictures, with_pictures
from kvcellar.pictures.given import decode_picture
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.placed_text import pictures_of
from kvcellar.server.commands.asked import generation_object, params_of
from kvcellar.server.commands.thoughts import ReadAnswer, reading_for, stops_for
from kvcellar.valid import valid_text

Tell = Callable[[dict[str, Any]], None]
"""Takes what a verb tells while it runs, on any thread."""

Verb = Callable[..., Awaitable[Any]]
"""Called with the agents, whom to tell, and the verb's own arguments by name."""

StartFn = Callable[[ModelHost, Sequence[int] | History], None]
"""Called with a model and a prompt before it is queued; it may refuse by raising."""


def reporter(tell: Tell) -> Callable[[float, str], None]:
    """Return what takes how far something is, and tells it."""
    return lambda share, what: tell({"report": [share, what]})


# Who there is -------------------------------------------------------------------------------------


async def list_(agents: AgentManager, tell: Tell) -> list[dict[str, Any]]:
    """List all agents, the one that was used last at the end."""
    await agents.directory.refresh()
    infos = await asyncio.to_thread(agents.directory.parted)
    return [info.as_json() for info in infos]


async def show(agents: AgentManager, tell: Tell, *, agent_id: str) -> dict[str, Any]:
    """Describe an agent, with its conversation."""
    info = await agents.directory.describe(agent_id)
    agent = agents.directory.agent(agent_id)
    host = agents.directory.host_of(agent)
    messages = await asyncio.to_thread(conversation_apart, agent, host)
    return info.as_json() | {"messages": messages}


async def why(agents: AgentManager, tell: Tell, *, agent_id: str) -> dict[str, Any]:
    """Say what an agent's last turn computed again: ``miss``, and a sentence where that is null."""
    await agents.directory.refresh()
    miss = agents.directory.why(agent_id)
    said = agents.directory.why_not(agent_id) if miss is None else miss.advice
    return {
        "miss": None if miss is None else miss.as_json() | {"advice": miss.advice},
        "said": said,
    }


async def create(
    agents: AgentManager,
    tell: Tell,
    *,
    agent_id: str | None,
    model: str | None,
    system: str | None,
) -> dict[str, Any]:
    """Make an agent; of the default model where none is named."""
    info = await agents.lifecycle.create(agent_id, model=model, system=system)
    return info.as_json()


async def ensure(
    agents: AgentManager, tell: Tell, *, agent_id: str, model: str | None, system: str | None
) -> None:
    """Make an agent where there is none of that name."""
    if not await agents.directory.has(agent_id):
        await agents.lifecycle.create(agent_id, model=model, system=system)


# Branches and sleep -------------------------------------------------------------------------------


async def fork(
    agents: AgentManager,
    tell: Tell,
    *,
    agent_id: str,
    new_id: str | None,
    position: int | None,
    turn: int | None,
) -> dict[str, Any]:
    """Make an agent that shares the beginning of another."""
    info = await agents.lifecycle.fork(agent_id, new_id, position=position, turn=turn)
    return info.as_json()


async def rewind(
    agents: AgentManager, tell: Tell, *, agent_id: str, position: int | None, turn: int | None
) -> dict[str, Any]:
    """Go back to a place in the history; without one, to before the last turn."""
    if position is None and turn is None:
        turn = -1
    return (await agents.lifecycle.rewind(agent_id, position=position, turn=turn)).as_json()


async def take_back(agents: AgentManager, tell: Tell, *, agent_id: str) -> dict[str, Any] | None:
    """Go back to before the last turn, and return what was said in it; None: there is none.

    That is the ``text`` of its last message of the user, and in ``images`` the files of the
    pictures before it, in base64, as ``turn`` takes them; ``n_lost`` more are not here any more.
    """
    agent = await agents.directory.find(agent_id)
    if not agent.turns:
        return None
    own, digest = agent.messages[agent.turns[-1].n_messages :], agent.history_digest
    asked = next((one for one in reversed(own) if one.get("role") == "user"), {"content": ""})
    names = [name for name, _ in pictures_of(asked)]
    images = await asyncio.to_thread(_files_of, agents, names)
    await agents.lifecycle.rewind(agent_id, turn=-1, follows=digest)
    return {"text": asked["content"], "images": images, "n_lost": len(names) - len(images)}


def _files_of(agents: AgentManager, names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        with contextlib.suppress(PictureError):
            found.append(base64.b64encode(agents.models.shelf.get(name).data).decode())
    return found


async def rename(agents: AgentManager, tell: Tell, *, agent_id: str, title: str) -> dict[str, Any]:
    """Give an agent another title."""
    return (await agents.lifecycle.rename(agent_id, title)).as_json()


async def keep(agents: AgentManager, tell: Tell, *, agent_id: str) -> list[str]:
    """Delete the siblings of a branch; return which."""
    return list(await agents.lifecycle.keep(agent_id))


async def pause(agents: AgentManager, tell: Tell, *, agent_id: str) -> dict[str, Any]:
    """Have all of an agent on disk and none of it in memory."""
    return (await agents.sleep.pause(agent_id, progress=reporter(tell))).as_json()


async def resume(agents: AgentManager, tell: Tell, *, agent_id: str) -> dict[str, Any]:
    """Load an agent's KV; return the agent, what came, and what went wrong with it if anything."""
    back = await agents.sleep.resume(agent_id, progress=reporter(tell))
    info = await agents.directory.describe(agent_id)
    restored = {
        "restored_tokens": back.n_restored,
        "restored_from": dict(back.tiers),
        "restore_s": back.load_s,
    }
    return {"agent": info.as_json() | restored, "trouble": back.trouble}


async def delete(agents: AgentManager, tell: Tell, *, agent_id: str, is_final: bool) -> None:
    """Forget an agent."""
    await agents.lifecycle.delete(agent_id, is_final=is_final)


async def undo(agents: AgentManager, tell: Tell, *, agent_id: str) -> list[dict[str, Any]]:
    """Bring back what was dropped of an agent last."""
    return [info.as_json() for info in await agents.dropped.undo(agent_id)]


async def dropped(agents: AgentManager, tell: Tell) -> list[dict[str, Any]]:
    """List what ``undo`` can bring back, the latest at the end."""
    return [asdict(state) for state in agents.dropped.listed()]


async def forget(agents: AgentManager, tell: Tell) -> int:
    """Delete all that ``undo`` could bring back; return how many states it was."""
    return agents.dropped.forget_all()


# Answers ------------------------------------------------------------------------------------------


async def turn(
    agents: AgentManager,
    tell: Tell,
    *,
    agent_id: str,
    text: str,
    model: str | None,
    sampling: Mapping[str, Any],
    images: Sequence[str] = (),
    on_start: StartFn | None = None,
    deadline_s: float | None = None,
    dialect: str | None = None,
) -> dict[str, Any]:
    """Run one turn of an agent: its answer is told as it comes, and joins its history.

    Args:
        agents: whose it is one of.
        tell: told the answer.
        agent_id: whose turn.
        text: what is said.
        model: to run on; None: the agent's own.
        sampling: as ``params_of`` reads it.
        images: pictures before the text, their files in base64.
        on_start: may refuse the prompt.
        deadline_s: longest time to wait for room; None for any.
        dialect: name of the dialect that it speaks; None: what its template shows.
    """
    params = params_of(sampling)
    agent = await agents.directory.find(agent_id)
    async with agents.models.use(model or agent.model) as own:
        host = own.isolated(salt_of(agent.agent_id))
        reading = reading_of(host, agent.messages, agent.tools, dialect=dialect)
        read = ReadAnswer(reading)
        pictures = await asyncio.to_thread(_read_all, host, images)
        said = with_pictures({"role": "user", "content": text}, pictures)
        asked = Turn(
            agent_id,
            None if pictures else text,
            behind=[said] if pictures else None,
            params=replace(params, stop=stops_for(reading, params.stop)),
            deadline_s=deadline_s,
            on_start=None
            if on_start is None
            else lambda planned, _: on_start(host, planned.prompt),
            progress=reporter(tell),
            reading=reading,
        )
        async with agents.turns.running(asked, host) as running:
            async for event in running.events:
                running.take(event)
                if isinstance(event, GeneratedToken):
                    _tell_all(tell, read.push(event.text))
    end = running.end
    _check_ended(end.finish)
    _tell_all(tell, read.end(end.finish.text))
    usage, miss = end.usage, end.usage.miss
    return {
        "id": end.agent_id,
        "text": read.text,
        "reasoning": read.reasoning,
        **({"tool_calls": read.calls} if read.calls else {}),
        "token_ids": list(end.finish.token_ids),
        "finish_reason": end.finish.reason,
        "usage": asdict(usage)
        | {"miss": None if miss is None else miss.as_json() | {"advice": miss.advice}},
    }


async def complete(
    agents: AgentManager,
    tell: Tell,
    *,
    model: str,
    sampling: Mapping[str, Any],
    prompt: str | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    on_start: StartFn | None = None,
    deadline_s: float | None = None,
    dialect: str | None = None,
) -> dict[str, Any]:
    """Go on from a text, or answer messages; nothing is remembered but K and V.

    Args:
        agents: have the models.
        tell: told the answer.
        model: by the name that the registry has for it.
        sampling: as ``params_of`` reads it.
        prompt: a text, which is read as it is.
        messages: or a conversation, whose answers have ``reasoning_content`` beside ``content``,
            and whose other messages may have ``images`` before it, as ``turn`` takes them.
        on_start: as ``turn`` takes it.
        deadline_s: as ``turn`` takes it.
        dialect: as ``turn`` takes it.
    """
    params = params_of(sampling)
    async with agents.models.use(model) as host:
        tokenizer = host.tokenizer
        if tokenizer is None:
            raise PromptError(f"model {host.name!r} has no tokenizer, so it reads no text")
        reading = reading_for(tokenizer if messages is not None else None, dialect)
        held: list[Picture] = []
        if messages is not None:
            said, held = await asyncio.to_thread(_with_pictures, host, messages)
            worded = said if reading is None else [*map(reading.of_message, said)]
            tokens = await asyncio.to_thread(agents.turns.prompt_of, host, worded, [])
        else:
            tokens = History(tokenizer.encode(valid_text(prompt or "")))
        if on_start is not None:
            on_start(host, tokens)
        if reading is not None:
            reading.begin(tokenizer, tokens)
        params = params.for_model(host.sampling)
        read = ReadAnswer(reading)
        request = Request(
            tokens,
            replace(params, stop=stops_for(reading, params.stop)),
            deadline_s=deadline_s,
            space=host.space,
            marks=None if reading is None else reading.marks,
        )
        finish: FinishEvent | None = None
        async with await host.service.submit(request) as events:
            async for event in events:
                if isinstance(event, GeneratedToken):
                    _tell_all(tell, read.push(event.text))
                elif isinstance(event, FinishEvent):
                    finish = event
    held.clear()  # nobody reads them any more
    assert finish is not None, "a request ends with a finish"
    _check_ended(finish)
    assert finish.usage is not None and finish.finish is not None, "it ran"
    _tell_all(tell, read.end(finish.text))
    whole = Generation(finish.text, finish.token_ids, finish.finish, finish.usage)
    return generation_object(whole, read, params)


def _read_all(host: ModelHost, images: Sequence[str]) -> list[Picture]:
    """Read pictures that come in base64."""
    return read_pictures(host, [decode_picture(one) for one in images])


def _with_pictures(
    host: ModelHost, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Return messages with the pictures that come with them, and these, to be held."""
    said, held = [], []
    for message in messages:
        plain = {key: value for key, value in message.items() if key != "images"}
        pictures = _read_all(host, message.get("images") or ())
        said.append(with_pictures(plain, pictures))
        held += pictures
    return said, held


def _tell_all(tell: Tell, pieces: Sequence[dict[str, str]]) -> None:
    for piece in pieces:
        tell(piece)


def _check_ended(finish: FinishEvent) -> None:
    """Raise what kept an answer from its end."""
    if finish.error is not None:
        raise finish.error
    if finish.reason not in ("stop", "length"):
        raise EngineClosedError("the engine was closed before the answer had ended; ask again")


async def describe_model(agents: AgentManager, tell: Tell, *, model: str) -> dict[str, Any]:
    """Say of a model what one wants to know who talks with it; it is loaded."""
    async with agents.models.use(model) as host:
        if host.tokenizer is None:
            raise ModelError(f"model {host.name!r} has no tokenizer, so it reads no text")
        return {
            "name": host.name,
            "weights": host.weights,
            "context": host.context,
            "has_template": bool(getattr(host.tokenizer, "chat_template", None)),
            "reads_pictures": host.reads_pictures,
            "sampling": dict(host.sampling),
            "resumes": host.resumes,
        }


VERBS: Mapping[str, Verb] = {
    "list": list_,
    "show": show,
    "why": why,
    "create": create,
    "ensure": ensure,
    "fork": fork,
    "rewind": rewind,
    "take_back": take_back,
    "rename": rename,
    "keep": keep,
    "pause": pause,
    "resume": resume,
    "delete": delete,
    "undo": undo,
    "dropped": dropped,
    "forget": forget,
    "turn": turn,
    "complete": complete,
    "model": describe_model,
}
"""All verbs by their names."""

ANSWERING = ("turn", "complete")
"""Those that generate, and take ``on_start`` and ``deadline_s``."""
