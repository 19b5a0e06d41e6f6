"""KV of requests in the cache: reused on the way in, kept on the way out, brought from elsewhere.

Imports requests, prefix indexes, the costs of steps, and the runner, which computes rows again;
no scheduler comes in.

Start in ``residency.py``.
"""
