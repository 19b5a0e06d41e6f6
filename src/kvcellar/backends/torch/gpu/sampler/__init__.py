"""Sampling where the logits are: settings of the rows, kernels that choose, and what comes back.

Imports launches, and rows with their settings as ``models.kept_logits`` has them; no sequence comes
in.

Start in ``logits.py``; ``settings.py`` packs each row's settings, ``draws.py`` applies them.
"""
