"""GGUF files: what is in them, and what transformers is told of it.

Imports the gguf library; no runtime comes in.
"""
