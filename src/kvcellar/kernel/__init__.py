"""The CPU kernel: attention over runs of cells, linear layers, and what lies around them.

Imports NumPy and the compiled module; any backend whose bytes lie in host memory may use it.

It knows addresses and strides, no tensors: any backend whose bytes lie in host memory can use it.
The compiled part is ``native/``; README.md says which instruction sets it is written for and what
each of them gains.

- :mod:`kvcellar.kernel.levels`: whether the kernel is there, instruction sets, threads;
- :mod:`kvcellar.kernel.attend`: writing K and V into cells, and attending;
- :mod:`kvcellar.kernel.linear`: weights that are packed or coded, and products with them;
- :mod:`kvcellar.kernel.layers`: norms, rotations, gates, decoder layers and whole models;
- :mod:`kvcellar.kernel.recurrent`: layers whose states go from slot to slot.

The names of the compiled module are in the last four only where ``levels.is_available()``.
"""
