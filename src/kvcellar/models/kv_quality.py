"""What is known of a model's quality with K and V in each storage type: figures once measured.

They lie in the user's own folder, where ``kvcellar bench kv-quality`` has measured them here, or
beside the weights (``kv_quality.json``), where whoever made the checkpoint has put them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from kvcellar.home import default_home
from kvcellar.kv_dtype import parse_kv_dtype

FILE_NAME = "kv_quality.json"
SCHEMA_VERSION = 1

GOOD_PPL_RATIO, GOOD_SAME_TOP1 = 1.005, 0.97
BAD_PPL_RATIO, BAD_SAME_TOP1 = 1.02, 0.90

_HEADER_BYTES = 1 << 16


class KvQualityWarning(UserWarning):
    """A storage type that is known to be bad for the model that it is used with."""


@dataclass(frozen=True, slots=True)
class KvQuality:
    """One storage type on one model and text, compared with float32.

    Attributes:
        kv_dtype: the storage type.
        perplexity: e to the mean negative log-likelihood of the text's tokens.
        ppl_ratio: the perplexity over that of float32.
        kl: mean Kullback-Leibler divergence from float32's next-token distribution, in nats.
        same_top1: share of tokens after which the likeliest next token is float32's.
        n_tokens: predictions that were compared.
        bytes_per_token: K and V of one token in all layers, while no window has passed it.
    """

    kv_dtype: str
    perplexity: float
    ppl_ratio: float
    kl: float
    same_top1: float
    n_tokens: int
    bytes_per_token: int

    @property
    def verdict(self) -> str:
        """``good``: as float32 for most uses; ``bad``: text changes visibly; ``fair`` between."""
        if self.ppl_ratio > BAD_PPL_RATIO or self.same_top1 < BAD_SAME_TOP1:
            return "bad"
        if self.ppl_ratio <= GOOD_PPL_RATIO and self.same_top1 >= GOOD_SAME_TOP1:
            return "good"
        return "fair"


def recommended(results: Sequence[KvQuality]) -> KvQuality:
    """The smallest good one; where none is good, the one with the least divergence."""
    good = [r for r in results if r.verdict == "good"]
    if good:
        return min(good, key=lambda r: (r.bytes_per_token, r.kl))
    return min(results, key=lambda r: r.kl)


def save_quality(folder: Path, results: Sequence[KvQuality], text: str) -> Path:
    """Remember figures for the checkpoint in ``folder``, in place of earlier ones of that type.

    Args:
        folder: of the checkpoint.
        results: the figures.
        text: what was read, for whoever looks at the file.

    Returns:
        The file, in the user's own folder.

    Raises:
        OSError: it cannot be written; what was known is as it was.
    """
    path = _own_file(folder)
    merged = {r.kv_dtype: r for r in [*_read(path), *results]}
    value = {
        "schema_version": SCHEMA_VERSION,
        "text": text,
        "results": [asdict(result) for result in merged.values()],
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    staged.replace(path)
    return path


def known_quality(folder: Path, kv_dtype: str) -> KvQuality | None:
    """The figures of a storage type for the checkpoint in ``folder``; None: never measured."""
    wanted = parse_kv_dtype(kv_dtype)
    for path in (_own_file(folder), folder / FILE_NAME):
        for result in _read(path):
            if parse_kv_dtype(result.kv_dtype) == wanted:
                return result
    return None


def _read(path: Path) -> list[KvQuality]:
    """Figures from a file; none where there is no file or it is not one of ours."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["schema_version"] == SCHEMA_VERSION:
            return [KvQuality(**fields) for fields in value["results"]]
    return []


def _own_file(folder: Path) -> Path:
    """By what the checkpoint is, not by where it lies: sizes and headers of its files."""
    digest = xxhash.xxh3_128()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with contextlib.suppress(OSError), path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            digest.update(file.read(_HEADER_BYTES))
    return default_home() / "kv-quality" / f"{digest.hexdigest()}.json"
