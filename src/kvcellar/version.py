"""Version of this package, for whoever writes it down beside what was computed."""

__version__ = "0.1.0"
