"""Parts of a network that the CPU kernel computes, found by running the network once.

Imports descriptions of parts; what holds and decodes them imports this.
"""
