"""Caches in MLX: bytes of K, V and states, and attention over them.

Imports bookkeeping and what backends share; no network comes in.
"""
