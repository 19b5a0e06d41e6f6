"""OpenAI's agents SDK: an agent with three tools and a session, asked one thing after the other.

python openai_agent.py URL '["a request", "another"]'
"""

import json
import subprocess
import sys
from pathlib import Path

from agents import (
    Agent,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = sys.argv[1]


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@function_tool
def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file by another."""
    text = Path(path).read_text()
    Path(path).write_text(text.replace(old, new, 1))
    return "done" if old in text else "the old text is not there"


@function_tool
def run_command(command: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
agent = Agent(
    name="programmer",
    instructions="You change programs.",
    model="local",
    tools=[read_file, edit_file, run_command],
)
session = SQLiteSession("programs")
for request in json.loads(sys.argv[2]):
    print(Runner.run_sync(agent, request, session=session).final_output)
