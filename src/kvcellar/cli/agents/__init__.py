"""``kvcellar agents``: histories with a name, their store opened for a command, and their turns.

Imports chats at a terminal, the store's options, and the verbs that are done here or asked of a
running server; nothing that serves comes in.

Start in ``agents.py``.
"""
