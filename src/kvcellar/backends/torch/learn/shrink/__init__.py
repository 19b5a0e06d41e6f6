"""Shrunk networks: the same classes of transformers with few, small layers and random weights.

Imports what makes networks; nothing of caches comes in.
"""
