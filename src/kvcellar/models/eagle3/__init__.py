"""EAGLE-3 heads: small networks that guess what a model says next from its hidden states.

Imports files and facts of models; no runtime comes in.
"""
