"""Schemas of requests, as pydantic models: one module per protocol.

Imports settings of sampling and checks of text; no state and no answer come in.
"""
