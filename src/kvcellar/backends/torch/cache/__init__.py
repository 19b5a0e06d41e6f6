"""Caches in torch: bytes of K, V and states, and attention over them.

Shared bookkeeping on tensors; of this backend only the choice and launches of GPU kernels come in.
"""
