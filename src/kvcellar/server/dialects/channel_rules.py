"""Grammar rules of answers that are rows of messages in channels."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.server.dialects.argument_rules import Rules, literal
from kvcellar.server.holding import HeldArguments, schema_json


def channel_starts(
    rules: Rules, arguments: Sequence[HeldArguments], *, is_forced: bool
) -> tuple[str, str]:
    """Add the rules of messages: reasoning, text before calls, and an answer or a call at the end.

    Returns:
        What an answer is, and what it is inside reasoning.
    """

    def written(text: str) -> str:
        return literal(rules.dialect, text)

    calls = []
    for i, one in enumerate(arguments):
        to, value = f"to=functions.{one.name}", f"%json {schema_json(one.schema)}"
        front = written(f" {to}<|channel|>commentary json<|message|>")
        behind = written(f"<|channel|>commentary {to} <|constrain|>json<|message|>")
        rules.add(f"call_{i}", f"({front} | {behind}) {value}")
        calls.append(f"call_{i}")
    rules.add("call", " | ".join(calls))
    thought = written("<|channel|>analysis<|message|>")
    preamble = written("<|channel|>commentary<|message|>")
    final = written("<|channel|>final<|message|>")
    until_next = rules.text_until("<|end|><|start|>assistant")
    if is_forced:
        rules.add("row", f"({thought} {until_next}){{0,2}} call")
        return "row", f"{until_next} row"
    rules.add("side", f"{thought} | {preamble}")
    rules.add("row", f"(side {until_next})* ({final} TEXT | call | side TEXT)")
    return "row", f"TEXT | {until_next} row"
