"""The commands that install a part, or the kernel, into the copy of kvcellar that runs.

A checkout is installed again from its folder; any other copy is in its environment under its name,
by which pip finds it and brings what it lacks, whether or not an index has it.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).parents[2]
"""The folder of the checkout, where this copy is in one."""


def is_checkout() -> bool:
    """Return true if this copy runs from the folder of its sources."""
    return (_ROOT / "setup.py").is_file() and (_ROOT / "pyproject.toml").is_file()


def pip_command(extra: str = "") -> str:
    """Return the command that brings what kvcellar needs, or one of its extras.

    Args:
        extra: such as ``mlx``; empty: what kvcellar itself needs.
    """
    part = f"[{extra}]" if extra else ""
    if is_checkout():
        return f"{_pip()} install -e {shlex.quote(f'{_ROOT}{part}')}"
    return f"{_pip()} install {shlex.quote(f'kvcellar{part}')}"


def rebuild_command() -> str:
    """Return the command that builds the CPU kernel once more, and leaves all else as it is."""
    if is_checkout():
        return f"{_pip()} install --no-deps -e {shlex.quote(str(_ROOT))}"
    again = "--no-deps --force-reinstall --no-cache-dir"
    source = _source()
    if source is None:
        return f"{_pip()} install {again} --no-binary kvcellar kvcellar"
    return f"{_pip()} install {again} {shlex.quote(source)}"


def _pip() -> str:
    """Return how pip of this environment is called: by its name only where that is the one."""
    folder = Path(sys.executable).parent
    found = shutil.which("pip")
    if found is not None and Path(found).parent == folder:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def _source() -> str | None:
    """Return the folder or repository that this copy was built from; None: nobody knows.

    pip writes it down (``direct_url.json``) where it was asked for a folder or a repository.
    """
    try:
        said = json.loads(metadata.distribution("kvcellar").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = said.get("url", "")
    if "vcs_info" in said:
        return f"{said['vcs_info']['vcs']}+{url}@{said['vcs_info']['commit_id']}"
    return url if "dir_info" in said else None
