"""HTTP in front of the agents: what clients of OpenAI and Anthropic speak, and a page to look at.

Imports agents, grammars and what lies below; no command comes in.

Start in ``app.py``.
"""
