"""Cells of a pool: which are free, who owns each, how many there are, and how long their runs are.

Imports types, settings and budgets; no step and no layout come in.

Start in ``pool.py``.
"""
