"""GPUs: attention, writes, products and sampling by Triton's kernels, and steps as CUDA graphs.

Imports caches, bound networks, and the CPU kernel's modules, which say what each part of a network
is; nothing that reads a checkpoint comes in.

Start in ``choice.py`` for when it is used, in ``attend/launch.py`` for what is launched.
"""
