"""Conversations and answers as text: which history a client means, and how an answer reads.

Imports the records of agents, hosting, dialects, and the engine's pieces of text; no verb and no
KV come in.

Start in ``match_messages.py`` for the way in, in ``reading.py`` for the answer.
"""
