"""Settings of a cellar: which model, how it is loaded, what it may hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from kvcellar.cellar.aio import AsyncCellar
from kvcellar.models import LoadOptions

if TYPE_CHECKING:
    from kvcellar.models.options import ProgressFn

_OF_THE_CELLAR = ("store", "shared", "memory", "progress")


class CellarSettings(TypedDict, total=False):
    """Settings of ``kvcellar.open``: four of the cellar, the others of its model.

    ``store`` is a folder, ``shared`` the URL of a place that several machines share behind it,
    ``memory`` a size or bytes, ``progress`` is called while the model
    loads. Each of the others is as :class:`kvcellar.models.LoadOptions` has it; where ``adapters``
    has one, it is what answers.
    """

    store: str | Path | None
    shared: str | None
    memory: str | int | None
    progress: ProgressFn | None
    backend: str | None
    device: str | None
    dtype: Any
    weights: str | None
    kv_dtype: str | None
    capacity: int | None
    cache: str
    block_size: int | None
    layout: str | None
    snapshot_bytes: int | None
    speculate: str | None
    chat_template: str | None
    is_unchecked: bool
    tp: int
    adapters: Mapping[str, str | Path]


def cellar_of(model: str | Path, settings: CellarSettings) -> AsyncCellar:
    """Return a cellar of a model that is not open yet.

    Raises:
        TypeError: there is no setting of a name that was given.
        ConfigError: a value that cannot work; the message names it.
    """
    given: dict[str, Any] = dict(settings)
    unknown = given.keys() - CellarSettings.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"{', '.join(sorted(unknown))} is no setting of a cellar; there are: "
            f"{', '.join(CellarSettings.__annotations__)}"
        )
    own = {name: given.pop(name) for name in _OF_THE_CELLAR if name in given}
    return AsyncCellar(LoadOptions(model, **given), **own)
