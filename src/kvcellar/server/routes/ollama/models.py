"""Ollama's routes about models: which there are, what each can, and which are in memory."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.look.describing import (
    Description,
    abilities_of,
    describe,
    described_beside,
)
from kvcellar.server.schemas.ollama import OllamaName
from kvcellar.server.state.service import Service, service_of
from kvcellar.version import __version__

router = APIRouter(route_class=BodyRoute)

SPOKEN = "0.13.0"
"""Version of Ollama whose API this is: clients refuse to talk to older ones."""

_FOR_EVER = "2300-01-01T00:00:00Z"


def path_of(service: Service, name: str) -> str:
    """Return what the registry calls a model.

    Raises:
        ApiError: 404, there is none of that name.
    """
    return service.models.resolve(bare(service, name))


def bare(service: Service, name: str) -> str:
    """Return a model's name without ``:latest``, where that is not a part of it."""
    known = {*service.models.offered, *service.models.embedding_models}
    return name if name in known else name.removesuffix(":latest")


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Tell the version of Ollama's API that is spoken, and this server's own."""
    return {"version": SPOKEN, "kvcellar": __version__}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List the models that are offered."""
    service = service_of(request)
    found = [await _listed(service, name) for name in service.models.offered]
    for name, model in service.models.embedding_models.items():
        found.append(_entry(service, name, described_beside(name, model)))
    return {"models": found}


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
    name = bare(service, body.model)
    if name in service.models.embedding_models:
        model = service.models.embedding_models[name]
        said = described_beside(name, model)
        return _shown(service, name, said, model.context, ["embedding"])
    path = path_of(service, body.model)
    said = await asyncio.to_thread(describe, service.models.files_of(path))
    can = await asyncio.to_thread(abilities_of, service.models, path)
    found = _shown(service, name, said, can.context, list(can.capabilities))
    found["template"] = next(iter(can.templates.values()), "")
    for template, text in list(can.templates.items())[1:]:
        found["model_info"][f"tokenizer.chat_template.{template}"] = text
    found["parameters"] = "\n".join(f"{key:<30} {n}" for key, n in can.parameters.items())
    return found


def _shown(
    service: Service, name: str, said: Description, context: int | None, capabilities: list[str]
) -> dict[str, Any]:
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "",
        "template": "",
        "details": _details(said, service.models.parent(name)),
        "model_info": {
            "general.architecture": said.family,
            "general.parameter_count": said.n_parameters,
            f"{said.family}.context_length": context,
            f"{said.family}.embedding_length": said.hidden_size,
            f"{said.family}.block_count": said.n_layers,
        },
        "capabilities": capabilities,
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
    said = await asyncio.to_thread(describe, service.models.files_of(path))
    return _entry(service, name, said)


def _entry(service: Service, name: str, said: Description) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _stamp(service.models.created_s),
        "size": said.size_bytes,
        "digest": said.digest,
        "details": _details(said, service.models.parent(name)),
    }


def _details(said: Description, parent: str | None) -> dict[str, Any]:
    return {
        "parent_model": parent or "",
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
