"""Schedules requests: whose tokens the next step serves, and what came of the last one.

Imports requests, speculation and KV in the cache; no runner comes in.

Start in ``scheduler.py``.
"""
