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
from kvcellar.store.shared.tier import SharedTier

_FILE = "signing.key"
_FILE_OF_ALL = "signing-shared.key"
_BYTES = 32
_SIGNED = "kvc1."
_SEALED = "kvc1s."


class Signer:
    """Signs reasoning with a key that only this store has, and knows its own signatures again.

    Stores with one shared place sign with one key.
    """

    def __init__(self, *keys: bytes) -> None:
        """Sign with the first of some keys, and know what was signed with any."""
        self._keys = keys

    def sign(self, text: str) -> str:
        """Return the signature of a text."""
        return _signed(self._keys[0], text)

    def has_signed(self, text: str, signature: str) -> bool:
        """Return true if a signature is this store's, of this text."""
        given = signature.encode()
        return any(hmac.compare_digest(_signed(key, text).encode(), given) for key in self._keys)

    def seal(self, text: str) -> str:
        """Return a text and its signature as one word, which says nothing to a person."""
        packed = zlib.compress(text.encode())
        return _SEALED + _written(_mac(self._keys[0], _SEALED, packed) + packed)

    def opened(self, sealed: str) -> str | None:
        """Return the text that was sealed; None where this store did not seal it."""
        with contextlib.suppress(ValueError):
            data = base64.urlsafe_b64decode(sealed.removeprefix(_SEALED).encode())
            mac, packed = data[:_BYTES], data[_BYTES:]
            is_own = any(hmac.compare_digest(mac, _mac(key, _SEALED, packed)) for key in self._keys)
            if is_own and sealed.startswith(_SEALED):
                return zlib.decompress(packed).decode()
        return None


def signer_of(folder: Path, shared: SharedTier | None = None) -> Signer:
    """Return the signer of a store's folder, which is the same after a restart.

    Args:
        folder: of the store.
        shared: its tier of several machines, whose key it is where they have one; a copy here is
            for when the place is away.

    Raises:
        StoreError: a key can be neither read nor made.
    """
    own = _key(folder / _FILE)
    if shared is None:
        return Signer(own)
    path = folder / _FILE_OF_ALL
    common = shared.agreed("signing", own)
    try:
        known = _read(path)
        if common is not None and common != known:
            _write(path, common)
            known = common
    except OSError as error:
        raise StoreError(f"the key of signatures {path} cannot be used: {error}") from error
    return Signer(own) if known is None or len(known) != _BYTES else Signer(known, own)


def _key(path: Path) -> bytes:
    """Return a store's own key, made where there is none."""
    try:
        key = _read(path)
        if key is None:
            _write(path, secrets.token_bytes(_BYTES), is_new=True)
            key = _read(path)
    except OSError as error:
        raise StoreError(f"the key of signatures {path} cannot be used: {error}") from error
    if key is None or len(key) != _BYTES:
        raise StoreError(
            f"{path} is no key of signatures, of {_BYTES} bytes; remove it, and what was signed "
            f"with it is not known again"
        )
    return key


def _write(path: Path, key: bytes, *, is_new: bool = False) -> None:
    """Write a key, whole or not at all; ``is_new``: only where no other process was first."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(open_own(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb") as file:
        file.write(key)
    if is_new:
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
    else:
        fresh.replace(path)


def _read(path: Path) -> bytes | None:
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            return file.read(_BYTES + 1)
    except FileNotFoundError:
        return None


def _signed(key: bytes, text: str) -> str:
    return _SIGNED + _written(_mac(key, _SIGNED, text.encode()))


def _mac(key: bytes, label: str, data: bytes) -> bytes:
    return hmac.digest(key, label.encode() + data, hashlib.sha256)


def _written(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()
