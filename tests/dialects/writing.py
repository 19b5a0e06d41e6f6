"""Calls as Hermes and Qwen write them, for tests that need one way of writing."""

from __future__ import annotations

import json

CALL_BEGIN = "<tool_call>"
CALL_END = "\n</tool_call>"


def call_head(name: str) -> str:
    """Write the beginning of a call, up to its arguments."""
    return f'{CALL_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": '
