"""Entrance of the server: who may call, how large and slow a body may be, what is counted.

Imports the server's state; no route and no protocol come in.
"""
