"""Routes of llama.cpp and vLLM by which clients find out: tokens of a text, and of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.agents import ModelHost
from kvcellar.engine import Engine, SamplingParams
from kvcellar.engine.loop.token_bytes import TokenBytes, token_bytes
from kvcellar.hosting.text_limits import refuse_bytes, refuse_text, size_of
from kvcellar.models.text.controls import encode_text
from kvcellar.models.text.prompts import encode_plain
from kvcellar.models.text.templates import templates_of
from kvcellar.models.text.tokenizer import opening_tokens
from kvcellar.pictures.tokens import ids_of
from kvcellar.server.answer.answer_facts import ignored_of
from kvcellar.server.answer.chat import read_prompt
from kvcellar.server.answer.dialogue import Question
from kvcellar.server.answer.parsing import chat_pictures, plain_messages
from kvcellar.server.answer.pictures import take_pictures
from kvcellar.server.answer.thinking import Thinking
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.routes.openai import tools_of
from kvcellar.server.schemas.lookup import DetokenizeRequest, TokenizeRequest
from kvcellar.server.state.isolation import salt_for
from kvcellar.server.state.service import Service, service_of
from kvcellar.version import __version__

router = APIRouter(tags=["Lookup"], route_class=BodyRoute)


@router.post("/tokenize", response_model=None)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the tokens of a text, or of a conversation as the model's template writes it."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    async with service.models.registry.use(path) as host:
        tokens = await _tokens_of(request, host, body, salt_for(request))
        pieces = token_bytes(host.tokenizer)
        said: dict[str, Any] = {"count": len(tokens), "max_model_len": host.context}
    if body.with_pieces:
        said["tokens"] = [{"id": one, "piece": _piece(pieces, one)} for one in tokens]
    else:
        said["tokens"] = tokens
    said["token_strs"] = [pieces.name(i) for i in tokens] if body.return_token_strs else None
    return JSONResponse(said, headers=ignored_of(body))


async def _tokens_of(
    request: Request, host: ModelHost, body: TokenizeRequest, salt: str
) -> list[int]:
    service = service_of(request)
    tokenizer = _tokenizer_of(service, host)
    if body.messages is not None:
        pictures = chat_pictures(body.messages)
        left_out = await take_pictures(request, body.model, pictures, salt, body)
        messages = plain_messages(body.messages, left_out)
        tools = tools_of(body.tools)
        thinking = Thinking(body.chat_template_kwargs or {})
        question = Question(messages, SamplingParams(), body.model, tools, thinking=thinking)
        prompt = await read_prompt(service, question)
        return [int(i) for i in ids_of(prompt.tokens)]
    is_llamas = body.content is not None
    text = (body.content if is_llamas else body.prompt) or ""
    has_specials = bool(body.add_special) if is_llamas else body.add_special_tokens is not False
    size = size_of(text)
    refuse_bytes(tokenizer, size.n_bytes, 4 * host.context)

    def encode() -> list[int]:
        refuse_text(tokenizer, text, host.context, times=4)
        if body.parse_special is not False:
            return encode_plain(tokenizer, text, add_special_tokens=has_specials)
        return [*(opening_tokens(tokenizer) if has_specials else ()), *encode_text(tokenizer, text)]

    return await service.agents.work.run(size.cost, encode)


@router.post("/detokenize", response_model=None)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of some tokens, with the names of special ones."""
    service = service_of(request)
    async with service.models.registry.use(service.models.resolve(body.model)) as host:
        tokenizer, n_known = _tokenizer_of(service, host), host.engine.runner.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < n_known:
                raise ApiError(
                    400,
                    f"token id {str(token_id)[:20]} is none of the model's, 0 to {n_known - 1}",
                    "invalid_prompt",
                    param="tokens",
                )

        def decode() -> str:
            return str(tokenizer.decode(body.tokens, skip_special_tokens=False))

        text = await service.agents.work.run(8 * len(body.tokens), decode)
    return JSONResponse({"content": text, "prompt": text}, headers=ignored_of(body))


def _tokenizer_of(service: Service, host: ModelHost) -> Any:
    if host.tokenizer is None:
        name = service.models.public(host.name)
        raise ApiError(400, f"model {name!r} has no tokenizer, so it has tokens alone")
    return host.tokenizer


def _piece(pieces: TokenBytes, token_id: int) -> str | list[int]:
    """Return a token's text, or a special one's name; bytes, where it is a part of a character."""
    data = pieces.of(token_id)
    try:
        return data.decode() or pieces.name(token_id)
    except UnicodeDecodeError:
        return list(data)


# The server -----------------------------------------------------------------------------------


@router.get("/props")
async def props(request: Request, model: str | None = None) -> dict[str, Any]:
    """Tell what a client of llama.cpp asks first: the context, the template, how many at a time."""
    service = service_of(request)
    path = service.models.resolve(model)
    async with service.models.registry.use(path) as host:
        tokenizer: Any = host.tokenizer
        name, templates = service.models.public(path), templates_of(tokenizer)
        return {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": host.context,
                "is_processing": False,
                "params": dict(host.sampling),
            },
            "total_slots": host.engine.config.max_num_seqs,
            "model_alias": name,
            "model_path": name,
            "chat_template": next(iter(templates.values()), ""),
            **{f"chat_template_{name}": text for name, text in list(templates.items())[1:]},
            "bos_token": getattr(tokenizer, "bos_token", None) or "",
            "eos_token": getattr(tokenizer, "eos_token", None) or "",
            "modalities": {"vision": host.reads_pictures, "audio": False},
            "build_info": f"kvcellar {__version__}",
        }


@router.post("/props")
async def set_props() -> None:
    """Refuse: what a server is, whoever starts it says."""
    raise ApiError(400, "settings of a running server are not changed; start it with others")


@router.get("/slots", response_model=None)
async def slots(request: Request, model: str | None = None, fail_on_no_slot: int = 0) -> Response:
    """List the answers that may run at a time, and how far those are that run."""
    service = service_of(request)
    path = service.models.resolve(model)
    host = service.models.registry.host(path)
    if host is None:
        return JSONResponse([])
    context, n_slots = host.context, host.engine.config.max_num_seqs
    running = await host.between_steps(_running)
    idle = {"n_ctx": context, "speculative": False, "is_processing": False}
    found = [{"id": i, **idle, **one} for i, one in enumerate(running)]
    found += [{"id": i, **idle} for i in range(len(running), n_slots)]
    if fail_on_no_slot and len(running) >= n_slots:
        raise ApiError(503, f"all {n_slots} slots are taken", "no_slot", retry_after_s=1)
    return JSONResponse(found)


@router.post("/slots/{slot_id}")
async def act_on_slot(slot_id: int) -> None:
    """Refuse: what a slot would save and restore, agents do by themselves."""
    raise ApiError(
        400,
        f"slot {slot_id} is neither saved, restored nor erased: every conversation is kept by "
        f"itself, and /v1/agents has routes for what is named",
        "not_served",
    )


def _running(engine: Engine) -> list[dict[str, Any]]:
    return [
        {
            "id_task": sequence.request_id,
            "is_processing": True,
            "n_prompt_tokens": sequence.n_prompt,
            "n_prompt_tokens_processed": min(sequence.n_computed, sequence.n_prompt),
            "n_prompt_tokens_cache": sequence.n_cached,
            "next_token": {"n_decoded": len(sequence.tokens) - sequence.n_prompt},
        }
        for sequence in engine.scheduler.running
    ]


# What there is not ----------------------------------------------------------------------------


@router.get("/v1/messages/batches{rest:path}")
@router.post("/v1/messages/batches{rest:path}")
@router.delete("/v1/messages/batches{rest:path}")
@router.get("/v1/batches{rest:path}")
@router.post("/v1/batches{rest:path}")
async def refuse_batches(request: Request, rest: str) -> None:
    """Refuse batches, which are answered when nobody waits."""
    raise ApiError(
        400,
        f"{request.url.path.removesuffix(rest)} is not served: nothing is answered while nobody "
        f"waits; send the requests themselves, many at a time, and they share their steps",
        "not_served",
    )
