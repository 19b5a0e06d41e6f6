"""Sizes of models, worked out before anything is loaded: weights, K and V, states.

Imports facts of models and formats of weights; no weights come in.

Start with ``sizing.py``.
"""
