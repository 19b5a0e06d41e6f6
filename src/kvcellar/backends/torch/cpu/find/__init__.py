"""Parts of a network that the CPU kernel computes, found by running the network once.

Imports the kernel's modules, and tries each beside the network's own; ``cpu/hold.py`` and
``cpu/decoder.py`` use what is found.
"""
