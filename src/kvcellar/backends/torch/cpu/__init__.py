"""The CPU kernel's modules in place of a network's: linear layers, mixtures, whole decoders.

Imports caches and bound networks; no file of a checkpoint is read here.
"""
