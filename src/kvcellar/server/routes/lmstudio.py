"""The lists of LM Studio's older API, by which its clients learn what is loaded and how long."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from kvcellar.server.look.describing import abilities_of, describe, described_beside
from kvcellar.server.state.service import Service, service_of

router = APIRouter(prefix="/api/v0", tags=["LM Studio"])


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the models that are offered, loaded or not."""
    service = service_of(request)
    names = [*service.models.offered, *service.models.embedding_models]
    return {"object": "list", "data": [await _listed(service, name) for name in names]}


@router.get("/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """Describe one model."""
    service = service_of(request)
    if name not in service.models.embedding_models:
        name = service.models.public(service.models.resolve(name))
    return await _listed(service, name)


async def _listed(service: Service, name: str) -> dict[str, Any]:
    beside = service.models.embedding_models.get(name)
    if beside is not None:
        said, kind, words = described_beside(name, beside), "embeddings", list[str]()
        context: int | None = beside.context
        loaded = context
    else:
        path = service.models.resolve(name)
        said = await asyncio.to_thread(describe, service.models.files_of(path))
        can = await asyncio.to_thread(abilities_of, service.models, path)
        host = service.models.registry.host(path)
        kind = "vlm" if "vision" in can.capabilities else "llm"
        context, loaded = can.context, None if host is None else host.context
        words = ["tool_use"] if "tools" in can.capabilities else []
    more = {} if loaded is None else {"loaded_context_length": loaded}
    return {
        "id": name,
        "object": "model",
        "type": kind,
        "publisher": "kvcellar",
        "arch": said.family,
        "compatibility_type": said.format,
        "quantization": said.quantisation,
        "state": "not-loaded" if loaded is None else "loaded",
        "max_context_length": context,
        **more,
        "capabilities": words,
    }
