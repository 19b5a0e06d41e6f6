"""Imports the scripts in tools/, which is no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parents[2] / "tools"


def load_script(name: str) -> ModuleType:
    """Import tools/NAME.py, and what it imports from the scripts beside it."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(name)
