"""LangChain: an agent of `create_agent` with three tools, asked one thing after the other.

python langchain_agent.py URL '["a request", "another"]'
"""

import json
import subprocess
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = sys.argv[1]


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@tool
def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file by another."""
    text = Path(path).read_text()
    Path(path).write_text(text.replace(old, new, 1))
    return "done" if old in text else "the old text is not there"


@tool
def run_command(command: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


model = ChatOpenAI(model="local", base_url=f"{URL}/v1", api_key="none")
agent = create_agent(
    model, [read_file, edit_file, run_command], system_prompt="You change programs."
)
messages = []
for request in json.loads(sys.argv[2]):
    messages = agent.invoke({"messages": [*messages, ("user", request)]})["messages"]
    print(messages[-1].text)
