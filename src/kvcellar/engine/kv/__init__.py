"""KV of requests in the cache: reused on the way in, kept on the way out, brought from elsewhere.

Imports requests, prefix indexes and the costs of steps; no scheduler and no runner come in.

Start in ``residency.py``.
"""
