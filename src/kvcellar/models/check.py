"""Proof that a model behind our caches is the model: its logits against those of its own code.

Texts are run in every way that a cache is used in, through three kinds of caches, and each token's
logits are held to those that the model's own code computes from the whole text at once, without a
cache. A model for which that is not so is refused; a person may go on with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.cache_config import make_config
from kvcellar.errors import ModelError
from kvcellar.models.known import keep, known_path, read_kept
from kvcellar.models.plays import (
    CHANGED,
    LENGTH,
    MAIN,
    PLAYS,
    PREFILL,
    Piece,
    Player,
    make_texts,
    play_border,
)
from kvcellar.models.runner import FloatArray, Runner
from kvcellar.registry import (
    CacheSession,
    make_decode_session,
    make_seq_session,
    make_tree_session,
)
from kvcellar.types import IntArray, LayerGroup, ModelCacheParams
from kvcellar.version import __version__

TOLERANCE = 2e-4
"""Most that a logit may differ, in float32, where the largest is up to ``LARGE``."""

LARGE = 10.0
"""Logit from which on differences are counted in proportion to the largest one."""

VERSION = 4
"""Version of what is compared; verdicts of another one are found again."""

CACHES: Mapping[str, Callable[..., CacheSession[Any]]] = {
    "contiguous": make_decode_session,
    "seq": make_seq_session,
    "tree": make_tree_session,
}
"""Kinds of caches that a model is checked on."""

PARTS = ("prefill", "chunks", "decode", "rollback", "fork", "batch", "restore", "border")
"""Ways in which tokens come, in the order in which they are compared. The last is of models alone
whose RoPE turns long texts otherwise than short ones."""

CAPACITY = 320
"""Cells of the caches."""

_TELLING = 100 * TOLERANCE
"""Least that another first token must move a logit behind it."""

Oracle = Callable[[IntArray], FloatArray]
"""Function from tokens ``[B, T]`` to the model's own logits ``[B, T, vocab_size]``, uncached."""


class InexactModelWarning(UserWarning):
    """A model that is used though it was found not to be exact behind our caches."""


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """Outcome of a check.

    Attributes:
        family: ``model_type`` of the model's text part.
        layers: kinds of its layers, with how many there are of each.
        subject: what was compared.
        differences: cache -> way in which tokens came -> most that a logit differed.
        own: most that the model's own code, with its own cache in chunks, differs from itself
            without; None: it was not tried, or cannot do it.
        reason: why nothing, or not all, could be compared; None: all was.
        versions: of what this depends on.
        seconds: that it took.
        tolerance: most that a logit may differ; more than ``TOLERANCE`` where the model's own code
            rounds as badly.
        exact_to: tokens of the longest text of which all this is so: RoPE has other factors for
            each length beyond. None: texts of any length.
        beyond: how far longer texts are from the model's own; None: there are none.
    """

    family: str
    layers: tuple[str, ...]
    subject: str
    differences: Mapping[str, Mapping[str, float]]
    own: float | None
    reason: str | None
    versions: Mapping[str, str]
    seconds: float
    tolerance: float = TOLERANCE
    exact_to: int | None = None
    beyond: float | None = None

    @property
    def worst(self) -> float:
        """Most that any logit differed; infinite where nothing was compared."""
        found = [value for parts in self.differences.values() for value in parts.values()]
        return max(found, default=float("inf"))

    @property
    def is_exact(self) -> bool:
        """True if every logit was within the tolerance in every way."""
        return self.reason is None and self.worst <= self.tolerance

    def worst_of(self, part: str) -> float | None:
        """Return the most that a logit differed in one way, on any cache; None: not compared."""
        found = [parts[part] for parts in self.differences.values() if part in parts]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object, with what follows from its figures."""
        worst = self.worst if self.differences else None
        return {**asdict(self), "worst": worst, "is_exact": self.is_exact}

    @classmethod
    def from_json(cls, value: Any) -> CheckVerdict:
        """Make a verdict of what ``to_json`` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            own = {one.name: value[one.name] for one in fields(cls)}
            made = cls(**{**own, "layers": tuple(own["layers"])})
            if made.reason is None and set(made.differences) != set(CACHES):
                raise TypeError("caches are missing")
            figures = [value for parts in made.differences.values() for value in parts.values()]
            if not all(value >= 0 for value in (*figures, made.tolerance)):  # NaN is not
                raise TypeError("a figure is none")
            dict(made.versions)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no verdict: {error}") from error
        return made

    @property
    def remark(self) -> str:
        """Difference of the model's own cache in chunks, in words; empty where it is small."""
        if self.own is None or self.own <= self.tolerance:
            return ""
        by = "transformers" if "transformers" in self.versions else "mlx-lm"
        return f"{by}' own cache in chunks differs by {self.own:.1e} from the whole text at once"

    @property
    def limit(self) -> str:
        """Texts that are not exact, in a sentence; empty: there are none."""
        if self.exact_to is None:
            return ""
        return (
            f"texts of more than {self.exact_to:,} tokens are not exact: RoPE has other factors "
            f"for each length beyond, and here they are those of the longest text that the cache "
            f"holds; in the check logits of such a text were {self.beyond:.1e} from its own"
        )

    def refusal(self, name: str) -> str:
        """Return in a sentence that a model is not exact, with the figures."""
        if self.reason is not None:
            return f"{name} cannot be run exactly behind a cache of kvcellar: {self.reason}"
        parts = ", ".join(
            f"{part} {value:.1e}"
            for part in PARTS
            if (value := self.worst_of(part)) is not None and value > self.tolerance
        )
        own = f"; {self.remark}" if self.remark else ""
        return (
            f"{name} is not exact behind a cache of kvcellar: logits differ from the model's own "
            f"by {self.worst:.1e} ({parts}), and at most {self.tolerance:.0e} is allowed{own}; "
            f"compared was {self.subject}"
        )


def kinds_of(params: ModelCacheParams) -> tuple[str, ...]:
    """Return the kinds of a model's layers in a few words each, with how many there are."""
    said = [f"{len(group.layers)} {_kind(group)}" for group in params.groups]
    if params.shared:
        said.append(f"{len(params.shared)} shared")
    if params.state is not None:
        said.append(f"{len(params.state.layers)} recurrent")
    return tuple(said)


def _kind(group: LayerGroup) -> str:
    """Return what a query of a group's layers sees, in a word or two."""
    latent = "latent " if group.is_latent else ""
    if group.window is not None:
        return f"{latent}window {group.window}"
    return f"{latent}chunk {group.chunk}" if group.chunk is not None else f"{latent}full"


def torch_versions() -> dict[str, str]:
    """Return the versions that a verdict of the torch backend depends on; torch is not imported.

    Raises:
        PackageNotFoundError: torch or transformers is not installed.
    """
    used = {package: version(package) for package in ("torch", "transformers")}
    return {"kvcellar": __version__, "check": str(VERSION), **used}


def verdict_of(
    raw: Mapping[str, Any],
    versions: Mapping[str, str],
    find: Callable[[], CheckVerdict],
    *,
    is_unchecked: bool = False,
) -> CheckVerdict:
    """Return the verdict on a model, which is found and kept where it is not known to be exact.

    One that it is not may be of other weights, a file that lacked some, or memory that ran out.
    Who goes on with a model unchecked is warned by that one.

    Args:
        raw: its ``config.json``.
        versions: of what a verdict depends on; one of others is found again.
        find: is called where there is none, or the model was refused.
        is_unchecked: a verdict that is kept is enough, whatever it says.
    """
    verdict = known_verdict(raw, versions)
    if verdict is None or not (verdict.is_exact or is_unchecked):
        verdict = find()
        keep_verdict(raw, versions, verdict)
    return verdict


def known_verdict(raw: Mapping[str, Any], versions: Mapping[str, str]) -> CheckVerdict | None:
    """Return the verdict that was kept on a model; None: there is none of these versions.

    One without figures counts as none, whoever wrote it; see ``keep_verdict``.
    """
    path = verdict_path(raw, versions)
    with suppress(OSError, ValueError, RecursionError):
        verdict = CheckVerdict.from_json(read_kept(path))
        if verdict.reason is None and dict(verdict.versions) == dict(versions):
            return verdict
    return None


def keep_verdict(
    raw: Mapping[str, Any], versions: Mapping[str, str], verdict: CheckVerdict
) -> None:
    """Keep a verdict for later loads; a folder that cannot be written is no error.

    One without figures is not kept: why a model could not be compared may be its files, or a lack
    of memory, which the next load need not meet.
    """
    if verdict.reason is None:
        keep(verdict_path(raw, versions), verdict.to_json())


def verdict_path(raw: Mapping[str, Any], versions: Mapping[str, str]) -> Path:
    """Return where the verdict on a model is kept: beside its facts."""
    runtime = next(name for name in ("mlx-lm", "transformers") if name in versions)
    return known_path(raw, f"{runtime} {versions[runtime]}").with_suffix(".check.json")


def demand_exact(verdict: CheckVerdict, name: str, *, is_unchecked: bool) -> None:
    """Refuse a model that is not exact, or warn of it where a person goes on with it.

    Args:
        verdict: on the model.
        name: as a person knows it.
        is_unchecked: the person goes on.

    Raises:
        ModelError: it is not exact; with the figures, and the way out.

    Warns:
        InexactModelWarning: it is not exact, and ``is_unchecked``.
    """
    if verdict.is_exact:
        return
    if not is_unchecked:
        said = verdict.refusal(name).removesuffix("; choose another model")
        raise ModelError(
            f"{said}. Choose another model, or go on at your own risk with --unchecked"
        )
    warnings.warn(verdict.refusal(name), InexactModelWarning, stacklevel=3)


# --- playing ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Subject:
    """Model to be checked, in whatever runtime.

    Attributes:
        params: facts for its caches.
        vocab_size: rows of its embedding.
        oracle: the model's own code.
        bind: joins the model with a session.
        backend: whose sessions it takes.
        n_columns: tokens of the texts that the oracle is given; it is compared on the first of
            them. More than those where a text's length changes every position.
        border: tokens of the longest text that RoPE was made for, where longer ones are turned by
            other factors; 0: none are.
        beyond: how far the first tokens of such texts of two lengths were apart.
        report: is told how much of the check is done.
    """

    params: ModelCacheParams
    vocab_size: int
    oracle: Oracle
    bind: Callable[[CacheSession[Any]], Runner]
    backend: str
    n_columns: int = LENGTH
    border: int = 0
    report: Callable[[float], None] = field(default=lambda part: None)
    beyond: float = 0.0


def compare(subject: Subject) -> dict[str, dict[str, float]]:
    """Play all texts on all kinds of caches; return cache -> part -> most that a logit differed.

    Where the model's own logits are larger than ``LARGE`` they are counted as if scaled to that.

    Raises:
        Exception: whatever the model raises.
    """
    texts = make_texts(subject.vocab_size, subject.n_columns)
    n_short = max(0, subject.border - 1)  # at the border itself transformers may remember more
    short = subject.oracle(texts[:, :n_short]) if n_short else None
    longer = subject.oracle(texts[:, :LENGTH]) if n_short else None
    want = subject.oracle(texts)
    _check_telling(want)
    unit = unit_of(want)
    if longer is not None:
        subject.beyond = gap_of(longer, want[:, :LENGTH], unit)
    found: dict[str, dict[str, float]] = {}
    for done, (kind, make_session) in enumerate(CACHES.items()):
        subject.report(done / len(CACHES))
        parts: dict[str, float] = {}
        for play in PLAYS if kind != "contiguous" else PLAYS[:2]:
            config = make_config(subject.params, CAPACITY, min_chunk=PREFILL)
            with make_session(subject.backend, config) as session:
                player = Player(session, subject.bind(session), texts, kind == "contiguous")
                for piece in play(player):
                    _take(parts, piece, want, unit)
        if short is not None:
            config = make_config(subject.params, CAPACITY)
            with make_session(subject.backend, config) as session:
                player = Player(session, subject.bind(session), texts, kind == "contiguous")
                for is_long, piece in play_border(player, n_short):
                    _take(parts, piece, want if is_long else short, unit)
        found[kind] = parts
    subject.report(1.0)
    return found


def _take(parts: dict[str, float], piece: Piece, want: FloatArray, unit: float) -> None:
    """Compare a piece with the oracle's logits; keep the worst difference of its part."""
    part, row, at, got = piece
    gap = gap_of(got, want[row, at : at + len(got)], unit)
    worst = max(parts.get(part, 0.0), gap)
    parts[part] = worst if np.isfinite(gap) else float("inf")


def gap_of(got: FloatArray, want: FloatArray, unit: float) -> float:
    """Return the most that a logit differs, in units."""
    return float(np.abs(got - want).max()) / unit


def unit_of(logits: FloatArray) -> float:
    """Return by what differences of such logits are divided: above 1 where they are large."""
    return max(1.0, float(np.abs(logits).max()) / LARGE)


def _check_telling(logits: FloatArray) -> None:
    """Make sure that logits would tell if a model saw other tokens than it should.

    Raises:
        ModelError: they hardly would.
    """
    if not np.isfinite(logits).all():
        raise ModelError("the model's own logits are not finite on random tokens")
    moved = float(np.abs(logits[CHANGED, 1:5] - logits[MAIN, 1:5]).max())
    if moved < _TELLING:
        raise ModelError(
            f"the model's own logits say too little: another first token moves them by "
            f"{moved:.1e}, and it must be {_TELLING:.0e} for the check to mean anything"
        )
