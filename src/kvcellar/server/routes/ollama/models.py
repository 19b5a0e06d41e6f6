"""Ollama's routes about models: which there are, what each can, and which are in memory."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kvcellar
from kvcellar.server.bodies import BodyRoute
from kvcellar.server.describing import Description, capabilities_of, describe
from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.ollama import OllamaName
from kvcellar.server.service import Service, service_of

router = APIRouter(route_class=BodyRoute)

SPOKEN = "0.13.0"
"""Version of Ollama whose API this is: clients refuse to talk to older ones."""

_FOR_EVER = "2300-01-01T00:00:00Z"


def path_of(service: Service, name: str) -> str:
    """Return what the registry calls a model; a name may have ``:latest`` at its end.

    Raises:
        ApiError: 404, there is none of that name.
    """
    bare = name.removesuffix(":latest")
    return service.models.resolve(name if name in service.models.offered else bare)


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Tell the version of Ollama's API that is spoken, and this server's own."""
    return {"version": SPOKEN, "kvcellar": kvcellar.__version__}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List the models that are offered."""
    service = service_of(request)
    return {"models": [await _listed(service, name) for name in service.models.offered]}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, Any]:
    """List the models that are in memory."""
    service = service_of(request)
    found = []
    for host in service.models.hosts():
        listed = await _listed(service, service.models.public(host.name))
        more = {"expires_at": _FOR_EVER, "context_length": host.context}
        found.append({**listed, "size": host.size_bytes, **more})
    return {"models": found}


@router.post("/api/show")
async def show(request: Request, body: OllamaName) -> dict[str, Any]:
    """Describe one model: its template, its sizes, and what it can."""
    service = service_of(request)
    path = path_of(service, body.model)
    async with service.models.registry.use(path) as host:
        said = await asyncio.to_thread(describe, path)
        template = getattr(host.tokenizer, "chat_template", None)
        parameters = [f"{name:<30} {value}" for name, value in host.sampling.items()]
    return {
        "modelfile": f"FROM {service.models.public(path)}\n",
        "parameters": "\n".join(parameters),
        "template": template if isinstance(template, str) else "",
        "details": _details(said),
        "model_info": {
            "general.architecture": said.family,
            "general.parameter_count": said.n_parameters,
            f"{said.family}.context_length": host.context,
            f"{said.family}.embedding_length": said.hidden_size,
            f"{said.family}.block_count": said.n_layers,
        },
        "capabilities": capabilities_of(host),
        "modified_at": _stamp(service.models.created_s),
    }


@router.post("/api/pull", response_model=None)
async def pull(request: Request, body: OllamaName) -> Response:
    """Confirm that a model is here; nothing is downloaded for a client.

    Raises:
        ApiError: 404, it is not offered.
    """
    path_of(service_of(request), body.model)
    return JSONResponse({"status": "success"})


@router.post("/api/create")
@router.post("/api/copy")
@router.post("/api/push")
@router.delete("/api/delete")
async def refuse(request: Request) -> None:
    """Refuse what changes the models of a server: who starts it says which there are."""
    raise ApiError(
        400,
        f"{request.url.path} is not served: the models are those that the server was started "
        f"with; start it with others",
        "not_served",
    )


async def _listed(service: Service, name: str) -> dict[str, Any]:
    path = service.models.offered[name]
    said = await asyncio.to_thread(describe, path)
    return {
        "name": name,
        "model": name,
        "modified_at": _stamp(service.models.created_s),
        "size": said.size_bytes,
        "digest": said.digest,
        "details": _details(said),
    }


def _details(said: Description) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": said.format,
        "family": said.family,
        "families": [said.family],
        "parameter_size": said.parameter_size,
        "quantization_level": said.quantisation,
    }


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def now() -> str:
    """Return this moment as Ollama writes it."""
    return _stamp(time.time())
