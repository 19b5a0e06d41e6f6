"""Routes: one module or room per protocol, each in its protocol's own words.

Imports answers, looks and the entrance; nothing below knows a protocol.

Start in ``openai.py``.
"""
