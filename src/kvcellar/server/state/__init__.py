"""State of one server: agents and models that it offers, what clients keep here, who shares what.

Imports the configuration and the rooms below the server; no HTTP body and no protocol come in.
"""
