"""OpenAI's responses. A stored response is an agent, and what goes on from it is a fork of that.

Imports answers and stored responses; no other protocol comes in.

So a conversation can be taken up at any of its responses, as often as one likes, also after a
restart, and nothing is read again. The response itself, and what it answered, is a document of the
store, which is durable before anybody is told that it is stored.
"""

from kvcellar.server.routes.responses.routes import router

__all__ = ["router"]
