"""Caches inside of other libraries: handed to their own ``generate``, in place of theirs.

Imports the backends whose caches they are; no engine and no agent come in.

Start in ``transformers.py``.
"""
