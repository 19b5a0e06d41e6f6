"""Streams of answers to clients that leave or stop reading, and the frames that carry them.

Imports the server's state and errors; no protocol comes in.
"""
