"""Learns what a model of mlx-lm asks of a cache, from one forward that is recorded.

Imports bound models; no checkpoint and no runner come in.
"""
