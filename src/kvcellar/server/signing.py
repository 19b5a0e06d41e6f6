"""Signatures of what a model thought, by which the server knows it when a client sends it back."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import zlib
from pathlib import Path

from kvcellar.errors import StoreError
from kvcellar.home import open_own

_FILE = "signing.key"
_BYTES = 32
_SIGNED = "kvc1."
_SEALED = "kvc1s."


class Signer:
    """Signs reasoning with a key that only this store has, and knows its own signatures again."""

    def __init__(self, key: bytes) -> None:
        """Sign with a key."""
        self._key = key

    def sign(self, text: str) -> str:
        """Return the signature of a text."""
        return _SIGNED + _written(self._mac(_SIGNED, text.encode()))

    def has_signed(self, text: str, signature: str) -> bool:
        """Return true if a signature is this store's, of this text."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode())

    def seal(self, text: str) -> str:
        """Return a text and its signature as one word, which says nothing to a person."""
        packed = zlib.compress(text.encode())
        return _SEALED + _written(self._mac(_SEALED, packed) + packed)

    def opened(self, sealed: str) -> str | None:
        """Return the text that was sealed; None where this store did not seal it."""
        with contextlib.suppress(ValueError):
            data = base64.urlsafe_b64decode(sealed.removeprefix(_SEALED).encode())
            mac, packed = data[:_BYTES], data[_BYTES:]
            is_own = hmac.compare_digest(mac, self._mac(_SEALED, packed))
            if is_own and sealed.startswith(_SEALED):
                return zlib.decompress(packed).decode()
        return None

    def _mac(self, label: str, data: bytes) -> bytes:
        return hmac.digest(self._key, label.encode() + data, hashlib.sha256)


def signer_of(folder: Path) -> Signer:
    """Return the signer of a store's folder, which is the same after a restart.

    Raises:
        StoreError: its key can be neither read nor made.
    """
    path = folder / _FILE
    try:
        key = _read(path)
        if key is None:
            fresh = folder / f"{_FILE}.{secrets.token_hex(8)}"
            with os.fdopen(open_own(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb") as file:
                file.write(secrets.token_bytes(_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(fresh, path)
            fresh.unlink()
            key = _read(path)
    except OSError as error:
        raise StoreError(f"the key of signatures {path} cannot be used: {error}") from error
    if key is None or len(key) != _BYTES:
        raise StoreError(
            f"{path} is no key of signatures, of {_BYTES} bytes; remove it, and what was signed "
            f"with it is not known again"
        )
    return Signer(key)


def _read(path: Path) -> bytes | None:
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            return file.read(_BYTES + 1)
    except FileNotFoundError:
        return None


def _written(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()
