"""The bytes of single tokens: joined, they are the UTF-8 of the text that the tokens make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token of one tokenizer.

    A token may be a part of a character: the vocabulary of a byte-level BPE writes bytes as
    characters of its own, and one with byte fallback has a token for each byte. Decoding such a
    token alone gives U+FFFD; its entry in the vocabulary tells its byte.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Read how ``tokenizer`` decodes; any with ``decode``, those of transformers exactly."""
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {int(i): (str(t.content), bool(t.special)) for i, t in added.items()}
        self._of_piece = _rule(getattr(tokenizer, "backend_tokenizer", None))

    def of(self, token_id: int) -> bytes:
        """Return what the token adds to a text; nothing for a special one."""
        content, is_special = self._added.get(token_id, (None, False))
        if is_special:
            return b""
        if content is not None:
            return content.encode()
        if self._of_piece is not None:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            return self._of_piece(piece) if isinstance(piece, str) else b""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=True)
        return text.encode()

    def name(self, token_id: int) -> str:
        """Return the token as text, with U+FFFD for parts of characters; a special one's name."""
        content, is_special = self._added.get(token_id, (None, False))
        if is_special and content is not None:
            return content
        return self.of(token_id).decode(errors="replace")


_known: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens; made once for each tokenizer."""
    found = _known.get(tokenizer)
    if found is None:
        found = _known[tokenizer] = TokenBytes(tokenizer)
    return found


def _rule(backend: Any) -> Callable[[str], bytes] | None:
    """Return how an entry of the vocabulary becomes bytes; None for an unknown decoder."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _of_byte_level
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    replacements = []
    for step in steps:
        if step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replacements.append((step["pattern"]["String"], step["content"]))

    def of_piece(piece: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(piece) if "ByteFallback" in kinds else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return of_piece


def _byte_characters() -> Mapping[str, int]:
    """Return the character that a byte-level vocabulary writes for each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {
        **{chr(byte): byte for byte in shown},
        **{chr(256 + i): byte for i, byte in enumerate(hidden)},
    }


_BYTES = _byte_characters()


def _of_byte_level(piece: str) -> bytes:
    if all(char in _BYTES for char in piece):
        return bytes(_BYTES[char] for char in piece)
    return piece.encode()
