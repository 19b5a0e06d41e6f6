"""Layouts of layer groups: where a step's tokens and states go, and which cells their queries read.

Imports cells; no step and no face of a cache come in.

Start in ``layout.py`` for the protocols, in ``rows.py`` for the layout of most groups, and how it
frees what a window has passed.
"""
