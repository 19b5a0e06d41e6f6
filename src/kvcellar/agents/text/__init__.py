"""Conversations and answers as text: which history a client means, and how an answer reads.

Imports the records of agents; no verb and no KV come in.
"""
