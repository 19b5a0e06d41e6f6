"""Modules that the CPU kernel computes: linear layers, experts, norms, rotations, recurrent ones.

Imports the kernel, caches and bound networks; nothing that looks for parts of a network comes in.

Start in ``linears.py`` for one layer, in ``parts.py`` for what a part is described by.
"""
