"""Routes that observe the server: health, readiness, metrics, and what is in the cache."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.budget import resident_bytes
from kvcellar.server.look.snapshot import take_snapshot
from kvcellar.server.state.service import service_of
from kvcellar.version import __version__

router = APIRouter(tags=["Observability"])


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Tell that the server lives, and what becomes of its models: a swap is seen here.

    Where the engine of a model has stopped after an error, the status is ``failed`` and 503: the
    server has to be started again. ``store`` says ``failing`` while turns are answered and cannot
    be written to disk, or the disk has not answered for two minutes.
    """
    service = service_of(request)
    is_failed = any(host.service.failure for host in service.models.hosts())
    status = "stopping" if service.is_closing else "failed" if is_failed else "ok"
    said = {
        "status": status,
        "version": __version__,
        "uptime_s": round(time.monotonic() - service.started_s, 1),
        "active": service.n_active,
        "swapping": service.models.swapping,
        "store": "failing" if service.store.is_failing else "ok",
        "models": service.models.as_json(),
    }
    return JSONResponse(said, 503 if status == "failed" else 200)


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 where a model is in memory, its engine runs and requests are taken; 503 otherwise."""
    service = service_of(request)
    running = [host.name for host in service.models.hosts() if not host.service.failure]
    is_ready = bool(running) and not service.is_closing
    said = {"ready": is_ready, "models": running}
    return JSONResponse(said, 200 if is_ready else 503)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Write all counts and gauges in the text format of Prometheus."""
    service = service_of(request)
    engines = []
    for host in service.models.hosts():
        stats = await service.stats_of(host)
        if stats is not None:
            engines.append((host.name, stats))
    stored = await asyncio.to_thread(service.store.stats)
    gauges = [
        ("agents", "Agents that are known.", float(len(await service.agents.directory.listed()))),
        ("pinned_tokens", "Tokens that clients asked to keep.", float(service.pins.n_tokens)),
        ("model_loads", "Models that were loaded.", float(service.models.n_loads)),
        (
            "store_is_failing",
            "1 while what is said is not on disk.",
            float(service.store.is_failing),
        ),
        ("resident_bytes", "Main memory of the process.", float(resident_bytes())),
        *(
            (f"store_{name}", "Of the store.", float(value))
            for name, value in dataclasses.asdict(stored).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ),
    ]
    if stored.shared is not None:
        gauges += [
            (
                "shared_is_away",
                "1 while the shared place fails.",
                float(bool(stored.shared.trouble)),
            ),
            ("shared_waiting", "Agents not handed in whole.", float(stored.shared.n_waiting)),
        ]
    return Response(service.metrics.render(engines, gauges), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/cache")
async def cache(request: Request) -> dict[str, Any]:
    """Tell what is in the cache: cells and whose they are, the index, the tiers, the agents."""
    return await take_snapshot(service_of(request))
