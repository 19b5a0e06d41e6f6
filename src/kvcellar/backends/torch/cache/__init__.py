"""Caches in torch: bytes of K, V and states, and attention over them.

Imports bookkeeping, and of this backend the choice and launches of GPU kernels; no network comes
in.
"""
