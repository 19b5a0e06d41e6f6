"""Mixtures of experts: each token goes through the few that it chose, which are read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.kernel import levels

if TYPE_CHECKING or levels.is_available():
    from kvcellar.kernel._native import (
        ExpertLayer,
        Experts,
        Gate,
        Mixture,
        Router,
        expert_counts,
    )

__all__ = ["ExpertLayer", "Experts", "Gate", "Mixture", "Router", "expert_counts"]
