"""Attention on a card, and the writes of K and V: plans of a step, kernels, and their launches.

Imports pools and codecs of the cache, which imports this room late, and the reads of bookkeeping;
no weight and no graph comes in.

Start in ``launch.py``.
"""
