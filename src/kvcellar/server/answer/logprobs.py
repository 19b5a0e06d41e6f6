"""Log probabilities of tokens, as OpenAI's two protocols write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcellar.agents import ModelHost
from kvcellar.engine import Choice, Detokenizer
from kvcellar.engine.loop.generating import GeneratedToken
from kvcellar.engine.loop.token_bytes import token_bytes

LEAST = -9999.0
"""What stands for a log probability that no number of JSON's is."""


class ChatLogprobs:
    """Those of one answer in a chat, token by token as they come."""

    def __init__(self, host: ModelHost | None) -> None:
        """Begin an answer of a host's model."""
        known = host is not None and host.tokenizer is not None
        self._bytes = token_bytes(host.tokenizer) if host is not None and known else None
        self._is_first = True

    def of(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        """Return the next tokens of the answer; their bytes, joined, are its text."""
        return {"content": [self._of(token) for token in tokens], "refusal": None}

    def _of(self, token: GeneratedToken) -> dict[str, Any]:
        found = self._one(token.token_id, token.logprob)
        found["top_logprobs"] = [self._one(o.token_id, o.logprob) for o in token.top_logprobs]
        data = token.text.encode(errors="surrogatepass")  # a mark's token is no text
        if self._is_first and bytes(found["bytes"]) == b" " + data:
            found["token"], found["bytes"] = token.text, list(data)
            # the decoder drops the space of a text's first word
        self._is_first = False
        return found

    def _one(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        name = self._bytes.name(token_id) if self._bytes is not None else ""
        data = self._bytes.of(token_id) if self._bytes is not None else b""
        return {"token": name, "logprob": _number(logprob), "bytes": list(data)}


class LegacyLogprobs:
    """Those of one completion, prompt and continuation, piece by piece."""

    def __init__(self, host: ModelHost | None) -> None:
        """Begin an answer of a host's model."""
        known = host is not None and host.tokenizer is not None
        self._bytes = token_bytes(host.tokenizer) if host is not None and known else None
        self._at = 0

    def skip(self, text: str) -> None:
        """Skip a text that goes before, whose tokens are not shown."""
        self._at += len(text)

    def of(self, pieces: Sequence[GeneratedToken]) -> dict[str, Any]:
        """Return the next pieces; a token without a log probability is the text's first."""
        offsets = []
        for piece in pieces:
            offsets.append(self._at)
            self._at += len(piece.text)
        return {
            "tokens": [self._name(piece.token_id) for piece in pieces],
            "token_logprobs": [
                None if piece.logprob is None else _number(piece.logprob) for piece in pieces
            ],
            "top_logprobs": [
                None if piece.logprob is None else self._top(piece) for piece in pieces
            ],
            "text_offset": offsets,
        }

    def _top(self, piece: GeneratedToken) -> dict[str, float]:
        """Return the likeliest tokens and the one that is there, one of each name."""
        found = [(piece.logprob, piece.token_id)]
        found += [(other.logprob, other.token_id) for other in piece.top_logprobs]
        top: dict[str, float] = {}
        for logprob, token_id in sorted(found, key=lambda one: -_number(one[0])):
            top.setdefault(self._name(token_id), _number(logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Return a token's text; as OpenAI does its bytes, where it is a part of a character."""
        if self._bytes is None:
            return ""
        data = self._bytes.of(token_id)
        try:
            data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return self._bytes.name(token_id)


def pieces_of(
    host: ModelHost, tokens: Sequence[int], scores: Sequence[Choice], *, has_specials: bool
) -> list[GeneratedToken]:
    """Return a prompt's tokens as pieces of its text; the first has no log probability.

    Args:
        host: whose tokenizer they are of.
        tokens: all of the prompt.
        scores: of the tokens from the second on.
        has_specials: whether special tokens are in the text that is shown.
    """
    names = token_bytes(host.tokenizer)
    assert host.tokenizer is not None
    detokenizer = Detokenizer(host.tokenizer)
    pieces = []
    for i, token_id in enumerate(tokens):
        text = detokenizer.push(token_id)
        if has_specials and not names.of(token_id):
            text += names.name(token_id)
        known = scores[i - 1] if i else Choice(token_id)
        text += detokenizer.flush() if i == len(tokens) - 1 else ""
        pieces.append(GeneratedToken(token_id, text, known.logprob, known.top_logprobs))
    return pieces


def prompt_logprobs(
    host: ModelHost | None, tokens: Sequence[int], scores: Sequence[Choice], n: int
) -> list[dict[str, Any] | None]:
    """Return the log probabilities of a prompt's tokens as vLLM writes them.

    Args:
        host: whose tokenizer they are of.
        tokens: all of the prompt; the first has none.
        scores: of the tokens from the second on.
        n: how many of the likeliest are told beside each.
    """
    known = host is not None and host.tokenizer is not None
    names = token_bytes(host.tokenizer) if host is not None and known else None

    def said(token_id: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        name = names.name(token_id) if names is not None else None
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": name}

    found: list[dict[str, Any] | None] = [None] if tokens else []
    for score in scores:
        top = score.top_logprobs[:n]
        ranks = {other.token_id: i for i, other in enumerate(score.top_logprobs, 1)}
        rank = ranks.get(score.token_id)
        of_token = {str(score.token_id): said(score.token_id, score.logprob, rank)}
        of_top = {
            str(other.token_id): said(other.token_id, other.logprob, ranks[other.token_id])
            for other in top
        }
        found.append({**of_token, **of_top})
    return found


def _number(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)
