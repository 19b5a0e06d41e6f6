"""The store of the user: its options, commands that look after it, and a server that has it open.

Imports what commands are made of; no agent and no other command come in.
"""
