"""From logits to tokens: many rows at a time, each with its settings, its randomness and its guide.

Imports settings of sampling and NumPy; no sequence, no text and no cache come in.

Start in ``sampling.py``.
"""
