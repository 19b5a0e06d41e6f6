"""``kvcellar serve`` and ``deploy``: what is offered, to whom and how, from options to a server.

Imports what commands are made of and the store's options; no other command comes in.

Start in ``serve.py``.
"""
