"""Commands that a model answers: ``generate``, ``chat``, ``demo``, and a chat at a terminal.

Imports what commands are made of and the store's options; no agent with a name comes in.
"""
