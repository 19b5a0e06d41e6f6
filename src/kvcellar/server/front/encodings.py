"""Bodies that come packed: gzip, deflate and zstd, unpacked piece by piece."""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Iterator
from typing import Any

from kvcellar.server.errors import ApiError

ENCODINGS = ("gzip", "deflate", "zstd")
_PIECE_BYTES = 64 << 10
_SLICE_BYTES = 4 << 10
"""How much is yielded at once, and how much packed is taken for it, so that a bomb is soon seen."""
_WINDOW_LOG = 23
"""Bits of the longest window of zstd, 8 MiB: what RFC 9659 wants of those who read bodies."""

_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class Unpacking:
    """A packed body on its way.

    Attributes:
        n_packed: bytes of it that were taken in.
    """

    def __init__(self, encoding: str) -> None:
        """Unpack what comes in an encoding.

        Raises:
            ApiError: 415, it is none of those that are read here.
        """
        name = encoding.strip().lower().removeprefix("x-")
        if name not in ENCODINGS:
            raise _unknown(encoding)
        self._name = name
        self._zstd: Any = _module_of_zstd(encoding) if name == "zstd" else None
        self._troubles: tuple[type[Exception], ...] = (zlib.error,)
        if self._zstd is not None:
            self._troubles = (self._zstd.ZstdError,)
        self._part: Any = None
        self.n_packed = 0

    def pieces(self, packed: bytes, *, is_last: bool) -> Iterator[bytes]:
        """Yield what the next packed bytes hold, in pieces of at most 64 KiB.

        Raises:
            ApiError: 400, it is no such encoding, or ends in the middle.
        """
        try:
            for i in range(0, len(packed), _SLICE_BYTES):
                part = packed[i : i + _SLICE_BYTES]
                self.n_packed += len(part)
                yield from self._unpacked(part)
        except self._troubles as error:
            raise self._broken(str(error)) from error
        if is_last and self._part is not None and not self._part.eof:
            raise self._broken("it ends in the middle")

    def _unpacked(self, packed: bytes) -> Iterator[bytes]:
        while packed:
            if self._part is None or self._part.eof:  # another of those that follow each other
                if self._name == "deflate" and self._part is not None:
                    raise self._broken("something follows its end")
                self._part = self._new_part(packed)
            piece = self._part.decompress(packed, _PIECE_BYTES)
            while piece:
                yield piece
                rest = b"" if self._zstd is not None else self._part.unconsumed_tail
                is_full = not self._part.eof and (len(piece) == _PIECE_BYTES or rest)
                piece = self._part.decompress(rest, _PIECE_BYTES) if is_full else b""
            packed = self._part.unused_data if self._part.eof else b""

    def _new_part(self, packed: bytes) -> Any:
        if self._zstd is not None:
            longest = {self._zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
            return self._zstd.ZstdDecompressor(options=longest)
        if self._name == "gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        # what is called deflate comes with zlib's header, and from some without
        has_header = packed[0] & 0x0F == 8 and (
            len(packed) < 2 or not (packed[0] << 8 | packed[1]) % 31
        )
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)

    def _broken(self, why: str) -> ApiError:
        return ApiError(
            400,
            f"the body is no {self._name}, as its Content-Encoding says: {why[:200]}; send it as "
            f"it is, or packed so",
            "request_body_encoding_invalid",
        )


def unpacking_of(encoding: str | None) -> Unpacking | None:
    """Return what unpacks a body of a Content-Encoding; None for one that comes as it is.

    Raises:
        ApiError: 415, nobody here does.
    """
    plain = (encoding or "").strip().lower()
    return None if plain in ("", "identity") else Unpacking(plain)


def _module_of_zstd(encoding: str) -> Any:
    try:
        return importlib.import_module(_ZSTD)
    except ModuleNotFoundError:
        raise _unknown(encoding) from None


def _unknown(encoding: str) -> ApiError:
    return ApiError(
        415,
        f"a body in the encoding {encoding[:40]!r} is not read here; send it in one of "
        f"{', '.join(ENCODINGS)}, or as it is",
        "request_body_encoding_unsupported",
    )
