"""Errors as HTTP: a status, and a body in the words of the protocol that was spoken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvcellar.agents import without_salt
from kvcellar.errors import (
    AgentError,
    AgentNameError,
    BackendError,
    CacheFullError,
    ConfigError,
    ContextError,
    DeadlineError,
    DeviceMemoryError,
    EngineClosedError,
    EngineFailedError,
    GrammarError,
    KVCellarError,
    LogitsError,
    ModelError,
    MovedOnError,
    PictureError,
    PromptError,
    StoreError,
    UnknownAgentError,
    UnknownReferenceError,
)

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_DETAILS = {
    "thread_not_found",
    "thread_fingerprint_mismatch",
    "thread_unsupported_request",
    "request_body_encoding_invalid",
    "request_body_encoding_unsupported",
    "request_body_too_large_after_decoding",
}
"""Codes that Anthropic's clients look for, as ``error.details.error_code``."""
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

AMBIGUOUS_LENGTH = "ambiguous_length"
"""Code of a request whose end cannot be told: what follows it on its connection is not read."""


class ApiError(KVCellarError):
    """A refusal with a status.

    Attributes:
        status: of HTTP.
        code: a word for programs.
        param: the field that is meant, if one is.
        retry_after_s: seconds after which it may work.
        details: numbers that the message names, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """See the attributes."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class ContextExceeded(ApiError):  # noqa: N818
    """A prompt that no waiting makes fit: 400, in the words that clients of each protocol look for.

    Attributes:
        for_anthropic: the message below ``/v1/messages``.
    """

    def __init__(
        self,
        n_tokens: int,
        context: int,
        *,
        max_positions: int | None = None,
        is_least: bool = False,
    ) -> None:
        """Say how long the prompt is and how long it may be.

        Args:
            n_tokens: of the prompt.
            context: the most that it may have.
            max_positions: what the model was made for, where this server gives it less room.
            is_least: whether the prompt has at least so many tokens, and nobody counted them all.
        """
        least = "at least " if is_least else ""
        self._said = (
            f"This model's maximum context length is {context} tokens. However, your {{what}} "
            f"resulted in {least}{n_tokens} tokens. Please reduce the length of the {{what}}."
        )
        super().__init__(
            400,
            self._said.format(what="prompt"),
            "context_length_exceeded",
            details={"needed": n_tokens, "available": context},
        )
        self.for_anthropic = f"prompt is too long: {least}{n_tokens} tokens > {context} maximum"
        if max_positions is not None and max_positions > context:
            self.details["hint"] = (
                f"the model was made for {max_positions} tokens and this server's cache has room "
                f"for {context}; whoever starts it can give it more --capacity or --memory"
            )

    def of_field(self, field: str) -> str:
        """Say it in OpenAI's words of the field that the prompt came in."""
        return self._said.format(what=field)


class ClientGone(Exception):  # noqa: N818
    """The client has left, so there is no answer to give."""


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownAgentError, 404, "agent_not_found"),
    (UnknownReferenceError, 404, "not_found"),
    (DeadlineError, 429, "no_room_in_time"),
    (CacheFullError, 503, "cache_full"),
    (DeviceMemoryError, 503, "out_of_memory"),
    (PictureError, 400, "invalid_image"),
    (PromptError, 400, "invalid_prompt"),
    (ConfigError, 400, "invalid_value"),
    (AgentNameError, 400, "invalid_agent_id"),
    (AgentError, 409, "agent_conflict"),
    (LogitsError, 500, "model_failed"),
    (ModelError, 400, "model_refuses"),
    (BackendError, 503, "model_unavailable"),
    (EngineClosedError, 503, "shutting_down"),
    (StoreError, 507, "store_failed"),
)


def as_api_error(error: Exception) -> ApiError:
    """Turn an exception of this package into a refusal; any other is our own fault: 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFailedError):
        return ApiError(503, _why_failed(error), "engine_failed")
    if isinstance(error, ContextError):
        return ContextExceeded(error.n_tokens, error.context, is_least=True)
    if isinstance(error, MovedOnError):
        known = ("follows", "history_digest", "n_turns", "is_under_way", "asked")
        details = {name: getattr(error, name) for name in known}
        return ApiError(409, str(error), "history_moved_on", param="follows", details=details)
    if isinstance(error, GrammarError):
        return ApiError(400, str(error), error.code, param=error.param or None)
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            retry = 2.0 if status in (429, 503) else None
            return ApiError(status, str(error), code, retry_after_s=retry)
    return ApiError(
        500,
        f"the server failed with {type(error).__name__}; its log has the rest",
        "internal_error",
    )


def _why_failed(error: EngineFailedError) -> str:
    """Say why a model's engine has stopped, without what only the log may say."""
    return (
        f"the engine of this model has stopped after {type(error.__cause__).__name__} and answers "
        f"no more; the server's log has the rest; it has to be started again"
    )


_PROMPT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}
"""Route -> the field that a prompt comes in."""


def error_body(error: ApiError, request: Request) -> dict[str, Any]:
    """Write a refusal as Anthropic below ``/v1/messages``, Ollama below ``/api``, else OpenAI."""
    message = without_salt(str(error))
    if request.url.path.startswith("/api/"):
        return {"error": message}
    if request.url.path.startswith("/v1/messages"):
        if isinstance(error, ContextExceeded):
            message = error.for_anthropic
        kind = _ANTHROPIC_TYPES.get(error.status)
        kind = kind or ("invalid_request_error" if error.status < 500 else "api_error")
        inside = {"type": kind, "message": message, **error.details}
        if error.code in _ANTHROPIC_DETAILS:
            inside["details"] = {"error_code": error.code}
        return {"type": "error", "error": inside, "request_id": request_id_of(request)}
    kind = _OPENAI_TYPES.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < 500 else "server_error")
    param = error.param
    if isinstance(error, ContextExceeded) and request.url.path in _PROMPT_FIELDS:
        param = _PROMPT_FIELDS[request.url.path]
        message = error.of_field(param)
    said = {"message": message, "type": kind, "param": param, "code": error.code}
    return {"error": {**said, **error.details}}


def error_response(error: ApiError, request: Request) -> JSONResponse:
    """Write a refusal as a whole answer."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == AMBIGUOUS_LENGTH:
        headers["Connection"] = "close"
    if error.code == "request_body_encoding_unsupported":
        headers["Accept-Encoding"] = "gzip, deflate, zstd, identity"
    return JSONResponse(error_body(error, request), error.status, headers)


def request_id_of(request: Request) -> str:
    """Return the id under which a request is in the log."""
    return str(request.scope.get("kvcellar.request_id", ""))
