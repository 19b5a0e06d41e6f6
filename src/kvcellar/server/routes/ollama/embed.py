"""Ollama's embeddings."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.server.answer.answer_facts import ignored_of, note
from kvcellar.server.answer.embedding import embed
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.routes.ollama.models import bare
from kvcellar.server.schemas.embeddings import OllamaEmbeddingsRequest, OllamaEmbedRequest
from kvcellar.server.state.service import service_of
from kvcellar.server.stream.streams import until_gone

router = APIRouter(route_class=BodyRoute)


@router.post("/api/embed", response_model=None)
async def embed_texts(request: Request, body: OllamaEmbedRequest) -> Response:
    """Return a vector of each text."""
    service, started_s = service_of(request), time.perf_counter()
    is_cut, name = body.truncate is not False, bare(service, body.model)
    work = embed(service, name, body.input, dimensions=body.dimensions, is_cut=is_cut)
    found = await until_gone(request, work)
    note(request, prompt_tokens=found.n_tokens)
    said = {
        "model": body.model,
        "embeddings": found.vectors.tolist(),
        "total_duration": int((time.perf_counter() - started_s) * 10**9),
        "load_duration": 0,
        "prompt_eval_count": found.n_tokens,
    }
    return JSONResponse(said, headers=ignored_of(body))


@router.post("/api/embeddings", response_model=None)
async def embed_prompt(request: Request, body: OllamaEmbeddingsRequest) -> Response:
    """Return the vector of one text."""
    service = service_of(request)
    name = bare(service, body.model)
    found = await until_gone(request, embed(service, name, body.prompt, is_cut=True))
    note(request, prompt_tokens=found.n_tokens)
    return JSONResponse({"embedding": found.vectors[0].tolist()}, headers=ignored_of(body))
