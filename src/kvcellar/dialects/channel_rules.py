"""Grammar rules of answers that are rows of messages in channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.dialects.argument_rules import Rules, literal
from kvcellar.dialects.held import HeldArguments, schema_json


def channel_starts(
    rules: Rules,
    arguments: Sequence[HeldArguments],
    *,
    is_forced: bool,
    schema: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Add the rules of messages: reasoning, text before calls, and an answer or a call at the end.

    Args:
        rules: of the grammar.
        arguments: tools that may be called, and what their arguments are held to.
        is_forced: nothing but a call, behind reasoning at most.
        schema: of the JSON that an answer is; None: any text.

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
    thought = written("<|channel|>analysis<|message|>")
    preamble = written("<|channel|>commentary<|message|>")
    final = written("<|channel|>final<|message|>")
    until_next = rules.text_until("<|end|><|start|>assistant")
    if schema is not None:
        calls.append(f"{final} %json {schema_json(schema)}")
    if is_forced or schema is not None:
        rules.add("row", f"({thought} {until_next}){{0,2}} ({' | '.join(calls)})")
        return "row", f"{until_next} row"
    rules.add("side", f"{thought} | {preamble}")
    rules.add("row", f"(side {until_next})* ({' | '.join([f'{final} TEXT', *calls, 'side TEXT'])})")
    return "row", f"TEXT | {until_next} row"
