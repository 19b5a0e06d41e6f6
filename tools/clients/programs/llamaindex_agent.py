"""LlamaIndex: a `FunctionAgent` with three tools and a memory, asked one thing after the other.

python llamaindex_agent.py URL '["a request", "another"]'
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

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


async def main() -> None:
    """Ask for one thing after the other."""
    model = OpenAILike(
        model="local",
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=131072,
        max_tokens=4096,
    )
    agent = FunctionAgent(
        tools=[read_file, edit_file, run_command], llm=model, system_prompt="You change programs."
    )
    memory = ChatMemoryBuffer.from_defaults(token_limit=100000)
    for request in json.loads(sys.argv[2]):
        print(await agent.run(user_msg=request, memory=memory))


asyncio.run(main())
