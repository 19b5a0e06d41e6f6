"""Tools for the `llm` command: `llm --functions llm_tools.py`."""

import subprocess
from pathlib import Path


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file by another."""
    text = Path(path).read_text()
    Path(path).write_text(text.replace(old, new, 1))
    return "done" if old in text else "the old text is not there"


def run_command(command: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
