"""Recurrent layers: states go from slot to slot in one call, for all sequences of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.kernel import levels

if TYPE_CHECKING or levels.is_available():
    from kvcellar.kernel._native import Convolution, DeltaRule, GatedNorm, Scan, StateBatch

__all__ = ["Convolution", "DeltaRule", "GatedNorm", "Scan", "StateBatch"]
