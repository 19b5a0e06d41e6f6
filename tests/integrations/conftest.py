"""Tiny checkpoints of every family, as they come from the hub."""

from tests.models.conftest import checkpoint, one_thread

__all__ = ["checkpoint", "one_thread"]
