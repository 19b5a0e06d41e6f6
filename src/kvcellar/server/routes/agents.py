"""The agents themselves: fork, rewind, keep, sleep, and why something was computed again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from kvcellar.agents import (
    CAUSES,
    AgentInfo,
    Dropped,
    Turn,
    TurnEnd,
    TurnRecord,
    checked_id,
    salt_of,
    without_salt,
)
from kvcellar.agents.text.live_text import AnswerPieces, Begun, LiveEvent
from kvcellar.agents.text.reading import reading_of
from kvcellar.agents.text.transcripts import write_transcript
from kvcellar.dialects import AnswerParser, CallPart, Part, ReasoningPart, TextPart
from kvcellar.engine import GeneratedToken, PromptProgress
from kvcellar.errors import StoreError
from kvcellar.pictures.placed_text import PicturedText
from kvcellar.server.answer.answer_facts import call_delta, calls_of, note, usage_extra
from kvcellar.server.answer.chat import check_calls, reason_of
from kvcellar.server.answer.media import LeftOut
from kvcellar.server.answer.parsing import sampling_of
from kvcellar.server.answer.pictures import SentPicture, take_pictures
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.look.events import PERIOD_S
from kvcellar.server.look.searching import find_text, messages_of
from kvcellar.server.look.snapshot import agent_as_json
from kvcellar.server.schemas.agents import (
    CreateRequest,
    ForkRequest,
    GenerateRequest,
    RenameRequest,
    RewindRequest,
)
from kvcellar.server.state.isolation import OwnAgent, own_id, salt_for
from kvcellar.server.state.service import Service, service_of
from kvcellar.server.stream.replies import Frames, frame, sse
from kvcellar.server.stream.streams import MergedStream, ended, kept_on, until_gone

router = APIRouter(prefix="/v1/agents", tags=["Agents"], route_class=BodyRoute)

_TRANSCRIPTS = {
    "markdown": ("text/markdown; charset=utf-8", "md"),
    "json": ("application/json", "json"),
}
_IMPORT_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.get("")
async def list_agents(
    request: Request, dropped: bool = False, search: str | None = Query(None, max_length=1000)
) -> dict[str, Any]:
    """List all agents, the one that was used last at the end; or what ``undo`` can bring back.

    With ``search`` those whose name or messages have the text, and where.
    """
    service, salt = service_of(request), salt_for(request)
    if search:
        await service.agents.directory.refresh()
        matching = await asyncio.to_thread(find_text, service, search, salt)
        return {"object": "list", "data": [_without_salts(one) for one in matching]}
    if dropped:
        states = await asyncio.to_thread(service.agents.dropped.listed)
        mine = [state for state in states if salt_of(state.agent_id) == salt]
        return {"object": "list", "data": [_dropped_as_json(service, state) for state in mine]}
    await service.agents.directory.refresh()
    infos = await asyncio.to_thread(service.agents.directory.parted)
    found = [_shown(service, info) for info in infos if salt_of(info.agent_id) == salt]
    return {"object": "list", "data": found}


@router.post("", status_code=201)
async def create_agent(request: Request, body: CreateRequest) -> dict[str, Any]:
    """Create an agent without a history."""
    service, salt = service_of(request), salt_for(request)
    info = await service.agents.lifecycle.create(
        None if body.id is None else own_id(body.id, salt),
        title=body.title,
        salt=salt,
        model=service.models.resolve(body.model),
        system=body.system,
        tools=body.tools,
    )
    return _shown(service, info)


@router.post("/import", status_code=201, openapi_extra=_IMPORT_BODY)
async def import_agent(request: Request, id: str | None = None) -> dict[str, Any]:
    """Take in an agent from a file that ``export`` wrote; all of it is verified first."""
    service, salt = service_of(request), salt_for(request)
    if id is not None:
        id = checked_id(own_id(id, salt))  # before the body is taken in
    async with _folder("kvcellar-import-") as folder:
        file = folder / "agent"
        out = await asyncio.to_thread(file.open, "wb")
        try:
            async for piece in request.stream():
                await asyncio.to_thread(out.write, piece)
        finally:
            await asyncio.to_thread(out.close)
        try:
            info = await service.agents.sleep.import_file(file, id, salt=salt)
        except StoreError as error:
            said = str(error).replace(str(file), "the body")
            raise ApiError(400, said, "invalid_export") from error
    return _shown(service, info)


@router.get("/{agent_id}/live", response_model=None)
async def live(request: Request, agent_id: OwnAgent) -> Response:
    """Server-sent events: what an agent says, whoever asked it, from the turn under way on.

    ``turn`` has what is answered and the answer so far, ``reading`` how far its prompt is read,
    ``token`` the next pieces of the answer; ``end`` says why the turn, which is in the history now,
    has ended (``reason`` null: it said nothing, and is not). The stream goes on with the next turn.
    Thoughts and calls come apart from the text, as ``reasoning_content`` and ``tool_calls`` of chat
    completions do.
    """
    service = service_of(request)
    await service.agents.directory.find(agent_id)
    return await sse(request, MergedStream.of(_heard(service, agent_id)), LiveFrames(request))


@router.get("/{agent_id}/why")
async def why(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """Say what the last turn had to compute again, and why; ``miss`` is null where nothing was."""
    agents = service_of(request).agents
    await agents.directory.refresh()
    miss = agents.directory.why(agent_id)
    said = None if miss is None else {**miss.as_json(), "advice": miss.advice}
    return {
        "id": without_salt(agent_id),
        "miss": said,
        "said": without_salt(agents.directory.why_not(agent_id)) if miss is None else miss.advice,
    }


@router.post("/{agent_id}/fork", status_code=201)
async def fork_agent(
    request: Request, agent_id: OwnAgent, body: ForkRequest | None = None
) -> dict[str, Any]:
    """Create an agent that shares the beginning of this one; no KV is copied."""
    service = service_of(request)
    body = body or ForkRequest.model_validate({})
    new_id = None if body.id is None else own_id(body.id, salt_for(request))
    info = await service.agents.lifecycle.fork(
        agent_id, new_id, position=body.position, turn=body.turn
    )
    return _shown(service, info)


@router.post("/{agent_id}/rename")
async def rename_agent(request: Request, agent_id: OwnAgent, body: RenameRequest) -> dict[str, Any]:
    """Give an agent another title, for people; its id stays, by which clients know it."""
    service = service_of(request)
    return _shown(service, await service.agents.lifecycle.rename(agent_id, body.title))


@router.post("/{agent_id}/rewind")
async def rewind_agent(
    request: Request, agent_id: OwnAgent, body: RewindRequest | None = None
) -> dict[str, Any]:
    """Go back to a place in the history; without one, to before the last turn."""
    service = service_of(request)
    body = body or RewindRequest.model_validate({})
    turn = -1 if body.position is None and body.turn is None else body.turn
    info = await service.agents.lifecycle.rewind(
        agent_id, position=body.position, turn=turn, follows=body.follows
    )
    return _shown(service, info)


@router.post("/{agent_id}/keep")
async def keep_agent(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """Keep this branch and delete its siblings, with all that was forked from them."""
    gone = await service_of(request).agents.lifecycle.keep(agent_id)
    return {"id": without_salt(agent_id), "deleted": [without_salt(name) for name in gone]}


@router.post("/{agent_id}/undo")
async def undo(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """Bring back what rewind, keep, delete or a replaced history has dropped of an agent last.

    Where the agent has gone on since, it comes back as an agent of another name.
    """
    service = service_of(request)
    back = await service.agents.dropped.undo(agent_id)
    return {"id": without_salt(agent_id), "restored": [_shown(service, info) for info in back]}


@router.post("/{agent_id}/pause")
async def pause_agent(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """Have all of an agent on disk, and in memory only what others share."""
    service = service_of(request)
    return _shown(service, await service.agents.sleep.pause(agent_id))


@router.post("/{agent_id}/resume")
async def resume_agent(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """Load an agent's KV into the cache and say how much came, from where, in what time."""
    service = service_of(request)
    back = await service.agents.sleep.resume(agent_id)
    info = await service.agents.directory.describe(agent_id)
    return {
        **_shown(service, info),
        "restored_tokens": back.n_restored,
        "restored_from": dict(back.tiers),
        "restore_s": back.load_s,
        "trouble": back.trouble or None,
    }


@router.post("/{agent_id}/wait")
async def wait_agent(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """Let an agent wait for a tool: its cells are the first to go where memory is short."""
    service = service_of(request)
    return _shown(service, await service.agents.sleep.wait(agent_id))


@router.post("/{agent_id}/finish")
async def finish_agent(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """End a sub-agent: its cells are free at once; its history stays stored."""
    service = service_of(request)
    return _shown(service, await service.agents.lifecycle.finish(agent_id))


@router.post("/{agent_id}/stop")
async def stop_agent(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """End the turn that an agent is in; what it has said stays in the history.

    ``stopped`` is false where it was in none. Whoever asked for the turn is told: ``generate`` ends
    with ``cancelled``, other routes with an error.
    """
    service = service_of(request)
    is_stopped = await service.agents.turns.stop(agent_id)
    info = await service.agents.directory.describe(agent_id)
    return {**_shown(service, info), "stopped": is_stopped}


@router.get("/{agent_id}/export", response_class=FileResponse)
async def export_agent(
    request: Request,
    agent_id: OwnAgent,
    format: Literal["kvcellar", "markdown", "json"] = Query("kvcellar"),
) -> Response:
    """Send an agent as one file: with its KV, for ``import``, or what was said, to be read.

    ``markdown`` and ``json`` have the conversation alone, thoughts and calls apart from text.
    """
    service, name = service_of(request), without_salt(agent_id)
    if format != "kvcellar":
        info = await service.agents.directory.describe(agent_id)
        messages = await asyncio.to_thread(messages_of, service, agent_id)
        shown = dataclasses.replace(
            info,
            agent_id=name,
            model=service.models.public(info.model),
            parent=None if info.parent is None else without_salt(info.parent),
        )
        text = await asyncio.to_thread(write_transcript, shown, messages, format)
        media, ending = _TRANSCRIPTS[format]
        attached = f"attachment; filename*=UTF-8''{quote(name, safe='')}.{ending}"
        return Response(text, media_type=media, headers={"Content-Disposition": attached})
    async with contextlib.AsyncExitStack() as stack:
        file = await stack.enter_async_context(_folder("kvcellar-export-")) / "agent"
        await service.agents.sleep.export(agent_id, file)
        return FileResponse(
            file,
            media_type="application/octet-stream",
            filename=f"{name}.kvcellar",
            background=BackgroundTask(stack.pop_all().aclose),
        )


@asynccontextmanager
async def _folder(prefix: str) -> AsyncIterator[Path]:
    """Make a folder that lasts as long as the block; threads wait for the disk."""
    folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix=prefix)
    try:
        yield Path(folder.name)
    finally:
        await asyncio.to_thread(folder.cleanup)


# Behind the other routes: names from before they were checked may have slashes.


@router.get("/{agent_id:path}")
async def describe_agent(request: Request, agent_id: OwnAgent) -> dict[str, Any]:
    """Describe one agent: its state, how much of it is cached, its conversation and turns.

    Thoughts and calls of its answers are apart from their text, whoever asked for them.
    """
    service = service_of(request)
    info = await service.agents.directory.describe(agent_id)
    messages = await asyncio.to_thread(messages_of, service, agent_id)
    now = service.agents.live.under_way(agent_id)
    return {
        **_shown(service, info),
        "under_way": None if now is None else _begun(now),
        "messages": messages,
        "turns": [_turn_as_json(turn) for turn in service.agents.directory.turns(agent_id)],
    }


@router.delete("/{agent_id:path}")
async def delete_agent(
    request: Request, agent_id: OwnAgent, forever: bool = False
) -> dict[str, Any]:
    """Forget an agent; what others share with it stays. ``undo`` brings it back, unless forever."""
    await service_of(request).agents.lifecycle.delete(agent_id, is_final=forever)
    return {"id": without_salt(agent_id), "deleted": True}


@router.post("/{agent_id}/generate", response_model=None)
async def generate(request: Request, agent_id: OwnAgent, body: GenerateRequest) -> Response:
    """Run one turn of an agent: what it thinks and calls comes apart from its text."""
    service = service_of(request)
    info = await service.agents.directory.describe(agent_id)
    images = body.images if body.images is not None else []
    sent = [SentPicture(s, "images", partial(images.__setitem__, i)) for i, s in enumerate(images)]
    model = service.models.public(info.model)
    read = await take_pictures(
        request, model, sent, salt_of(agent_id), is_kept=bool(body.background)
    )
    if images and not read.pictures:
        raise ApiError(
            400,
            f"model {model!r} reads text alone; leave the pictures out, or ask a model that reads "
            f"them",
            "reads_text_alone",
            param="images",
        )
    events = _events(service, agent_id, info.model, body, read)
    if body.background:
        events = kept_on(events, service.keep)
    if body.stream:
        return await sse(request, MergedStream.of(events), TurnFrames(request))

    async def to_the_end() -> _Ended:
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, _Ended):
                    return event
        raise AssertionError("a turn ends")

    end = _end(await until_gone(request, to_the_end()))
    _note(request, end)
    return JSONResponse(end, headers={"x-agent-id": end["id"]})


def _turn_as_json(turn: TurnRecord) -> dict[str, Any]:
    """Return a turn as routes say it, with advice where it computed something again."""
    value = dataclasses.asdict(turn)
    if turn.took is not None and turn.took.cause:
        value["advice"] = CAUSES[turn.took.cause].format(position=turn.took.n_cached)
    return value


def _dropped_as_json(service: Service, state: Dropped) -> dict[str, Any]:
    value = dataclasses.asdict(state)
    value["model"] = service.models.public(state.model)
    value["id"] = value.pop("agent_id")
    del value["name"]
    return _without_salts(value)


def _shown(service: Service, info: AgentInfo) -> dict[str, Any]:
    """Return an agent as those say it who share its salt."""
    return _without_salts(agent_as_json(service, info))


def _without_salts(value: dict[str, Any]) -> dict[str, Any]:
    return {k: without_salt(v) if isinstance(v, str) else v for k, v in value.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _TurnToken:
    """A token of a turn, and the parts of the answer that became certain with it.

    What was held back at the end comes without a token.
    """

    parts: Sequence[Part]
    token: GeneratedToken | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a turn, and its answer; a call that it went on with has its beginning too."""

    end: TurnEnd
    said: dict[str, Any]
    reason: str


async def _events(
    service: Service, agent_id: str, model: str, body: GenerateRequest, read: LeftOut
) -> AsyncGenerator[_TurnToken | _Ended, None]:
    """Run a turn and read its answer.

    Raises:
        ApiError: 502, the model wrote a call that is none; besides as a turn does.
    """
    params = sampling_of(body, max_tokens=body.max_tokens or service.config.max_tokens)
    with service.admitted():
        async with service.models.registry.use(model) as own:
            host = own.isolated(salt_of(agent_id))
            agent = service.agents.directory.agent(agent_id)
            said, follows = None, body.follows
            if body.go_on:  # with the answer that is there now, and no later one
                said, follows = agent.messages, follows or agent.history_digest
            reading = reading_of(
                host,
                agent.messages,
                agent.tools,
                dialect=service.config.dialect,
                begun=said[-1] if said else None,
            )
            pictured = _with_pictures(body, read)
            turn = Turn(
                agent_id,
                body.text if pictured is None else None,
                behind=pictured,
                messages=said,
                tokens=body.tokens,
                role=body.role,
                follows=follows,
                template_kwargs=body.chat_template_kwargs,
                params=params,
                priority=body.priority,
                deadline_s=service.config.wait_s,
                on_start=lambda planned, _: service.check_context(host, planned.prompt),
                reading=reading,
            )
            pieces: list[Part] = []
            async with service.agents.turns.running(turn, host) as running:
                parser, n_read = None, 0
                async for event in running.events:
                    running.take(event)
                    if isinstance(event, GeneratedToken):
                        parts: list[Part] = []
                        if parser is None:  # the prompt is known
                            parser = reading.parser()
                            parts += _reopened(parser)
                        n_read += len(event.text)
                        parts += parser.push(event.text)
                        pieces += parts
                        yield _TurnToken(parts, event)
                        check_calls(parser)
            end, parser = running.end, parser or reading.parser()
            is_stopped = end.finish.reason == "cancelled" and not service.is_closing
            if not is_stopped:
                await service.check_finish(host, end.finish)
            parts = [*parser.push(end.finish.text[n_read:]), *parser.flush()]
            if not is_stopped:
                check_calls(parser, end.finish.finish)
            if parts:
                yield _TurnToken(parts)
            reason: str = end.finish.reason
            if end.finish.finish is not None:
                reason = reason_of(parser, end.finish.finish)
            yield _Ended(end, _whole([*pieces, *parts]), reason)


def _with_pictures(body: GenerateRequest, read: LeftOut) -> list[dict[str, Any]] | None:
    """Return what somebody says as a message, where pictures go with it; None: none do."""
    if not body.images:
        return None
    shown = [read.shown("image", one)[0] for one in body.images]
    said = sum(shown, PicturedText()) + PicturedText(body.text or "")
    return [{"role": body.role, **said.fields()}]


def _reopened(parser: AnswerParser) -> list[Part]:
    """Return the beginning of a call that an answer goes on with."""
    if not parser.calls:
        return []
    i, call = len(parser.calls) - 1, parser.calls[-1]
    return [CallPart(i, call, ""), *([CallPart(i, call, call.arguments)] if call.arguments else ())]


def _whole(parts: Sequence[Part]) -> dict[str, Any]:
    """Return an answer as one, of all of its pieces."""
    calls = {part.index: part.call for part in parts if isinstance(part, CallPart)}
    said = _pieces([part for part in parts if not isinstance(part, CallPart)])
    return {**said, **({"tool_calls": calls_of(list(calls.values()))} if calls else {})}


def _end(event: _Ended) -> dict[str, Any]:
    end = event.end
    usage, finish = end.usage, end.finish.finish
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "restored_from": dict(usage.restored_from),
        "time_to_first_token_s": usage.time_to_first_token_s,
    }
    return {
        "id": without_salt(end.agent_id),
        **event.said,
        "finish_reason": event.reason,
        "finish_detail": finish.detail if finish else None,
        "history_digest": end.history_digest,
        "usage": {**counts, **usage_extra(usage)},
    }


def _pieces(parts: Sequence[Part]) -> dict[str, Any]:
    """Return pieces of an answer; what there is nothing of is left out, but text."""
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls = [call_delta(part) for part in parts if isinstance(part, CallPart)]
    return {
        "text": "".join(part.text for part in parts if isinstance(part, TextPart)),
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _begun(turn: Begun) -> dict[str, Any]:
    """Return a turn under way, and what it has said by now."""
    return {"asked": turn.asked, "follows": turn.follows, **_pieces(turn.parts)}


def _note(request: Request, end: dict[str, Any]) -> None:
    usage = end["usage"]
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    note(request, agent=end["id"], **{name: usage[name] for name in names})


async def _heard(service: Service, agent_id: str) -> AsyncGenerator[LiveEvent, None]:
    """Tell of an agent's turns until the server stops."""
    closing = asyncio.create_task(service.closing.wait())
    try:
        async with contextlib.aclosing(service.agents.live.listen(agent_id)) as events:
            while True:
                coming = asyncio.ensure_future(anext(events))
                try:
                    while not coming.done():
                        await service.agents.turns.look(agent_id)
                        await asyncio.wait(
                            {coming, closing},
                            timeout=PERIOD_S,
                            return_when=asyncio.FIRST_COMPLETED,
                        )
                        if closing.done() and not coming.done():
                            return
                finally:
                    if not coming.done():  # whoever listens has left, or the server stops
                        await ended(coming)
                yield coming.result()
    finally:
        await ended(closing)


class LiveFrames(Frames[LiveEvent]):
    """Thoughts, text and calls of an agent as they come, for those who look on."""

    error_event = "error"

    async def of(self, number: int, item: LiveEvent) -> bytes:
        """Write the beginning of a turn, the next pieces of its answer, or its end."""
        if isinstance(item, Begun):
            return frame(_begun(item), "turn")
        if isinstance(item, AnswerPieces):
            return frame(_pieces(item.parts), "token")
        kind = "reading" if isinstance(item, PromptProgress) else "end"
        return frame(dataclasses.asdict(item), kind)


class TurnFrames(Frames[_TurnToken | _Ended]):
    """Tokens of a turn with the parts of the answer that they bring, and its end."""

    error_event = "error"

    async def of(self, number: int, item: _TurnToken | _Ended) -> bytes:
        """Write the next token, or the end."""
        if isinstance(item, _TurnToken):
            token_id = None if item.token is None else item.token.token_id
            return frame({"token_id": token_id, **_pieces(item.parts)}, "token")
        end = _end(item)
        _note(self._request, end)
        return frame(end, "end")
