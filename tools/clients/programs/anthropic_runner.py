"""Anthropic's tool runner: a thread with three tools, asked one thing after the other.

python anthropic_runner.py URL '["a request", "another"]'
"""

import json
import subprocess
import sys
from pathlib import Path

from anthropic import Anthropic, beta_tool

URL = sys.argv[1]


@beta_tool
def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: of it.
    """
    return Path(path).read_text()


@beta_tool
def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file by another.

    Args:
        path: of the file.
        old: what is there.
        new: what comes in its place.
    """
    text = Path(path).read_text()
    Path(path).write_text(text.replace(old, new, 1))
    return "done" if old in text else "the old text is not there"


@beta_tool
def run_command(command: str) -> str:
    """Run a command and return what it prints.

    Args:
        command: for a shell.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


client = Anthropic(base_url=URL, api_key="none")
thread = client.beta.messages.thread(
    model="local",
    max_tokens=8192,
    system="You change programs.",
    thinking={"type": "adaptive"},
    tools=[read_file, edit_file, run_command],
)
for request in json.loads(sys.argv[2]):
    thread.append({"role": "user", "content": request})
    answer = thread.tool_runner().until_done()
    print("\n".join(block.text for block in answer.content if block.type == "text"))
