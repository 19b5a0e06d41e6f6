"""Verbs that the faces of every cache share: those that its steps answer."""

from __future__ import annotations

from kvcellar.bookkeeping.steps import Steps
from kvcellar.cache_config import CacheConfig, CacheUsage


class StepFace:
    """A cache's verbs about steps; see :class:`kvcellar.cache.Cache`."""

    def __init__(self, steps: Steps) -> None:
        """Create the face of these steps."""
        self.config: CacheConfig = steps.config
        self.steps = steps
        """The forwards: for the byte layer, which asks for plans."""

    @property
    def is_step_open(self) -> bool:
        """True if a step has been begun and not all of its layers have written yet."""
        return self.steps.is_open

    def cancel_step(self) -> None:
        """Take back the last step, finished or not; a no-op where there is none to take back.

        A runner calls it when its forward raised, an engine when anything of its step did: the
        second call changes nothing. Afterwards the cache is as it was before the
        step began. Once another verb has been called the step is accepted and stays.
        """
        self.steps.cancel()

    def end_step(self) -> None:
        """Accept the finished step now, rather than at the next verb. Unfinished: undo it."""
        self.steps.settle()

    def clear(self) -> None:
        """Forget everything. The pools keep their bytes for reuse."""
        self.steps.clear()

    def usage(self) -> CacheUsage:
        """Return the cells taken and shared by layer group, and the bytes of the pools."""
        return self.steps.usage()
