"""Backends: each adds bytes and attention to the shared bookkeeping.

Imports bookkeeping alone, and each backend its own runtime; none imports another but ``reference``,
whose arithmetic of stored numbers is everybody's.

Start in ``reference/``, then in the backend that is wanted.
"""
