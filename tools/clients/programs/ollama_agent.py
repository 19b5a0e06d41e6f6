"""Ollama's own client: a loop with three tools, asked one thing after the other.

python ollama_agent.py URL '["a request", "another"]'
"""

import json
import subprocess
import sys
from pathlib import Path

from ollama import Client

URL = sys.argv[1]


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: of it.
    """
    return Path(path).read_text()


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


def run_command(command: str) -> str:
    """Run a command and return what it prints.

    Args:
        command: for a shell.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


client = Client(host=URL)
tools = [read_file, edit_file, run_command]
messages = []
for request in json.loads(sys.argv[2]):
    messages.append({"role": "user", "content": request})
    while messages[-1]["role"] != "assistant":
        answer = client.chat(model="local", messages=messages, tools=tools, think=True)
        messages.append(answer.message.model_dump(exclude_none=True))
        for call in answer.message.tool_calls or []:
            function = {tool.__name__: tool for tool in tools}[call.function.name]
            result = function(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    print(messages[-1]["content"])
