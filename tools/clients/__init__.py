"""Real clients against the server: a scripted model, a session, and how each client is run."""
