"""Answers in no protocol's words: parsed fields in, a question to an agent, events out.

Imports streams, schemas and the server's state; no route and no look at the cache come in.
"""
