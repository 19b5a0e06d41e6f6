"""EAGLE-3 heads in torch: their network, loading, and the head bound to a session.

Imports caches, weights and the CPU kernel's modules; nothing but loading.py imports it.
"""
