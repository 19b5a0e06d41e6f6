"""Models of transformers whose layers are computed by the CPU kernel."""
