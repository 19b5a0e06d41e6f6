"""Choice of the folder in which Triton keeps what it has compiled and tuned."""

from __future__ import annotations

import os

from kvcellar.home import default_home

_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME")
"""Variables by which a user says where."""


def keep_compiled() -> None:
    """Have Triton keep what it compiles in the user's folder, where the next start finds it.

    Where the user says another place it is that. To be called before kernels are imported.
    """
    if not any(os.environ.get(name) for name in _PLACES):
        os.environ[_PLACES[0]] = str(default_home() / "triton")
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
