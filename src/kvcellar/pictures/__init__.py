"""Pictures: values that say what was sent, and tokens by which a history names them.

Imports types and NumPy, and Pillow late; no model and no store come in. Start in `tokens.py`.
"""

from __future__ import annotations
