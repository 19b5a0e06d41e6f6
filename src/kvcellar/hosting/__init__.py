"""A model in memory with its engine, within its share of the memory, and prompts for it.

Imports the engine, the store and the neutral side of models; no agent, no backend and no tensor
comes in.

Start in ``host.py``, one open model; ``memory.py`` shares the memory out, ``messages.py`` and
``conversation.py`` are conversations as values, before they are an agent's.
"""
