"""Rows and states between a card and main memory, beside the steps.

Imports plans and launches; no weight and no sampling come in.

Start in ``transfers.py``.
"""
