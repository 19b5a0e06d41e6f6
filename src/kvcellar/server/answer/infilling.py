"""Prompts for models that fill in what belongs between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.agents import ModelHost
from kvcellar.hosting.text_limits import refuse_bytes, refuse_text, size_of
from kvcellar.models.text.infill import fill_prompt, fill_tokens
from kvcellar.server.errors import ApiError
from kvcellar.server.state.service import Service


async def prompt_between(
    service: Service,
    host: ModelHost,
    before: str,
    behind: str,
    *,
    field: str,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
) -> tuple[list[int], list[int]]:
    """Return the prompt of a filling, and the tokens that end one besides the model's own.

    Args:
        service: whose model it is.
        host: of the model.
        before: text before the gap.
        behind: text behind it.
        field: that asks for it, for a refusal.
        begun: text with which the filling begins.
        files: names and texts of others, which are read first.

    Raises:
        ApiError: 400, the model has no tokens for filling in.
        ContextError: the texts are longer than its context, as their bytes say.
    """
    tokenizer = host.tokenizer
    fill = None if tokenizer is None else fill_tokens(tokenizer)
    if fill is None:
        raise ApiError(
            400,
            f"{field} is not honoured: model {service.models.public(host.name)!r} has no tokens "
            f"for filling in the middle; ask one that has, such as a coder's base model",
            "unsupported_field",
            param=field,
        )
    size = size_of(before, behind, begun, list(files))
    refuse_bytes(tokenizer, size.n_bytes, host.context)

    def encode() -> list[int]:
        for text in (before, behind, begun, *(text for _, text in files)):
            refuse_text(tokenizer, text, host.context)
        return fill_prompt(tokenizer, fill, before, behind, begun=begun, files=files)

    return await service.agents.work.run(size.cost, encode), list(fill.ends)
