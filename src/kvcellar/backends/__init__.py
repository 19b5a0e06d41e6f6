"""Backends: each adds bytes and attention to the shared bookkeeping.

Imports bookkeeping, the neutral side of models and the CPU kernel, each backend its own runtime;
none imports another but ``reference``, whose arithmetic of stored numbers is everybody's, and
``executorch``, which learns a model by ``torch``.

Start in ``reference/``, then in the backend that is wanted.
"""
