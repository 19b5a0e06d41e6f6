"""GGUF files: what is in them, and what transformers is told of it.

Imports the library ``tokenizers`` and NumPy, and transformers late, for configs that our own
tables do not have; neither the gguf library nor a runtime comes in.

Start in ``reader.py``.
"""
