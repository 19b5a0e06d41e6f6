"""Where the store is when nobody says."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_home() -> Path:
    """The folder of all that kvcellar keeps for its user.

    ``KVCELLAR_HOME`` where it is set; else ``kvcellar`` in ``XDG_DATA_HOME`` where that is set;
    else in the platform's folder for user data (``~/.local/share``, on macOS
    ``~/Library/Application Support``).
    """
    own = os.environ.get("KVCELLAR_HOME")
    if own:
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    if data and Path(data).is_absolute():
        return Path(data) / "kvcellar"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kvcellar"
    return Path.home() / ".local" / "share" / "kvcellar"


def default_store() -> Path:
    """The folder of the store: ``store`` in :func:`default_home`."""
    return default_home() / "store"
