"""The scenarios of the conformance suite, one module for each subject."""
