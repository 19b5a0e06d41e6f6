"""Weights on a card, in as few bits as a file has, and the layers of a network that multiply them.

Imports launches and what the CPU kernel's modules know of a network; no cache comes in.

Start in ``matrices.py`` for what is held, in ``multiply.py`` for what is launched.
"""
