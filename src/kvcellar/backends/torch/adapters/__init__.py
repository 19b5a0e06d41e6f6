"""LoRA adapters beside a network: low-rank updates of its linear layers, per token of a batch.

Imports the modules that they hang beside, the CPU kernel's or transformers'; no runner comes in.
"""
