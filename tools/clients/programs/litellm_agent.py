"""LiteLLM: a loop with three tools, asked one thing after the other.

python litellm_agent.py URL '["a request", "another"]'
"""

import json
import subprocess
import sys
from pathlib import Path

import litellm

URL = sys.argv[1]


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


def described(function, *names):
    """Describe a function whose arguments are texts."""
    properties = {name: {"type": "string"} for name in names}
    parameters = {"type": "object", "properties": properties, "required": list(names)}
    about = {"name": function.__name__, "description": function.__doc__, "parameters": parameters}
    return {"type": "function", "function": about}


functions = {f.__name__: f for f in (read_file, edit_file, run_command)}
tools = [
    described(read_file, "path"),
    described(edit_file, "path", "old", "new"),
    described(run_command, "command"),
]
messages = [{"role": "system", "content": "You change programs."}]
for request in json.loads(sys.argv[2]):
    messages.append({"role": "user", "content": request})
    while messages[-1]["role"] != "assistant":
        answer = litellm.completion(
            model="openai/local",
            api_base=f"{URL}/v1",
            api_key="none",
            messages=messages,
            tools=tools,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or []:
            given = json.loads(call.function.arguments)
            result = functions[call.function.name](**given)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(messages[-1]["content"])
