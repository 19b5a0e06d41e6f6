"""The folder on disk: its files and their catalogue, the journal, leases, and what looks after it.

Imports the store's values; no cache and no shared place come in.

Start in ``cold.py``.
"""
