"""Facts of how a model places pictures among its tokens: learnt once, and kept with the proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcellar.models.check import verdict_path
from kvcellar.models.fingerprint import PROCESSOR_FILES
from kvcellar.models.gguf.mmproj import mmproj_beside
from kvcellar.models.known import keep, read_kept

WINDOWS, ALL = "windows", "all"
"""Layers in which rows of a picture see those behind them: those with a window, or all."""


def has_pictures(folder: Path, raw: Mapping[str, Any]) -> bool:
    """Return true if a checkpoint's files say how a model is given pictures.

    Args:
        folder: the checkpoint, or a GGUF file, beside which its vision part lies.
        raw: its ``config.json``.
    """
    if folder.is_file():
        return mmproj_beside(folder)[0] is not None
    is_seeing = isinstance(raw.get("vision_config"), Mapping)
    return is_seeing and any((folder / name).is_file() for name in PROCESSOR_FILES)


def text_alone(folder: Path, raw: Mapping[str, Any], backend: str) -> str:
    """Say why a model reads no pictures where a backend runs it that does not.

    Empty where nobody would think that it does.

    Args:
        folder: as ``has_pictures`` takes it.
        raw: likewise.
        backend: that runs it.
    """
    if not has_pictures(folder, raw):
        return mmproj_beside(folder)[1] if folder.is_file() else ""
    return f"the backend {backend} reads text alone; choose the backend torch for pictures"


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """Rules by which a model places the rows of pictures.

    Attributes:
        has_grid: positions have three parts, of which two count a picture's rows and columns.
        both_ways: layers in which rows of a picture see each other both ways; empty: none.
        n_deep: of the first layers, behind which rows are added as well.
    """

    has_grid: bool = False
    both_ways: str = ""
    n_deep: int = 0

    @property
    def is_whole(self) -> bool:
        """True if a forward has to have all rows of a picture."""
        return bool(self.both_ways)


@dataclass(frozen=True, slots=True)
class PictureVerdict:
    """Outcome of a check of pictures.

    Attributes:
        facts: by which the model was exact; None: by none that we know.
        differences: way in which tokens came -> most that a logit differed.
        tolerance: most that one may.
        reason: why nothing could be compared; empty: it was.
        versions: of what this depends on.
    """

    facts: PictureFacts | None
    differences: Mapping[str, float]
    tolerance: float
    reason: str
    versions: Mapping[str, str]

    @property
    def is_exact(self) -> bool:
        """True if every logit was within the tolerance in every way."""
        return self.facts is not None and not self.reason and self._worst <= self.tolerance

    @property
    def _worst(self) -> float:
        return max(self.differences.values(), default=float("inf"))

    @property
    def refusal(self) -> str:
        """Reason why pictures are not read, in a few words; empty: they are."""
        if self.is_exact:
            return ""
        if self.reason:
            return self.reason
        worst = ", ".join(
            f"{part} {value:.1e}"
            for part, value in self.differences.items()
            if not value <= self.tolerance
        )
        return (
            f"with pictures its logits differ from the model's own by {self._worst:.1e} ({worst}), "
            f"and at most {self.tolerance:.0e} is allowed"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> PictureVerdict:
        """Make a verdict of what ``to_json`` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            facts = None if value["facts"] is None else PictureFacts(**value["facts"])
            made = cls(**{**value, "facts": facts})
            if not all(found >= 0 for found in (*made.differences.values(), made.tolerance)):
                raise TypeError("a figure is none")
            dict(made.versions)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no verdict: {error}") from error
        return made


def picture_verdict_of(
    raw: Mapping[str, Any], versions: Mapping[str, str], find: Callable[[], PictureVerdict]
) -> PictureVerdict:
    """Return the verdict on how a model reads pictures, which is found and kept where it is not.

    One without figures is not kept: what was in the way may be gone at the next load.

    Args:
        raw: its ``config.json``.
        versions: of what a verdict depends on; one of others is found again.
        find: is called where there is none.
    """
    with suppress(OSError, ValueError, RecursionError):
        kept = PictureVerdict.from_json(read_kept(_path_of(raw, versions)))
        if not kept.reason and dict(kept.versions) == dict(versions):
            return kept
    verdict = find()
    keep_picture_verdict(raw, versions, verdict)
    return verdict


def keep_picture_verdict(
    raw: Mapping[str, Any], versions: Mapping[str, str], verdict: PictureVerdict
) -> None:
    """Keep a verdict for later loads, if it has figures; arguments as above."""
    if not verdict.reason:
        keep(_path_of(raw, versions), verdict.to_json())


def _path_of(raw: Mapping[str, Any], versions: Mapping[str, str]) -> Path:
    return verdict_path(raw, versions).with_suffix(".pictures.json")
