"""Claude's agent SDK: a client that works in this folder, asked one thing after the other.

python claude_sdk.py URL '["a request", "another"]'
"""

import asyncio
import json
import sys

from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, ClaudeSDKClient, TextBlock

URL = sys.argv[1]


async def main() -> None:
    """Ask for one thing after the other."""
    options = ClaudeAgentOptions(
        model="local",
        allowed_tools=["Read", "Edit", "Bash"],
        permission_mode="acceptEdits",
        env={
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": "local",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )
    async with ClaudeSDKClient(options) as client:
        for request in json.loads(sys.argv[2]):
            await client.query(request)
            async for message in client.receive_response():
                if isinstance(message, AssistantMessage):
                    print("\n".join(b.text for b in message.content if isinstance(b, TextBlock)))


asyncio.run(main())
