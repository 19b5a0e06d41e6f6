"""The shared tier: blocks and agents in a place that several machines reach.

Imports the formats of files; no engine comes in, and the libraries of places come late.

Start with ``tier.py``. ``places.py`` is what a place can do, ``objects.py`` and ``valkeys.py`` are
the two kinds there are.
"""
