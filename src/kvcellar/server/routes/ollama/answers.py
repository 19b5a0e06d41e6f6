"""Ollama's routes that answer: a chat, or one prompt."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.server.answer.answer_facts import answer_headers, ignored_of, note, notes_of
from kvcellar.server.answer.chat import answer, whole
from kvcellar.server.answer.completions import Continuations, continued, to_the_end
from kvcellar.server.answer.dialogue import Question
from kvcellar.server.answer.parsing import READS_AGENT, whose_of
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.routes.ollama.models import path_of
from kvcellar.server.routes.ollama.parsing import (
    chat_question,
    prompt_question,
    raw_completion,
)
from kvcellar.server.routes.ollama.writing import OllamaAnswer, OllamaFrames, RawFrames
from kvcellar.server.schemas.ollama import OllamaBody, OllamaChatRequest, OllamaGenerateRequest
from kvcellar.server.state.service import service_of
from kvcellar.server.stream.replies import sse
from kvcellar.server.stream.streams import MergedStream, until_gone

router = APIRouter(route_class=BodyRoute)


@router.post("/api/chat", response_model=None, dependencies=[READS_AGENT])
async def chat(request: Request, body: OllamaChatRequest) -> Response:
    """Answer in a conversation; without a message, load the model or let it go."""
    if not body.messages:
        return await _loaded(request, body)
    return await _answered(request, body, await chat_question(request, body))


@router.post("/api/generate", response_model=None, dependencies=[READS_AGENT])
async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
    """Answer one prompt; without one, load the model or let it go."""
    if not (body.prompt or body.suffix or body.images):
        return await _loaded(request, body)
    if body.template:
        raise ApiError(400, "template is not honoured: the model's own is used", param="template")
    if body.context:
        raise ApiError(
            400,
            "context is not honoured: send the conversation to /api/chat, where what was computed "
            "of it is found again",
            param="context",
        )
    if body.raw or body.suffix:
        return await _continued(request, body)
    return await _answered(request, body, await prompt_question(request, body))


async def _continued(request: Request, body: OllamaGenerateRequest) -> Response:
    """Continue a prompt as it is, or up to what follows it."""
    service, said = service_of(request), OllamaAnswer(body)
    path = path_of(service, body.model)
    asked = await raw_completion(service, path, body)
    batch = Continuations(asked, path, whose_of(request, body.agent_id), {})
    stream = MergedStream(continued(service, batch))
    if body.stream is not False:
        return await sse(request, stream, RawFrames(request, said, batch), _ignored(body))
    await to_the_end(request, stream)
    value = {**said.continued(batch), "response": batch.only.text}
    return JSONResponse(value, headers={**batch.headers, **_ignored(body)})


async def _answered(request: Request, body: OllamaBody, question: Question) -> Response:
    service, said = service_of(request), OllamaAnswer(body)
    path = path_of(service, body.model)
    if body.stream is not False:
        frames = OllamaFrames(request, said, path)
        return await sse(
            request, MergedStream.of(answer(service, question)), frames, _ignored(body)
        )
    ((end, tokens),) = await until_gone(request, whole(service, [question]))
    usage = end.usage
    note(
        request,
        agent=end.agent_id,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        **notes_of(usage),
    )
    value = said.whole(end, tokens, service.models.registry.host(path))
    return JSONResponse(value, headers={**answer_headers(end), **_ignored(body)})


async def _loaded(request: Request, body: OllamaBody) -> Response:
    """Load a model for a client that asks nothing yet; with ``keep_alive`` 0 let go of it."""
    service = service_of(request)
    path, reason = path_of(service, body.model), "load"
    if str(body.keep_alive) in ("0", "0.0", "0s"):
        reason = "unload"
        await service.models.registry.release(path)
    else:
        async with service.models.registry.use(path):
            pass
    return JSONResponse(OllamaAnswer(body).piece(done=True, done_reason=reason))


def _ignored(body: OllamaBody) -> dict[str, str]:
    return {**ignored_of(body), **(ignored_of(body.options) if body.options else {})}
