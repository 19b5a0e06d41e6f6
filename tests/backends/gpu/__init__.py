"""Tests of what runs on a card, interpreted on the CPU."""

import pytest

decided_here = pytest.mark.decided_by(
    "src/kvcellar/backends",
    "src/kvcellar/bookkeeping",
    "src/kvcellar/engine",
    "src/kvcellar/kernel",
    "src/kvcellar/models",
    "src/kvcellar/testing",
    "tests/backends/adapters.py",
    "tests/backends/gpu",
    "tests/card.py",
    "tests/models/tiny_checkpoints.py",
    packages=("numpy", "torch", "transformers", "triton"),
)
"""Marks what the interpreter makes long and no machine decides; see ``tests/proved.py``."""
