"""Weights and networks: read from files of any format, made plain or kept in blocks, counted.

Imports the CPU kernel's modules, which hold what files store; nothing of a cache comes in.
"""
