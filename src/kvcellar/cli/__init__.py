"""The command line. Each command parses, calls the library, and prints."""

from kvcellar.cli.app import app, main

__all__ = ["app", "main"]
