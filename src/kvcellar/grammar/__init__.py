"""Holds answers to a form: JSON of a schema, calls as tools declare them, a bounded thought.

Imports hosting, dialects and the engine's guides; the server and the cellar hold answers so.

Start in ``grammars.py``, which makes guides of what is asked; ``schema_support.py`` and
``schema_relax.py`` say how much of a schema can be held, ``guide.py`` follows one answer,
``thought_budget.py`` its thought.
"""
