"""Attention on a card, and the writes of K and V: plans of a step, kernels, and their launches.

Imports the reads that bookkeeping gives; no weight and no graph comes in.

Start in ``launch.py``.
"""
