"""The shared tier: blocks and agents in a place that several machines reach.

Imports the store's values and its folder on disk; no engine comes in, and the libraries of places
come late.

Start with ``tier.py``. ``places.py`` is what a place can do, ``objects.py`` and ``valkeys.py`` are
the two kinds there are.
"""
