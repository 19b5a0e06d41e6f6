"""GGUF files: what is in them, and what transformers is told of it.

Imports tokenizers and NumPy; neither the gguf library nor a runtime comes in.
"""
