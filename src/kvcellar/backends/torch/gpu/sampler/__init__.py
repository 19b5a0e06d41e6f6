"""Sampling where the logits are: settings of the rows, kernels that choose, and what comes back.

Imports launches and settings of sampling; no sequence and no cache come in.

Start in ``logits.py``.
"""
