"""LoRA adapters beside a network: low-rank updates of its linear layers, per token of a batch."""
