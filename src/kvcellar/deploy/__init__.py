"""Replicas of the server under Ray Serve: one address, many engines, and agents that find theirs.

``routing.py`` decides where a request goes, ``replica.py`` answers there, ``gateway.py`` stands in
front. None of these knows Ray; ``router.py`` and ``application.py`` are the ends that do.
"""
