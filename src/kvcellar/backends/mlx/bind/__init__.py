"""Models of mlx-lm, bound to caches: attention, and mixers of recurrent layers with their states.

Imports the cache alone; no file is read and nothing is learnt here.
"""
