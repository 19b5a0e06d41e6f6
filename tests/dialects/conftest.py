"""The server's fixtures: what a grammar holds a model to is seen in what a server answers."""

from tests.server.conftest import home, live, one_thread, served

__all__ = ["home", "live", "one_thread", "served"]
