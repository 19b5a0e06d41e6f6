"""Schemas of requests, as pydantic models: one module per protocol."""
