"""Modules that the CPU kernel computes: linear layers, experts, norms, rotations, recurrent ones.

Imports the kernel, caches and bound networks. ``mixtures.py`` finds mixtures in a network, too;
nothing else here looks for parts.

Start in ``linears.py`` for one layer, in ``parts.py`` for what a part is described by.
"""
