"""A model, its engine and its store as one object, and agents that speak: the way in from Python.

Imports agents and grammars; nothing of HTTP and no terminal come in.

``kvcellar.open`` makes a :class:`Cellar`, ``kvcellar.open_async`` its twin for asyncio.
"""

from kvcellar.cellar.aio import AsyncAgent, AsyncBranches, AsyncCellar
from kvcellar.cellar.answers import Answer, Asking, Sampling, ToolCall, Why
from kvcellar.cellar.asking import Said
from kvcellar.cellar.streams import AsyncStream
from kvcellar.cellar.sync import Agent, Branches, Cellar, Stream

__all__ = [
    "Agent",
    "Answer",
    "Asking",
    "AsyncAgent",
    "AsyncBranches",
    "AsyncCellar",
    "AsyncStream",
    "Branches",
    "Cellar",
    "Said",
    "Sampling",
    "Stream",
    "ToolCall",
    "Why",
]
