"""Verbs that commands ask of agents, in their own process or of a server that they find.

Imports agents and the engine; nothing of HTTP comes in.
"""
