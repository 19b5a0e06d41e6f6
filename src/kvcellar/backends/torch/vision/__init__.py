"""Pictures for models of transformers: a model's processor, and its vision part without the text.

Imports what reads weights and makes networks; no cache, no runner and no learning come in. Start in
``reader.py``.
"""
