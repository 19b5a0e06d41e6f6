"""Looks at what is there: the cache as it changes, models by their files, agents by what was said.

Imports answers and the server's state; nothing in here changes either.
"""
