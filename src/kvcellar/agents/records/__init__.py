"""Records of agents: what is stored of one, and how it is read back from the journal.

Imports hosting's conversations and the store's types; no verb comes in.

Start in ``agent.py`` for what one is, in ``durable.py`` for what is left of it after a crash.
"""
