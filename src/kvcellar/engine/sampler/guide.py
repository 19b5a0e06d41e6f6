"""Guides: they decide which tokens may come next. Those of grammars are in the room ``grammar``."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcellar.errors import ConfigError


class Guide(Protocol):
    """Constraint on the next token of one sequence, such as a grammar that it has to follow."""

    @property
    def is_complete(self) -> bool:
        """True if nothing can follow: the sequence ends."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """Return ``[vocab]``, true for each token that may come next; the same until ``accept``."""
        ...

    @property
    def end_id(self) -> int | None:
        """Id of the token that stands for all that is not allowed, where it may come.

        Then a sequence ends where the model would rather say something else, instead of going on
        with what it likes less. None: the likeliest of the allowed comes.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on with a token, which was allowed."""
        ...

    def fork(self) -> Guide:
        """Return a copy that goes on by itself."""
        ...


def checked_guide(guide: Guide) -> Guide:
    """Return a guide that has all that is asked of one.

    Raises:
        ConfigError: it lacks something, such as what guides of an earlier version need not have.
    """
    wanted = (name for name in vars(Guide) if not name.startswith("_"))
    has_any = hasattr(type(guide), "__getattr__")  # it stands in for another
    there = set(dir(guide))  # asked for nothing: a grammar may raise
    missing = [] if has_any else [name for name in wanted if name not in there]
    if missing:
        raise ConfigError(
            f"guide {type(guide).__name__} has no {' and no '.join(missing)}, which a "
            f"kvcellar.engine.Guide has; an end_id that returns None is what there was without it"
        )
    return guide
