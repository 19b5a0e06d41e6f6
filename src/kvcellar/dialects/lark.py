"""Grammars of answers in a dialect, as llguidance has them: text, reasoning, and calls of tools.

They follow from the same description as the patterns that read answers. A mark that the model has a
token for is that token; what is spelt like it is text, in which tokens of marks cannot come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvcellar.dialects.argument_rules import (
    Rules,
    argument_rules,
    filled,
    literal,
    regex_of,
)
from kvcellar.dialects.channel_rules import channel_starts
from kvcellar.dialects.dialect import CallForm, Dialect, JsonArguments
from kvcellar.dialects.held import HeldArguments, schema_json

HEAD = "%llguidance {}"
_TEXT = "TEXT: /(.|\\n)*/"
MOST_IN_BLOCK = 64
_SPACE = "space: /[ \\n]{1,2}/"


def call_grammars(
    dialect: Dialect,
    arguments: Sequence[HeldArguments],
    *,
    is_forced: bool,
    most: int,
    schema: dict[str, object] | None = None,
) -> tuple[str, str]:
    """Write grammars of answers that may call tools, or have to.

    Args:
        dialect: of the model.
        arguments: the tools, and what their arguments are held to.
        is_forced: nothing but calls, behind reasoning at most.
        most: calls that a forced answer may have; one that is not forced has one or any number.
        schema: of the JSON that an answer without calls has to be.

    Returns:
        A grammar of whole answers, and one of answers that begin inside reasoning.
    """
    rules = Rules(dialect)
    if dialect.has_channels:
        starts = channel_starts(rules, arguments, is_forced=is_forced, schema=schema)
    else:
        _call_rules(rules, arguments)
        starts = _forced(rules, most) if is_forced or schema is not None else _free(rules, most)
    if schema is not None and not dialect.has_channels:
        starts = (f"{starts[0]} | %json {schema_json(schema)}",) * 2
    rules.add("", _TEXT)
    lines = rules.lines()
    first, second = ("\n".join([HEAD, f"start: {start}", *lines]) for start in starts)
    return first, second


def schema_grammar(dialect: Dialect, schema: dict[str, object]) -> str:
    """Write the grammar of an answer that is JSON of a schema; in channels, of its last message."""
    if not dialect.has_channels:
        return f"{HEAD}\nstart: %json {schema_json(schema)}"
    return call_grammars(dialect, (), is_forced=False, most=0, schema=schema)[0]


def _call_rules(rules: Rules, arguments: Sequence[HeldArguments]) -> None:
    """Add a rule for each tool's call, behind what opens a block."""
    dialect, form = rules.dialect, rules.dialect.calls
    assert form is not None
    names, firsts = [], []
    for i, one in enumerate(arguments):
        head = filled(form.heads[0], one.name)
        said = argument_rules(rules, form, one, i)
        rest = f"{said} {literal(dialect, filled(form.tail, one.name))}"
        rules.add(f"call_{i}", f"{literal(dialect, head)} {rest}")
        names.append(f"call_{i}")
        firsts.append(f"/[ \\n]{{0,2}}{regex_of(form.begin + head)}/ {rest}")
    rules.add("call", " | ".join(names))
    if form.is_first:
        rules.add("first", " | ".join(firsts))


def _block(rules: Rules, form: CallForm, most: int, call: str = "call") -> str:
    """Write what comes behind the mark of a block."""
    end = literal(rules.dialect, form.end)
    if form.between is None or most < 2:
        return f"{call} {end}"
    return f"{call} ({literal(rules.dialect, form.between)} call){{0,{most - 1}}} {end}"


def _forced(rules: Rules, most: int) -> tuple[str, str]:
    """Calls and spaces; behind reasoning, if the model has tokens for it or is in the middle."""
    form, marks = rules.dialect.calls, rules.dialect.reasoning
    assert form is not None
    rules.add("one", f"{literal(rules.dialect, form.begin)} {_block(rules, form, most)}")
    rules.add("", _SPACE)
    more = f" (space? one){{0,{most - 1}}} space?" if most > 1 and form.between is None else ""
    rules.add("calls", f"one{more}")
    if marks is None:
        return "calls", "calls"
    rules.add("thought", rules.text_until(marks.end))
    opened = _opened(rules)
    whole = f"({opened} thought space?)? calls" if opened else "calls"
    return whole, "thought space? calls"


def _free(rules: Rules, most: int) -> tuple[str, str]:
    """Text, reasoning in which nothing is a call, and calls."""
    form, marks = rules.dialect.calls, rules.dialect.reasoning
    assert form is not None
    opened, most_in_block = _opened(rules), 1 if most < 2 else MOST_IN_BLOCK
    if form.is_first:
        _first_body(rules, form, most_in_block)
    else:
        block = _block(rules, form, most_in_block)
        begins = [form.begin, *(one for one in form.other_begins if _is_marked(rules, one))]
        calls = " | ".join(f"{rules.text_until(begin)} {block}" for begin in begins)
        thoughts = f"TEXT {opened} thought" if opened else ""
        if most < 2:
            items, last = f"({thoughts})* " if opened else "", f"{calls} | TEXT"
        else:
            items, last = f"({' | '.join(filter(None, (calls, thoughts)))})* ", "TEXT"
        last += f" | TEXT {opened} TEXT" if opened else ""
        rules.add("body", f"{items}({last})")
    if marks is None:
        return "body", "body"
    rules.add("thought", rules.text_until(marks.end))
    begun = opened
    if not opened:
        rules.add("", f"first_think[lazy]: /[ \\n]*/ {json.dumps(marks.begin)}")
        begun = "first_think"
    if opened and not form.is_first:
        return "body", "thought body | TEXT"
    return f"{begun} thought body | {begun} TEXT | body", "thought body | TEXT"


def _first_body(rules: Rules, form: CallForm, most: int) -> None:
    """Add the rule of text, or calls where an answer begins with them.

    Text and the beginning of a call are one term each, since of two terms the longer one counts.
    """
    rules.add("", _plain(form))
    block = _block(rules, form, most)
    marked = [literal(rules.dialect, one) for one in form.other_begins if _is_marked(rules, one)]
    more = f" ({' | '.join(f'{one} {block}' for one in marked)} TEXT)?" if marked else ""
    rules.add("body", f"{_block(rules, form, most, 'first')} | PLAIN{more}")


def _opened(rules: Rules) -> str:
    """Write the mark that opens reasoning, if it is a token; else nothing."""
    marks = rules.dialect.reasoning
    if marks is None or not _is_marked(rules, marks.begin):
        return ""
    return literal(rules.dialect, marks.begin)


def _plain(form: CallForm) -> str:
    """Write the term of text that begins with no call, where calls have no mark."""
    if isinstance(form.arguments, JsonArguments):
        call = r'[ \n]*\{[ \n]*"(name"|type"[ \n]*:[ \n]*"function")(.|\n)*'
    else:
        call = rf"[ \n]*{regex_of(form.begin)}[ \n]*[\w.-]+\((.|\n)*"
    return f"PLAIN: /(.|\\n)*/ & ~/{call}/"


def _is_marked(rules: Rules, text: str) -> bool:
    """Return true if a literal has a token of the model's in it."""
    return rules.dialect.spelt(text) != text
