"""A program's file: whole or refused before the runtime sees it, and what travels inside.

An exported program ends with a seal: its length and a checksum of every byte before. ExecuTorch
finds what it reads by offsets and never sees the seal. Programs exported by others have none; of
those the length that their header names is checked, and the runtime verifies that their tables are
consistent.

The tokenizer, the chat template and the configs are a zip archive in a constant of the program, so
one file is all that is needed.
"""

from __future__ import annotations

import io
import mmap
import struct
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import xxhash

from kvcellar.errors import ModelError

_SEAL = struct.Struct("<8sIIQ16s")
_MAGIC = b"KVCELLAR"
_VERSION = 1
_HEADER = struct.Struct("<4s4sIQQQ")
"""ExecuTorch's: after 4 bytes of offset, the file's type, then the extended header."""

_CHUNK_BYTES = 1 << 24

_checked: dict[Path, tuple[int, ...]] = {}
_lock = threading.Lock()


def seal(file: BinaryIO, n_bytes: int) -> None:
    """Append the seal to a program of ``n_bytes``; ``file`` is open for reading and writing."""
    hasher = xxhash.xxh3_128()
    file.seek(0)
    left = n_bytes
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        hasher.update(chunk)
        left -= len(chunk)
    file.seek(n_bytes)
    file.write(_SEAL.pack(_MAGIC, _VERSION, 0, n_bytes, hasher.digest()))


def check_file(path: Path) -> bool:
    """Make sure that a program is whole; whether it carries a seal, so that every byte is known.

    A file that was checked is not read again while its size and times stay the same.

    Raises:
        ModelError: no such file, not a program, truncated or damaged.
    """
    try:
        stat = path.stat()
        with path.open("rb") as file:
            head = file.read(4 + _HEADER.size)
            _check_header(path, head, stat.st_size)
            file.seek(max(0, stat.st_size - _SEAL.size))
            end = file.read(_SEAL.size)
            if not end.startswith(_MAGIC) or len(end) < _SEAL.size:
                return False
            _, version, _, length, digest = _SEAL.unpack(end)
            if length != stat.st_size - _SEAL.size or version != _VERSION:
                raise ModelError(
                    f"{path} is damaged: its seal is of {length} bytes and version {version}, the "
                    f"file has {stat.st_size - _SEAL.size} before it; export or copy it again"
                )
            stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            key = path.resolve()
            with _lock:
                if _checked.get(key) == stamp:
                    return True
            hasher = xxhash.xxh3_128()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for start in range(0, length, _CHUNK_BYTES):
                    with memoryview(data) as view:
                        hasher.update(view[start : min(length, start + _CHUNK_BYTES)])
            if hasher.digest() != digest:
                raise ModelError(
                    f"{path} is damaged: its bytes are not those that were exported (the checksum "
                    f"differs); export or copy it again"
                )
            with _lock:
                _checked[key] = stamp
            return True
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_header(path: Path, head: bytes, size_bytes: int) -> None:
    if len(head) < 4 + _HEADER.size or head[4:6] != b"ET":
        raise ModelError(
            f"{path} is not an ExecuTorch program; give a .pte file, such as 'kvcellar export' "
            f"writes"
        )
    _, magic, length, program, base, segments = _HEADER.unpack(head[4 : 4 + _HEADER.size])
    if magic != b"eh00":
        return  # of an old exporter, without segments
    wanted = max(program, base + (segments if length >= 32 else 0))
    if size_bytes < wanted:
        raise ModelError(
            f"{path} is truncated: {size_bytes} bytes of at least {wanted}; export or copy it again"
        )


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Files as one archive, always the same for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def unpack_files(data: bytes, folder: Path) -> None:
    """Write the files of ``pack_files`` to ``folder``.

    Raises:
        ModelError: it is no such archive, or has names that lead elsewhere.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                if name != Path(name).name:
                    raise ModelError(f"the program carries a file {name!r}, which is no plain name")
                (folder / name).write_bytes(archive.read(name))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ModelError(f"the program's tokenizer cannot be unpacked: {error}") from error
