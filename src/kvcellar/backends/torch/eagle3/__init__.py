"""EAGLE-3 heads in torch: their network, loading, and the head bound to a session."""
