"""Learns what a network is from forwards that are watched, and holds it against the network itself.

Imports loading and the runner that is checked; nothing that serves imports it but loading.py.
"""
