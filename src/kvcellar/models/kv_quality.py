"""Measured quality of models with K and V, or weights, in each type.

They lie in the user's own folder, where ``kvcellar bench`` has measured them here; those of K and V
also beside the weights (``kv_quality.json``), where whoever made the checkpoint has put them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import xxhash

from kvcellar.home import default_home
from kvcellar.kv_dtype import parse_kv_dtype

CANDIDATES = ("bfloat16", "int8", "k8v4", "int4", "int4:rot", "int4:first4:last64")
"""Types of K and V that are measured where none is named."""

FILE_NAME = "kv_quality.json"
SCHEMA_VERSION = 1

# On a novel, K and V in bfloat16, which lose nothing that shows, move 4.5% of the likeliest tokens
# of SmolLM2 135M where products round its inputs to 8 bits.
GOOD_PPL_RATIO, GOOD_SAME_TOP1 = 1.005, 0.94
BAD_PPL_RATIO, BAD_SAME_TOP1 = 1.02, 0.90

VERDICTS = ("good", "fair", "bad")
"""From the best to the worst."""

_HEADER_BYTES = 1 << 16

T = TypeVar("T")


class KvQualityWarning(UserWarning):
    """A storage type that is known to be bad for the model that it is used with."""


class WeightsQualityWarning(UserWarning):
    """A format of weights that is known to harm the model."""


def verdict_of(ppl_ratio: float, same_top1: float) -> str:
    """Return ``good`` (as the base for most uses), ``bad`` (text changes visibly) or ``fair``."""
    if ppl_ratio > BAD_PPL_RATIO or same_top1 < BAD_SAME_TOP1:
        return "bad"
    if ppl_ratio <= GOOD_PPL_RATIO and same_top1 >= GOOD_SAME_TOP1:
        return "good"
    return "fair"


@dataclass(frozen=True, slots=True)
class KvQuality:
    """One storage type on one model and text, compared with float32.

    Of several texts it is the worst, by ``worst_of_texts``: what a type costs depends on the text.

    Attributes:
        kv_dtype: the storage type.
        perplexity: e to the mean negative log-likelihood of the text's tokens.
        ppl_ratio: the perplexity over that of float32.
        kl: mean Kullback-Leibler divergence from float32's next-token distribution, in nats.
        same_top1: share of tokens after which the likeliest next token is float32's.
        n_tokens: predictions that were compared.
        bytes_per_token: K and V of one token in all layers, while no window has passed it.
        own_ppl_ratio: what the model's own rounding does to the perplexity: of a model in bfloat16
            K and V are such numbers, so storing them so changes no more than the order of sums.
        own_same_top1: the same of the likeliest token.
        text: which text it is.
        ppl_ratios: the least and the most over all texts.
        same_top1s: the same of the likeliest token.
        n_texts: that were read.
    """

    kv_dtype: str
    perplexity: float
    ppl_ratio: float
    kl: float
    same_top1: float
    n_tokens: int
    bytes_per_token: int
    own_ppl_ratio: float = 1.0
    own_same_top1: float = 1.0
    text: str = ""
    ppl_ratios: tuple[float, float] | None = None
    same_top1s: tuple[float, float] | None = None
    n_texts: int = 1

    @property
    def verdict(self) -> str:
        """Verdict of ``verdict_of`` on what comes beyond the model's own rounding."""
        same = min(1.0, self.same_top1 + 1.0 - self.own_same_top1)
        return verdict_of(self.ppl_ratio / self.own_ppl_ratio, same)


def worst_of_texts(of_texts: Mapping[str, Sequence[KvQuality]]) -> list[KvQuality]:
    """Return for each storage type its figures on the text that it does worst on, with ranges.

    Args:
        of_texts: by text, the figures of the same types in the same order.
    """

    def badness(named: tuple[str, KvQuality]) -> tuple[int, float]:
        one = named[1]
        return VERDICTS.index(one.verdict), one.ppl_ratio / one.own_ppl_ratio

    found = []
    for of_type in zip(*of_texts.values(), strict=True):
        text, worst = max(zip(of_texts, of_type, strict=True), key=badness)
        ratios, same = [r.ppl_ratio for r in of_type], [r.same_top1 for r in of_type]
        ranges = {"ppl_ratios": (min(ratios), max(ratios)), "same_top1s": (min(same), max(same))}
        found.append(replace(worst, text=text, n_texts=len(of_type), **ranges))
    return found


def recommended(results: Sequence[KvQuality], own_dtype: str = "float32") -> KvQuality:
    """Return the smallest good one; where none is good, the one with the least divergence.

    Args:
        results: of all types.
        own_dtype: the type that the model computes in; what is larger gains nothing.
    """
    own = [r.bytes_per_token for r in results if r.kv_dtype == own_dtype]
    results = [r for r in results if not own or r.bytes_per_token <= own[0]]
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
    merged = {r.kv_dtype: r for r in [*_read(path, KvQuality), *results]}
    return _write(path, list(merged.values()), text)


def known_quality(folder: Path, kv_dtype: str) -> KvQuality | None:
    """Return the figures of a storage type for a checkpoint's folder; None: never measured."""
    wanted = parse_kv_dtype(kv_dtype)
    for path in (_own_file(folder), folder / FILE_NAME):
        for result in _read(path, KvQuality):
            if parse_kv_dtype(result.kv_dtype) == wanted:
                return result
    return None


@dataclass(frozen=True, slots=True)
class WeightsQuality:
    """One format of weights on one model and text, compared with the model in float32.

    Attributes:
        weights: the format, as ``load_model`` takes it.
        perplexity: e to the mean negative log-likelihood of the text's tokens.
        ppl_ratio: the perplexity over that of float32.
        kl: mean Kullback-Leibler divergence from float32's next-token distribution, in nats.
        same_top1: share of tokens after which the likeliest next token is float32's.
        n_tokens: predictions that were compared.
        size_bytes: of the weights in memory.
        ppl_ratios, same_top1s: None: all that was read is one text.
    """

    weights: str
    perplexity: float
    ppl_ratio: float
    kl: float
    same_top1: float
    n_tokens: int
    size_bytes: int
    ppl_ratios: tuple[float, float] | None = None
    same_top1s: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """Verdict of ``verdict_of``."""
        return verdict_of(self.ppl_ratio, self.same_top1)


def save_weights_quality(folder: Path, results: Sequence[WeightsQuality], text: str) -> Path:
    """Remember figures of formats of weights; see ``save_quality``."""
    path = _own_file(folder, "weights-quality")
    merged = {r.weights: r for r in [*_read(path, WeightsQuality), *results]}
    return _write(path, list(merged.values()), text)


def known_weights_quality(folder: Path, weights: str) -> WeightsQuality | None:
    """Return the figures of a format of weights for a checkpoint's folder; None: never measured."""
    found = _read(_own_file(folder, "weights-quality"), WeightsQuality)
    return next((result for result in found if result.weights == weights), None)


def harm_of(folder: Path, name: str, weights: str) -> str:
    """Say what a format of weights does to a model, where that was measured; empty: little.

    Args:
        folder: of the checkpoint.
        name: of the model, for people.
        weights: the format.
    """
    known = known_weights_quality(folder, weights)
    if known is None or known.verdict == "good":
        return ""
    return (
        f"weights {weights} were measured with {name!r}: {known.ppl_ratio:.2f} times the "
        f"perplexity of float32, the same likeliest token after {known.same_top1:.1%} of "
        f"{known.n_tokens} tokens; kvcellar bench weights-quality {name} compares all formats"
    )


def _read(path: Path, kind: type[T]) -> list[T]:
    """Figures from a file; none where there is no file or it is not one of ours."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["schema_version"] == SCHEMA_VERSION:
            return [
                kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
                for fields in value["results"]
            ]
    return []


def _write(path: Path, results: Sequence[KvQuality | WeightsQuality], text: str) -> Path:
    value = {
        "schema_version": SCHEMA_VERSION,
        "text": text,
        "results": [asdict(result) for result in results],
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    staged.replace(path)
    return path


def _own_file(folder: Path, kind: str = "kv-quality") -> Path:
    """By what the checkpoint is, not by where it lies: sizes, headers and ends of its files."""
    digest = xxhash.xxh3_128()
    inside = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    for path in [folder] if folder.is_file() else inside:
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            digest.update(file.read(_HEADER_BYTES))
            file.seek(max(0, size - _HEADER_BYTES))
            digest.update(file.read())
    return default_home() / kind / f"{digest.hexdigest()}.json"
