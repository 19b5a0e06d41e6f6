"""What clients send, as pydantic models: one module per protocol."""
