"""OpenAI's embeddings."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.server.answer.answer_facts import ignored_of, note
from kvcellar.server.answer.embedding import embed
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.schemas.embeddings import EmbeddingsRequest
from kvcellar.server.state.service import service_of
from kvcellar.server.stream.streams import until_gone

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Return a vector of each text, pooled from the model's last hidden states."""
    service = service_of(request)
    work = embed(service, body.model, body.input, dimensions=body.dimensions, pooling=body.pooling)
    found = await until_gone(request, work)
    note(request, prompt_tokens=found.n_tokens)

    def written(vector: Any) -> str | list[float]:
        if body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers

    data = [
        {"object": "embedding", "index": i, "embedding": written(vector)}
        for i, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
    head = {"object": "list", "model": found.model}
    return JSONResponse({**head, "data": data, "usage": usage}, headers=ignored_of(body))
