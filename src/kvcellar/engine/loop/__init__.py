"""The plain loop: one sequence, one token at a time, and the text that its tokens make.

Imports sampling and the faces of caches; no request, no scheduler and no other sequence come in.

Start in ``generating.py``.
"""
