"""Fingerprint of a model: a text that differs wherever the same tokens may give other K and V.

Weights are hashed in full: a fine-tune may differ in a few numbers, and samples would miss them.
That costs a read of the checkpoint once; afterwards the hash is known by the file's identity (path,
inode, size, times).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvcellar.errors import StoreError
from kvcellar.home import open_own
from kvcellar.models.gguf.mmproj import mmproj_beside
from kvcellar.models.gguf.reader import files_of

Progress = Callable[[float, str], None]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint that say how its model is given pictures."""
VOLATILE = ("_name_or_path", "transformers_version", "use_cache", "_commit_hash")
"""Keys of config.json that change nothing of what a model computes."""

_CHUNK_BYTES = 1 << 22
_ROPE = ("rope_", "max_position_embeddings", "partial_rotary_factor")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A model's identity, part by part, so that a difference can be named.

    Attributes:
        parts: digests by name: ``weights``, ``tokenizer``, ``chat_template``, ``config``, ``rope``
            and whatever else was given.
    """

    parts: Mapping[str, str]

    @property
    def value(self) -> str:
        """The text of all parts."""
        return json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))

    @property
    def of_kv(self) -> str:
        """The text for ``ModelKey.fingerprint``: all that changes the K and V of given tokens.

        A chat template does not. It changes which tokens there are, and those are compared anyway.
        """
        parts = {name: digest for name, digest in self.parts.items() if name != "chat_template"}
        return Fingerprint(parts).value

    def adapted(self, digest: str) -> Fingerprint:
        """Return that of the same model with an adapter, whose digest is this."""
        return Fingerprint({**self.parts, "adapter": digest})


def fingerprint_of(**parts: str | bytes) -> Fingerprint:
    """Make a fingerprint of parts that the caller knows: for models that are in no folder."""
    return Fingerprint({name: digest_of(value) for name, value in parts.items()})


def fingerprint_checkpoint(
    folder: str | Path,
    *,
    cache_file: str | Path | None = None,
    on_progress: Progress | None = None,
    beside: Sequence[Path] = (),
    **extra: str | bytes,
) -> Fingerprint:
    """Work out the fingerprint of a Hugging Face checkpoint, or of a GGUF file.

    Args:
        folder: with config.json, the weights (safetensors) and the tokenizer; or a GGUF file, of
            which all is hashed as its weights.
        cache_file: where hashes of large files are remembered; None: nowhere.
        on_progress: takes how much of the weights is read, 0 to 1, and what comes now.
        beside: further files with weights of the model.
        extra: further parts: an adapter, a RoPE override, the type that the weights are used in.

    Raises:
        StoreError: there are no weights in the folder, or a file cannot be read.
    """
    root = Path(folder)
    try:
        is_one_file = root.is_file()
        config = {} if is_one_file else json.loads((root / "config.json").read_text("utf-8"))
        weights = [
            *(files_of(root) if is_one_file else sorted(root.glob("*.safetensors"))),
            *beside,
        ]
        if not weights:
            raise StoreError(
                f"{root} has no safetensors files, so its KV cannot be told from others'; give "
                f"the folder of a checkpoint, or name the parts with fingerprint_of"
            )
        known = _Known(None if cache_file is None else Path(cache_file))
        total = sum(path.stat().st_size for path in weights) or 1
        done = 0
        digests = []
        for path in weights:
            if on_progress is not None:
                on_progress(done / total, f"hashing {path.name}")
            digests.append([path.name, known.digest(path)])
            done += path.stat().st_size
        known.save()
        rope = {k: v for k, v in config.items() if k.startswith(_ROPE)}
        rest = {k: v for k, v in config.items() if k not in rope and k not in VOLATILE}
        parts = {
            "weights": digest_of(json.dumps(digests)),
            "tokenizer": _files_digest(root, TOKENIZER_FILES, without="chat_template"),
            "chat_template": _template_digest(root),
            "rope": digest_of(json.dumps(rope, sort_keys=True)),
            "config": digest_of(json.dumps(rest, sort_keys=True)),
        }
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{root} cannot be read as a checkpoint ({error}); give the folder that the model was "
            f"loaded from"
        ) from error
    parts |= {name: digest_of(value) for name, value in extra.items()}
    if on_progress is not None:
        on_progress(1.0, "hashed")
    return Fingerprint(parts)


def processor_text(folder: Path) -> str:
    """Return what a checkpoint's files say of how the model is given pictures, in one form."""
    seen = mmproj_beside(folder)[0] if folder.is_file() else None
    if seen is not None:
        return json.dumps([seen.preprocessor, seen.processor], sort_keys=True)
    said = []
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            value = json.loads((folder / name).read_text(encoding="utf-8"))
            value.pop("chat_template", None)
            said.append([name, value])
    return json.dumps(said, sort_keys=True)


def vision_files(folder: Path) -> list[Path]:
    """Return the files of a vision part that lie beside a model in GGUF and not in it."""
    seen = mmproj_beside(folder)[0] if folder.is_file() else None
    return [] if seen is None else [seen.file.path]


def digest_of_file(path: Path) -> str:
    """Return the digest of all bytes of a file."""
    return _Known(None).digest(path)


class _Known:
    """Digests of files by path, inode, size and times; a lost or damaged one is made again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._digests: dict[str, list[Any]] = {}
        self._is_changed = False
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                value = json.loads(path.read_text(encoding="utf-8"))
                self._digests = value if isinstance(value, dict) else {}

    def digest(self, path: Path) -> str:
        stat = path.stat()
        stamp = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        key = str(path.resolve())
        entry = self._digests.get(key)
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp:
            return str(entry[1])
        hasher = xxhash.xxh3_128()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                hasher.update(buffer[:n])
        self._digests[key] = [stamp, hasher.hexdigest()]
        self._is_changed = True
        return hasher.hexdigest()

    def save(self) -> None:
        if self._path is None or not self._is_changed:
            return
        with contextlib.suppress(OSError):  # it is only a cache
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            staged = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            fd = open_own(staged, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(self._digests, file)
            staged.replace(self._path)


def digest_of(value: str | bytes) -> str:
    """Return the digest of a text or of bytes."""
    return xxhash.xxh3_128_hexdigest(value.encode() if isinstance(value, str) else value)


def _files_digest(root: Path, names: tuple[str, ...], without: str) -> str:
    """Hash those of the files that are there; a JSON object counts without one of its keys."""
    found = []
    for name in names:
        path = root / name
        if path.is_file():
            text: str | bytes = path.read_bytes()
            if name == "tokenizer_config.json":
                value = json.loads(text)
                value.pop(without, None)
                text = json.dumps(value, sort_keys=True)
            found.append([name, digest_of(text)])
    return digest_of(json.dumps(found))


def _template_digest(root: Path) -> str:
    found = [
        [n, digest_of((root / n).read_bytes())] for n in TEMPLATE_FILES if (root / n).is_file()
    ]
    for path in (root / "tokenizer_config.json", root / "processor_config.json"):
        if path.is_file():
            inline = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            if inline is not None:
                found.append([path.name, digest_of(json.dumps(inline, sort_keys=True))])
    return digest_of(json.dumps(found))
