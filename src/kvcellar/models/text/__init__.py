"""Text of models: tokenizers, chat templates, and the prompts that they make of conversations.

Imports files of checkpoints; no weights and no tensor library come in.

Start with ``prompts.py``; ``rendering.py`` runs templates, in a process of their own.
"""
