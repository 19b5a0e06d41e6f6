"""The CPU kernel's modules in place of a network's: linear layers, mixtures, whole decoders.

Imports caches and bound networks; no file of a checkpoint is read here.

Start in ``hold.py`` for what the kernel takes over, in ``decoder.py`` for a step.
"""
