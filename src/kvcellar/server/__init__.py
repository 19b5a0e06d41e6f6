"""HTTP in front of the agents: what clients of OpenAI and Anthropic speak, and a page to look at.

Start in ``app.py``.
"""
