"""Steps of a few tokens as CUDA graphs: a whole forward is recorded once and played again.

Imports plans, launches and sampling, and the network as a function; nothing of weights comes in.

Start in ``graphs.py``.
"""
