"""A fleet of agents against a real server, for minutes: ``python -m tests.soak --seed 1``."""
