"""How an answer's frames go out: once the first is there, so that an error is still a status."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.server.asking import service_of
from kvcellar.server.errors import as_api_error, error_body
from kvcellar.server.streams import SseResponse, Stream, frame, until_gone

__all__ = ["sse"]


async def sse(
    request: Request,
    frames: Stream[bytes],
    *,
    ping: bytes = b": ping\n\n",
    error_event: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """The response, once its first frame is there or the client has waited for a while.

    Raises:
        Exception: what went wrong before the first frame.
        ClientGone: nobody waits any more.
    """
    config = service_of(request).config
    try:
        await until_gone(request, frames.opened(config.ping_s))
    except BaseException:
        await frames.close()
        raise

    def on_error(error: Exception) -> bytes:
        return frame(error_body(as_api_error(error), request), error_event)

    return SseResponse(
        frames,
        on_error,
        ping=ping,
        ping_s=config.ping_s,
        send_timeout_s=config.send_timeout_s,
        headers={**(headers or {}), **request.scope.get("kvcellar.headers", {})},
    )
