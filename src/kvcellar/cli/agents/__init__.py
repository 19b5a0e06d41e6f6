"""``kvcellar agents``: histories with a name, their store opened for a command, and their turns.

Imports chats at a terminal, the store's options, and a server that is asked; nothing that serves
comes in.

Start in ``agents.py``.
"""
