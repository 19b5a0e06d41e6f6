"""A model's tokenizer as the grammar's library has it, in which tags of text are text."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from llguidance import LLTokenizer

from kvcellar.models.text.templates import text_of_templates


def guidance_tokenizer(
    tokenizer: Any, n_vocab: int, eos_ids: list[int] | None, marks: Collection[str] = ()
) -> LLTokenizer:
    """Return the library's tokenizer.

    It takes every added token in angle brackets for a control token, which can come in no text.
    Some vocabularies have HTML's tags among them, so that a model could write no page.

    Args:
        tokenizer: of the model.
        n_vocab: tokens of the model.
        eos_ids: those that end an answer.
        marks: of the model's dialect, which are no text.

    Raises:
        ValueError: the library has no way to read it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"a {type(tokenizer).__name__} has no tokenizer of the library tokenizers")
    tags = tags_of_text(tokenizer, marks)
    value = json.loads(backend.to_str())
    value.update(padding=None, truncation=None)
    if eos_ids is None and tokenizer.eos_token_id is not None:
        eos_ids = [tokenizer.eos_token_id]
    if not tags or not isinstance(value["model"].get("vocab"), dict):
        return LLTokenizer(json.dumps(value), n_vocab=n_vocab, eos_token=eos_ids)
    vocabulary = value["model"]["vocab"]
    for token in value["added_tokens"]:  # one that the vocabulary lacks would get another id
        vocabulary.setdefault(token["content"], token["id"])
    value["added_tokens"] = [one for one in value["added_tokens"] if one["content"] not in tags]
    return LLTokenizer(json.dumps(value), n_vocab=n_vocab, eos_token=eos_ids)


def tags_of_text(tokenizer: Any, marks: Collection[str] = ()) -> set[str]:
    """Return tags that a vocabulary adds and that are text: in no template, and nothing special."""
    template = text_of_templates(tokenizer)
    return {
        token.content
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if not token.special
        and token.content.startswith("<")
        and token.content.endswith(">")
        and token.content.strip("</>").isalnum()
        and not token.content.startswith("<unused")
        and token.content not in template
        and token.content not in marks
    }
