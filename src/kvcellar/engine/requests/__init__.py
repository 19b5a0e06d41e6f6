"""Values that pass between the parts of the engine: requests and events, batches, guesses.

Imports sampling and the plain loop's tokens and texts; nothing that decides or runs a step comes
in.

Start in ``request.py``.
"""
