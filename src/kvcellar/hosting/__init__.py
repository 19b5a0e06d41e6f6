"""A model in memory with its engine, within its share of the memory, and prompts for it.

Imports the engine, the store and the neutral side of models; no agent, no backend and no tensor
comes in.
"""
