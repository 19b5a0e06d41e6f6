"""Copies rows and states between a card and main memory, on a stream of their own.

Imports pools of the cache, plans and launches; no weight and no sampling come in.

Start in ``transfers.py``.
"""
