"""Backends: each adds bytes and attention to the shared bookkeeping. None imports another."""
