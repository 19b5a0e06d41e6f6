"""Values of the store, and their bytes: rows, blocks, references, the form of a file, reports.

Imports NumPy and how ``backends.reference`` stores numbers; no folder and no thread comes in.

Start in ``blocks.py``.
"""
