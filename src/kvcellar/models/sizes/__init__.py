"""Sizes of models, worked out before anything is loaded: weights, K and V, states.

Imports what finds a checkpoint and who runs it; no weight is read.

Start with ``sizing.py``.
"""
