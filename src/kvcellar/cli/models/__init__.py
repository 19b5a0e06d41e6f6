"""Commands about models and this machine: what is here, what fits, what is exact, how quick it is.

Imports what commands are made of and the store's options; nothing that talks or serves comes in.
"""
