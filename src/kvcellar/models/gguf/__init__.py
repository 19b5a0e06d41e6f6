"""GGUF files: what is in them, and what transformers is told of it."""
