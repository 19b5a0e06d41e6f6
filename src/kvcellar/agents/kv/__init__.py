"""An agent's K and V between the engine's cells and the store's rows, and what proves a restore.

Imports the records of agents and hosting; no verb and no text of messages come in.

Start in ``residence.py``.
"""
