"""Learns what a model of mlx-lm asks of a cache, from a forward that is written down.

Imports bound models; no checkpoint and no runner come in.
"""
