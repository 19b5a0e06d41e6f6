"""Checkpoints on disk: where they are found, whether they are whole, what their small files say.

Imports readers of formats; nothing that runs a model comes in.

Start with ``hub.py``, which finds one, and ``checkpoint.py``, which looks at it.
"""
