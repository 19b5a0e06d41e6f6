"""One file: a safetensors container whose first metadata entry is a checksum of all its bytes.

Written and read here by hand, so that a file is one buffer: filled once, written with one call,
read into place with its checksum computed on the way. Any safetensors library reads it too.

The checksum is xxh3_128 over the whole file with the 32 digits of the checksum itself as zeros. It
finds accidents. It is no signature: who can write to the folder can write whatever they like.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcellar.backends.host_memory import HEADROOM, empty_bytes
from kvcellar.home import open_own
from kvcellar.store.values.layout import NUMPY, Array

Bytes = NDArray[np.uint8]

VERSION = "1"
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors format allows."""

MAX_SIDE = 1 << 48

_START = b'{"__metadata__":{"checksum":"xxh3_128:'
_DIGITS = 32
_ZEROS = b"0" * _DIGITS
_CHUNK_BYTES = 1 << 18
_ALIGN = 64


class DamagedError(Exception):
    """A file's bytes are not what was written, or not what its name says; not for callers."""


class BrokenError(DamagedError):
    """A file's bytes are not what anybody wrote, not even a later version of this package."""


class Tensor(NamedTuple):
    """An array and its type as safetensors calls it (bfloat16 is held as uint16)."""

    dtype: str
    array: Array


@dataclass(frozen=True, slots=True, eq=False)
class FileBytes:
    """A whole file in memory.

    Attributes:
        data: the file's bytes.
        metadata: its ``__metadata__``.
        tensors: views of ``data``.
    """

    data: Bytes
    metadata: dict[str, str]
    tensors: dict[str, Array]

    @property
    def checksum(self) -> str:
        """32 hexadecimal digits."""
        return self.metadata["checksum"].removeprefix("xxh3_128:")


def pack(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], memory: Bytes | None = None
) -> FileBytes:
    """Lay out a file in one buffer and compute its checksum. Arrays are copied once, or not at all.

    Args:
        tensors: by name.
        metadata: of the file, beside its checksum.
        memory: a piece of ``empty_arrays``, which is the file's from then on where its end is the
            arrays' in their order there: they stay in place. None: all are copied.
    """
    names = sorted(tensors, key=lambda name: -NUMPY[tensors[name].dtype].itemsize)
    header: dict[str, Any] = {
        "__metadata__": {"checksum": f"xxh3_128:{_ZEROS.decode()}", **metadata}
    }
    at = 0
    for name in names:
        dtype, array = tensors[name]
        size = array.size * NUMPY[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    assert text.startswith(_START)
    text += b" " * (-(8 + len(text)) % _ALIGN)
    base = 8 + len(text)
    arrays = {name: tensors[name].array for name in names}
    data = None if memory is None else _around(memory, base, at, header, arrays)
    if data is None:
        data = empty_bytes(base + at)
    data[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    data[8:base] = np.frombuffer(text, np.uint8)
    views = _views(data, base, header)
    for name in names:
        if _address(views[name]) != _address(arrays[name]):
            np.copyto(views[name], arrays[name], casting="equiv")
    digest = xxhash.xxh3_128_hexdigest(data.data)
    data[8 + len(_START) : 8 + len(_START) + _DIGITS] = np.frombuffer(digest.encode(), np.uint8)
    header["__metadata__"]["checksum"] = f"xxh3_128:{digest}"
    return FileBytes(data, header["__metadata__"], views)


def _around(
    memory: Bytes, base: int, size: int, header: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Bytes | None:
    """Return the part of a piece of memory that is a file around its last arrays; None: no such.

    What is no array of the piece's has to fit into its headroom.
    """
    start, n_here = memory.nbytes - size - base, 0
    if start < 0:
        return None
    for name, array in arrays.items():
        at = start + base + header[name]["data_offsets"][0]
        if at >= HEADROOM and array.nbytes:
            if _address(array) != _address(memory) + at or not array.flags.c_contiguous:
                return None
            n_here += array.nbytes
    return memory[start:] if n_here == memory.nbytes - HEADROOM else None


def _address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def read_file(path: Path) -> FileBytes:
    """Read and verify a file.

    Raises:
        DamagedError: it is not as it was written.
        OSError: it cannot be read.
    """
    with _opened_file(path) as file:
        return read_from(file, os.fstat(file.fileno()).st_size)


def read_from(file: BinaryIO | Any, size_bytes: int) -> FileBytes:
    """Read and verify the next ``size_bytes`` of a file; as :func:`read_file`."""
    if size_bytes < 8:
        raise BrokenError(f"{size_bytes} bytes are too few for a header")
    data = empty_bytes(size_bytes)
    view = data.data
    _fill(file, view[:8])
    length = int.from_bytes(view[:8], "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise BrokenError(f"a header of {length} bytes in a file of {size_bytes}")
    base = 8 + length
    _fill(file, view[8:base])
    head = bytes(view[:base])
    hasher = xxhash.xxh3_128(_without_checksum(head))
    for at in range(base, size_bytes, _CHUNK_BYTES):
        chunk = view[at : at + _CHUNK_BYTES]
        _fill(file, chunk)
        hasher.update(chunk)
    return _opened(data, head, hasher.hexdigest())


def read_header(path: Path) -> tuple[dict[str, str], Array | None]:
    """Read the metadata and ``tokens`` of a file; its other bytes are not verified.

    Raises:
        DamagedError: the header cannot be read.
        OSError: the file cannot be read.
    """
    with _opened_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(MAX_HEADER_BYTES, size_bytes - 8):
            raise DamagedError(f"{size_bytes} bytes without a whole header")
        header = _parse(file.read(length), size_bytes - 8 - length)
        tokens = None
        if "tokens" in header:
            if header["tokens"]["dtype"] != "I64" or len(header["tokens"]["shape"]) != 1:
                raise DamagedError("its tokens are no list of integers")
            start_at, stop = header["tokens"]["data_offsets"]
            file.seek(8 + length + start_at)
            tokens = np.frombuffer(file.read(stop - start_at), NUMPY["I64"])
        return header["__metadata__"], tokens


@contextmanager
def _opened_file(path: Path) -> Iterator[BinaryIO | Any]:
    try:
        fd = open_own(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL):
            raise DamagedError(error.strerror) from error
        raise
    with os.fdopen(fd, "rb", buffering=0) as file:
        yield file


def _fill(file: Any, view: memoryview) -> None:
    at = 0
    while at < len(view):
        n = file.readinto(view[at:])
        if not n:
            raise BrokenError("the file ends early")
        at += n


def _without_checksum(head: bytes) -> bytes:
    at = 8 + len(_START)
    if head[8:at] != _START:
        raise BrokenError("the header does not begin with a checksum")
    return head[:at] + _ZEROS + head[at + _DIGITS :]


def _opened(data: Bytes, head: bytes, digest: str) -> FileBytes:
    at = 8 + len(_START)
    if head[at : at + _DIGITS] != digest.encode():
        raise BrokenError("the checksum does not fit the bytes")
    header = _parse(head[8:], len(data) - len(head))
    try:
        views = _views(data, len(head), header)
    except ValueError as error:  # sides whose product is 0 and that no array can have
        raise DamagedError("a tensor has a shape that cannot be") from error
    return FileBytes(data, header["__metadata__"], views)


def _parse(text: bytes, n_body_bytes: int) -> dict[str, Any]:
    """Read the header as an object whose tensors fill the body exactly."""
    try:
        header: dict[str, Any] = json.loads(text)
        metadata = header["__metadata__"]
        at = 0
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, stop = tensor["data_offsets"]
            shape = tensor["shape"]
            if not all(type(n) is int and 0 <= n <= MAX_SIDE for n in shape):
                raise DamagedError(f"tensor {name[:40]!r} has a shape that cannot be")
            size = math.prod(shape) * NUMPY[tensor["dtype"]].itemsize
            if (start, stop) != (at, at + size):
                raise DamagedError(f"tensor {name[:40]!r} lies where it cannot")
            at = stop
        if at != n_body_bytes or not all(isinstance(v, str) for v in metadata.values()):
            raise DamagedError(f"tensors of {at} bytes in a body of {n_body_bytes}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"the header cannot be read ({type(error).__name__})") from error
    if metadata.get("version") != VERSION:
        raise DamagedError(f"format version {metadata.get('version')!r}, {VERSION} is known")
    return header


def _views(data: Bytes, base: int, header: Mapping[str, Any]) -> dict[str, Array]:
    views = {}
    for name, tensor in header.items():
        if name != "__metadata__":
            start, stop = tensor["data_offsets"]
            flat = data[base + start : base + stop].view(NUMPY[tensor["dtype"]])
            views[name] = flat.reshape(tensor["shape"])
    return views
