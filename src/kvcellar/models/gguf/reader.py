"""Headers of GGUF files: metadata and where each tensor lies, with nothing taken on trust.

Such files come from strangers. Every length is held against the bytes that are there before
anything is made of it, so that a file that lies costs no more than a file that does not.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.errors import ModelError

_MAGIC = b"GGUF"
_OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Types of values with a fixed size, by the format's numbers."""

_STRING, _ARRAY = 8, 9
_MOST_STRINGS = 1 << 22
"""Strings in one list; the largest vocabularies have a sixteenth of that."""

_MOST_DIMS = 4
_MOST_ALIGNMENT = 1 << 16
_LONGEST_NAME = 1 << 16
"""Bytes of a key or of a tensor's name."""

TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Types of tensors that are read: name, numbers of a block, and its bytes."""

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Place of one tensor.

    Attributes:
        path: of the file that holds it.
        shape: as torch has it, the rows' length last.
        kind: number of its type, one of ``TYPES``.
        start: of its first byte in the file.
        n_bytes: that it takes there.
    """

    path: Path
    shape: tuple[int, ...]
    kind: int
    start: int
    n_bytes: int

    @property
    def type_name(self) -> str:
        """Name of its type, such as ``Q4_K``."""
        return TYPES[self.kind][0]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in GGUF, of one file or of several.

    Attributes:
        path: the file, or the first.
        paths: all its files.
        metadata: by key; lists of numbers are arrays, lists of texts are lists.
        tensors: by name.
    """

    path: Path
    paths: tuple[Path, ...]
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        """Name of the architecture, by the format's list.

        Raises:
            ModelError: the file has none.
        """
        return self.text("general.architecture") or ""

    def text(self, key: str) -> str | None:
        """Return a text of the metadata; None where there is none.

        Raises:
            ModelError: it is something else.
        """
        found: str | None = self._value(key, str, "a text")
        return found

    def whole(self, key: str) -> int | None:
        """Return a whole number of the metadata; None where there is none.

        Raises:
            ModelError: it is something else.
        """
        found: int | None = self._value(key, int, "a whole number")
        return found

    def number(self, key: str) -> float | None:
        """Return a finite number of the metadata; None where there is none.

        Raises:
            ModelError: it is something else.
        """
        value = self.metadata.get(key)
        if value is None or (type(value) in (int, float) and math.isfinite(value)):
            return value
        raise wrong(self.path, f"has {key}={_shown(value)}, which must be a number")

    def flag(self, key: str) -> bool | None:
        """Return a yes or no of the metadata; None where it does not say.

        Raises:
            ModelError: it is something else.
        """
        found: bool | None = self._value(key, bool, "true or false")
        return found

    def texts(self, key: str) -> list[str] | None:
        """Return a list of texts of the metadata; None where there is none.

        Raises:
            ModelError: it is something else.
        """
        found: list[str] | None = self._value(key, list, "a list of texts")
        return found

    def numbers(self, key: str) -> list[Any] | None:
        """Return a list of numbers of the metadata; None where there is none.

        Raises:
            ModelError: it is something else.
        """
        found = self._value(key, np.ndarray, "a list of numbers")
        return None if found is None else found.tolist()

    def _value(self, key: str, kind: type[Any], said: str) -> Any:
        value = self.metadata.get(key)
        if value is None or type(value) is kind:
            return value
        raise wrong(self.path, f"has {key}={_shown(value)}, which must be {said}")

    def stored(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """Map the bytes of a tensor, ``[numbers of rows, bytes of a row]``, as they are stored.

        What is written there stays there: it never reaches the file.

        Raises:
            ModelError: the file is not what it was when its header was read.
        """
        try:
            flat = np.memmap(tensor.path, np.uint8, "c", tensor.start, (tensor.n_bytes,))
        except (OSError, ValueError) as error:
            raise wrong(tensor.path, f"cannot be mapped ({error})") from error
        return flat.reshape(math.prod(tensor.shape[:-1]), -1)


def wrong(path: Path, what: str) -> ModelError:
    """Make the error for a file that cannot be right."""
    return ModelError(f"{path} {what}; the file is damaged or half copied: download it again")


def _shown(value: Any) -> str:
    text = f"a list of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a GGUF model: of the file, and of those that it was split into.

    Raises:
        ModelError: a file is missing, or cannot be right.
    """
    stamps = []
    for part in files_of(path):
        try:
            stat = part.stat()
        except OSError as error:
            raise ModelError(
                f"{path} is one of several files, and {part.name} is not beside it; download all "
                f"of them"
            ) from error
        stamps.append((part, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return _read(tuple(stamps))


def files_of(path: Path) -> list[Path]:
    """Return the files of a model in GGUF, by the name of the first or only one.

    Raises:
        ModelError: the name is that of a later one.
    """
    part = _SPLIT.search(path.stem)
    if part is None:
        return [path]
    base, last = path.stem[: part.start()], int(part[2])
    names = [f"{base}-{n:05}-of-{part[2]}.gguf" for n in range(1, last + 1)]
    if int(part[1]) != 1:
        first = names[0] if names else "the first"
        raise ModelError(f"{path} is one of several files; give the first, {first}")
    return [path.with_name(name) for name in names]


@lru_cache(maxsize=2)  # a model and its vision part
def _read(stamps: tuple[tuple[Path, int, int, int], ...]) -> GgufFile:
    """Read files of these sizes and times; the last two are kept."""
    paths = tuple(path for path, *_ in stamps)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for at, path in enumerate(paths):
        found, there = _Header(path).read()
        if at == 0:
            metadata = found
        _check_split(path, found, at, len(paths))
        twice = sorted(tensors.keys() & there.keys())
        if twice:
            raise wrong(path, f"has the tensor {twice[0]!r} of an earlier file again")
        tensors |= there
    whole = GgufFile(paths[0], paths, metadata, tensors)
    total = whole.whole("split.tensors.count")
    if total is not None and len(paths) > 1 and total != len(tensors):
        raise wrong(paths[0], f"says that its files have {total} tensors; they have {len(tensors)}")
    return whole


def _check_split(path: Path, metadata: Mapping[str, Any], at: int, n_files: int) -> None:
    """Refuse a file that is another part of a model than its name says.

    Raises:
        ModelError: so it is.
    """
    n_said, said = metadata.get("split.count", n_files), metadata.get("split.no", at)
    if n_said != max(n_files, 1) and not (n_files == 1 and n_said == 0):
        raise ModelError(
            f"{path} says that it is one of {_shown(n_said)} files, and its name says one of "
            f"{n_files}; give files the names that they were published by"
        )
    if said != at:
        raise ModelError(
            f"{path} says that it is file {_shown(said)} of its model, counted from 0, and its "
            f"name says {at}; give files the names that they were published by"
        )


class _Header:
    """One file, read from its beginning to where its tensors begin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._size = 0
        self._bytes: Any = b""

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return the metadata and the tensors.

        Raises:
            ModelError: the file cannot be read, or cannot be right.
        """
        try:
            with self._path.open("rb") as file:
                start = file.read(24)
                n_tensors, n_keys = self._counts(start)
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
                    self._size, self._at = len(self._bytes), 24
                    return self._body(n_tensors, n_keys)
        except (OSError, UnicodeDecodeError) as error:
            raise wrong(self._path, f"cannot be read ({error})") from error
        finally:
            self._bytes = b""

    def _counts(self, start: bytes) -> tuple[int, int]:
        """Return how many tensors and keys the first bytes announce."""
        if start.startswith(b"version "):
            raise ModelError(
                f"{self._path} is a Git LFS pointer and not the model; run 'git lfs pull' where "
                f"it came from, or download the file"
            )
        if start[:4] in _OLD_MAGICS:
            raise ModelError(
                f"{self._path} is in a format of llama.cpp from before GGUF; download the model as "
                f"GGUF"
            )
        if start.lstrip()[:1] == b"<":
            raise ModelError(
                f"{self._path} is a web page and not the model; open it to see what it asks for, "
                f"such as a login, and download the file again"
            )
        if start[:4] != _MAGIC:
            raise wrong(self._path, f"begins with {start[:4]!r} and not with {_MAGIC!r}")
        if len(start) < 24:
            raise wrong(self._path, f"is truncated: it has {len(start)} bytes")
        version, n_tensors, n_keys = struct.unpack("<IQQ", start[4:])
        if version not in _VERSIONS:
            if int.from_bytes(start[4:8], "big") in _VERSIONS:
                raise ModelError(
                    f"{self._path} was written for big-endian machines; convert it with "
                    f"gguf-convert-endian of the package gguf, or download it for little-endian "
                    f"ones"
                )
            raise ModelError(
                f"{self._path} is of version {version} of GGUF, and 2 and 3 are read here; "
                f"download the model again, files of today are version 3"
            )
        return n_tensors, n_keys

    def _body(self, n_tensors: int, n_keys: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        self._demand(13 * n_keys + 24 * n_tensors, f"{n_keys} keys and {n_tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._name()
            if key in metadata:
                raise wrong(self._path, f"has the key {key[:80]!r} twice")
            metadata[key] = self._value(key, self._number("<I"))
        tensors = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MOST_ALIGNMENT:
            raise wrong(self._path, f"has general.alignment={_shown(alignment)}")
        return metadata, self._placed(tensors, -(-self._at // alignment) * alignment, alignment)

    def _demand(self, n_bytes: int, what: str) -> None:
        """Refuse what would take more bytes than are left."""
        if n_bytes > self._size - self._at:
            raise wrong(
                self._path,
                f"is truncated or lies: {what} at byte {self._at}, of {self._size} in all",
            )

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        self._demand(size, "a number")
        found: int = struct.unpack_from(form, self._bytes, self._at)[0]
        self._at += size
        return found

    def _text(self) -> str:
        length = self._number("<Q")
        self._demand(length, f"a text of {length} bytes")
        start, self._at = self._at, self._at + length
        found: str = self._bytes[start : self._at].decode("utf-8")
        return found

    def _name(self) -> str:
        self._demand(8, "a name")
        length = struct.unpack_from("<Q", self._bytes, self._at)[0]
        if length > _LONGEST_NAME:
            raise wrong(self._path, f"has a name of {length} bytes at byte {self._at}")
        return self._text()

    def _value(self, key: str, kind: int) -> Any:
        """Read the value of a key."""
        if kind in _NUMBERS:
            return self._array(_NUMBERS[kind], 1)[0].item()
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise wrong(self._path, f"has a value of type {kind} for {key[:80]!r}, which is none")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _NUMBERS:
            return self._array(_NUMBERS[inner], count)
        if inner != _STRING:
            raise wrong(self._path, f"has a list of type {inner} for {key[:80]!r}, not read here")
        if count > _MOST_STRINGS:
            raise wrong(self._path, f"has {count} texts for {key[:80]!r}")
        return self._texts(count)

    def _array(self, dtype: str, count: int) -> np.ndarray[Any, Any]:
        wide = np.dtype(dtype).itemsize
        self._demand(count * wide, f"{count} numbers")
        raw = self._bytes[self._at : self._at + count * wide]
        self._at += count * wide
        if dtype == "?":  # any other byte than 0 is true
            return np.frombuffer(raw, np.uint8).astype(np.bool_)
        return np.frombuffer(raw, np.dtype(dtype))

    def _texts(self, count: int) -> list[str]:
        """Read a list of texts: a vocabulary has hundreds of thousands, so the loop is bare."""
        self._demand(8 * count, f"{count} texts")
        raw, at, size = self._bytes, self._at, self._size
        unpack, found = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            if at + 8 > size:
                self._demand(size + 1, "a text")
            stop = at + 8 + unpack(raw, at)[0]
            if stop > size:
                self._demand(stop - self._at, f"a text of {stop - at - 8} bytes")
            found.append(raw[at + 8 : stop].decode("utf-8", "replace"))
            at = stop
        self._at = at
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, type and offset."""
        name, n_dims = self._name(), self._number("<I")
        if not 1 <= n_dims <= _MOST_DIMS:
            raise wrong(self._path, f"has {n_dims} dimensions for the tensor {name[:80]!r}")
        shape = tuple(self._number("<Q") for _ in range(n_dims))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in TYPES:
            known = ", ".join(each for each, *_ in TYPES.values())
            raise ModelError(
                f"{self._path} stores {name[:80]!r} in type {kind} of GGUF, which is not read "
                f"here; take the model in one of {known}"
            )
        return name, shape, kind, offset

    def _placed(
        self, tensors: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return tensors with their places, which must be in the file and apart."""
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in tensors:
            _, block, wide = TYPES[kind]
            if offset % alignment:
                raise wrong(
                    self._path,
                    f"has the tensor {name[:80]!r} at byte {offset} of its numbers, and "
                    f"general.alignment is {alignment}, of which that is no multiple",
                )
            if not all(shape) or shape[-1] % block:
                raise wrong(
                    self._path,
                    f"has {list(shape)} numbers of {TYPES[kind][0]} at {offset} for {name[:80]!r}",
                )
            if name in found:
                raise wrong(self._path, f"has the tensor {name[:80]!r} twice")
            n_bytes = math.prod(shape) // block * wide
            found[name] = GgufTensor(self._path, shape, kind, start + offset, n_bytes)
        _check_places(self._path, found, self._size)
        return found


def _check_places(path: Path, tensors: Mapping[str, GgufTensor], size: int) -> None:
    """Refuse tensors that end behind the file, or lie over each other.

    Raises:
        ModelError: so they do.
    """
    end = 0
    for name, one in _by_place(tensors):
        if one.start < end:
            raise wrong(path, f"has {name[:80]!r} where another tensor lies")
        end = one.start + one.n_bytes
        if end > size:
            raise wrong(path, f"is truncated: {size} bytes, and {name[:80]!r} ends at byte {end}")


def _by_place(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    yield from sorted(tensors.items(), key=lambda item: item[1].start)
