"""Parts that commands share: options, help, exit codes, and output for people.

Imports settings and the values of models, and hosting late; no command comes in.

Start in ``commands.py``.
"""
