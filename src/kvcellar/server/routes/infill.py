"""llama.cpp's ``/infill``: what belongs between two texts, for models that were trained to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.sampler_settings import SAMPLER_SETTINGS
from kvcellar.server.answer.answer_facts import note
from kvcellar.server.answer.completions import Continuations, Pieces, continued, to_the_end
from kvcellar.server.answer.infilling import prompt_between
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.schemas.lookup import InfillRequest
from kvcellar.server.schemas.openai import CompletionRequest, SamplingFields
from kvcellar.server.state.conversations import Whose
from kvcellar.server.state.isolation import salt_for
from kvcellar.server.state.service import Service, service_of
from kvcellar.server.stream.replies import Frames, frame, sse
from kvcellar.server.stream.streams import MergedStream

router = APIRouter(tags=["Lookup"], route_class=BodyRoute)

_SAMPLERS = (*SAMPLER_SETTINGS, "penalties")
"""Those of llama.cpp that are done here, in an order of our own."""

_STOPS = {"eos": "eos", "stop_token": "eos", "stop_text": "word", "guide": "eos"}


@router.post("/infill", response_model=None)
async def infill(request: Request, body: InfillRequest) -> Response:
    """Write what belongs between ``input_prefix`` and ``input_suffix``, behind ``prompt``."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    asked = await _completion(service, path, body)
    batch = Continuations(
        asked, path, Whose(salt=salt_for(request)), {"model": service.models.public(path)}
    )
    started_s = time.perf_counter()
    stream = MergedStream(continued(service, batch))
    if body.stream:
        frames = InfillFrames(request, batch, started_s)
        return await sse(request, stream, frames, _ignored(body))
    await to_the_end(request, stream)
    note(request, prompt_tokens=batch.only.n_prompt, completion_tokens=len(batch.only.tokens))
    return JSONResponse(
        {**_end(batch, started_s), "content": batch.only.text}, headers=_ignored(body)
    )


async def _completion(service: Service, path: str, body: InfillRequest) -> CompletionRequest:
    """Return the completion that a filling is.

    Raises:
        ApiError: 400, the model has no tokens for it.
    """
    files = [(one.filename, one.text) for one in body.input_extra or ()]
    async with service.models.registry.use(path) as host:
        prompt, ends = await prompt_between(
            service,
            host,
            body.input_prefix,
            body.input_suffix,
            field="infill",
            begun=body.prompt,
            files=files,
        )
        most = host.context if body.n_predict in (None, -1) else body.n_predict
    said = {name: getattr(body, name) for name in SamplingFields.model_fields}
    said["stop_token_ids"] = [*(body.stop_token_ids or ()), *ends]
    return CompletionRequest.model_validate(
        {**said, "model": body.model, "prompt": prompt, "max_tokens": most}
    )


def _ignored(body: InfillRequest) -> dict[str, str]:
    """Return the header that names what is not looked at, the samplers among it."""
    samplers = body.samplers if isinstance(body.samplers, list) else ()
    names = [*body.ignored, *(f"samplers.{s[:40]}" for s in samplers if s not in _SAMPLERS)]
    said = ", ".join(name for name in names if name.isascii() and name.isprintable())
    return {"x-kvcellar-ignored": said} if said else {}


def _end(batch: Continuations, started_s: float) -> dict[str, Any]:
    """Return what is said at the end of a filling, but its text."""
    choice, total_s = batch.only, time.perf_counter() - started_s
    finish = choice.end.finish if choice.end is not None else None
    usage = choice.end.usage if choice.end is not None else None
    first_s = min((usage.time_to_first_token_s if usage else None) or 0.0, total_s)
    cached = usage.cached_tokens if usage else 0
    return {
        "index": 0,
        "content": "",
        "stop": True,
        "model": batch.head["model"],
        "tokens_predicted": len(choice.tokens),
        "tokens_evaluated": choice.n_prompt,
        "tokens_cached": cached,
        "truncated": False,
        "stop_type": _STOPS.get(finish.cause, "limit") if finish else "none",
        "stopping_word": (finish.stop_text if finish else None) or "",
        "timings": {
            "prompt_n": choice.n_prompt - cached,
            "prompt_ms": round(1000 * first_s, 3),
            "predicted_n": len(choice.tokens),
            "predicted_ms": round(1000 * (total_s - first_s), 3),
        },
        "kvcellar": batch.extra,
    }


class InfillFrames(Frames[Pieces]):
    """Pieces of a filling."""

    def __init__(self, request: Request, batch: Continuations, started_s: float) -> None:
        """Write the pieces of a request's only continuation."""
        super().__init__(request)
        self._batch = batch
        self._started_s = started_s

    async def of(self, number: int, item: Pieces) -> bytes:
        """Write the next tokens."""
        text = "".join(token.text for token in item)
        said: Mapping[str, Any] = {
            "index": 0,
            "content": text,
            "tokens": [token.token_id for token in item],
            "stop": False,
        }
        return frame(said) if text else b""

    def end(self) -> bytes:
        """Write the last text, and how it ended."""
        choice = self._batch.only
        note(self._request, prompt_tokens=choice.n_prompt, completion_tokens=len(choice.tokens))
        return frame({**_end(self._batch, self._started_s), "content": choice.rest})
