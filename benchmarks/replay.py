"""A recorded session of a coding agent, replayed by a client that sends text and nothing else.

The session has a system prompt, tools, their results, branches and a sub-agent; the answers are the
server's own, and go back as the messages that it sent. The ideal reader of the session computes
every token once: a request that goes on from another reuses all that was computed for that one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SESSION = Path(__file__).parent / "agent_session.json"

Post = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends a body to the chat endpoint and returns the answer's."""


@dataclass
class Reuse:
    """Tokens that a replay has reused.

    Attributes:
        ideal: tokens that were computed before, and could all be reused.
        reused: tokens that the server says it did not compute again, of those.
        prompt: tokens of all prompts.
        worst: step with the most tokens lost, and how many.
    """

    ideal: int = 0
    reused: int = 0
    prompt: int = 0
    worst: tuple[str, int] = ("", 0)

    @property
    def share(self) -> float:
        """Reused over ideal."""
        return self.reused / self.ideal


def replay(post: Post, *, n_shared: int, seed: int = 1) -> Reuse:
    """Run the whole session.

    Args:
        post: the chat endpoint.
        n_shared: tokens that every conversation of it begins with: system prompt and tools.
        seed: of the answers.
    """
    session = json.loads(SESSION.read_text(encoding="utf-8"))
    told: dict[str, tuple[list[dict[str, Any]], int]] = {}  # messages, tokens computed
    reuse = Reuse()
    for number, step in enumerate(session["steps"]):
        if step["after"] is None:
            messages = [{"role": "system", "content": session["system"]}]
            ideal = n_shared if told else 0
        else:
            before, ideal = told[step["after"]]
            messages = list(before)
        for message in step["add"]:
            calls = messages[-1].get("tool_calls")
            is_result = message["role"] == "tool"
            messages.append({**message, "tool_call_id": calls[0]["id"]} if is_result else message)
        choice: Any = "none"
        if step["call"] is not None:
            choice = {"type": "function", "function": {"name": step["call"]}}
        answer = post(
            {
                "messages": messages,
                "tools": session["tools"],
                "tool_choice": choice,
                "max_tokens": step["max_tokens"] if step["call"] is None else 96,
                "temperature": 0.8,
                "seed": seed + number,
            }
        )
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        ideal = min(ideal, usage["prompt_tokens"] - 1)
        reuse.prompt += usage["prompt_tokens"]
        reuse.ideal += ideal
        reuse.reused += min(ideal, cached)
        reuse.worst = max(reuse.worst, (step["id"], ideal - cached), key=lambda worst: worst[1])
        said = answer["choices"][0]["message"]
        plain = {key: said[key] for key in ("role", "content", "tool_calls") if said.get(key)}
        # The last sampled token was never computed.
        told[step["id"]] = ([*messages, plain], usage["total_tokens"] - 1)
    return reuse


def shared_tokens(tokenizer: Any) -> int:
    """Return the tokens that every conversation of the session begins with."""
    from kvcellar.dialects.messages import say_tools
    from kvcellar.models.text.prompts import encode, render

    session = json.loads(SESSION.read_text(encoding="utf-8"))
    system = [{"role": "system", "content": session["system"]}]
    said = say_tools(system, session["tools"])
    return len(encode(tokenizer, render(tokenizer, said, is_asking=False)))
