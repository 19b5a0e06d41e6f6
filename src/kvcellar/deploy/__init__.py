"""Replicas of the server under Ray Serve: one address, many engines, and agents that find theirs.

Imports the server; only the commands import this room, and nobody else knows Ray.

``routing.py`` decides where a request goes, ``replica.py`` answers there, ``gateway.py`` stands in
front. None of these knows Ray; ``router.py`` and ``application.py`` are the ends that do.
"""
