"""A model, its engine and its store as one object, and agents that speak: the way in from Python.

``kvcellar.open`` makes a :class:`Cellar`, ``kvcellar.open_async`` its twin for asyncio.
"""

from kvcellar.cellar.aio import AsyncAgent, AsyncBranches, AsyncCellar
from kvcellar.cellar.answers import Answer, Sampling, Why
from kvcellar.cellar.streams import AsyncStream
from kvcellar.cellar.sync import Agent, Branches, Cellar, Stream

__all__ = [
    "Agent",
    "Answer",
    "AsyncAgent",
    "AsyncBranches",
    "AsyncCellar",
    "AsyncStream",
    "Branches",
    "Cellar",
    "Sampling",
    "Stream",
    "Why",
]
