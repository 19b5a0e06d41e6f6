"""Models in memory and their runners: weights placed, adapters loaded, forwards run on a session.

Imports all that computes a forward, on the CPU and on a GPU; no learning comes in.
"""
