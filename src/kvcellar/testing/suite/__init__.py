"""The scenarios of the conformance suite, one module for each subject.

Imports the public faces of caches; no backend comes in.
"""
