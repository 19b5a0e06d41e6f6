"""Outputs of models in every dialect, as the formats' public descriptions have them.

Nothing of the package writes them: each format has a writer here. A mark that models have a token
for stands in double brackets, so that the same text without them is text that is spelt alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

STRING = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": STRING,
                    "text": STRING,
                    "n": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "is_deep": {"type": "boolean"},
                    "tags": {"type": "array", "items": STRING},
                    "more": {"type": "object"},
                    "nothing": {"type": "null"},
                },
            },
        },
    }
    for name in ("read_file", "run", "list-all")
]


@dataclass(frozen=True)
class Output:
    """What a model wrote, and what it means.

    Attributes:
        dialect: its name.
        what: it is a case of.
        written: the output.
        text: of it that is text.
        reasoning: of it; marks in it are as in the output.
        calls: of it.
        is_broken: a call of it was begun, and is none.
        forges: whether text is spelt like marks.
    """

    dialect: str
    what: str
    written: str
    text: str = ""
    reasoning: str = ""
    calls: Calls = field(default_factory=list)
    is_broken: bool = False
    forges: bool = False

    def __str__(self) -> str:
        return f"{self.dialect}: {self.what}"

    def plain(self) -> str:
        return with_tokens(self.written, {})


def with_tokens(written: str, tokens: dict[str, str]) -> str:
    return re.sub(r"⟦(.*?)⟧", lambda found: tokens.get(found[1], found[1]), written)


# Writers ------------------------------------------------------------------------------------------


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(name: str, value: dict[str, Any], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {dumps(value)}}}'


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def keywords(value: dict[str, Any]) -> str:
    return ", ".join(
        f"{key}={dumps(one) if isinstance(one, str) and one.isalpha() else repr(one)}"
        for key, one in value.items()
    )


def bare(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(one, quote) for one in value) + "]"
    return dumps(value)


def hermes(calls: Calls) -> str:
    return "\n".join(f"⟦<tool_call>⟧\n{named(*call)}\n⟦</tool_call>⟧" for call in calls)


def smollm(calls: Calls) -> str:
    return "\n".join(f"⟦<tool_call>⟧{named(*call)}⟦</tool_call>⟧" for call in calls)


def qwen_coder(calls: Calls) -> str:
    said = []
    for name, value in calls:
        inside = "".join(f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in value.items())
        said.append(f"⟦<tool_call>⟧\n<function={name}>\n{inside}</function>\n⟦</tool_call>⟧")
    return "\n".join(said)


def llama_json(calls: Calls) -> str:
    return "; ".join(named(name, value, "parameters") for name, value in calls)


def llama_python(calls: Calls) -> str:
    return "[" + ", ".join(f"{name}({keywords(value)})" for name, value in calls) + "]"


def mistral(calls: Calls) -> str:
    return "".join(f"⟦[TOOL_CALLS]⟧{name}⟦[ARGS]⟧{dumps(value)}" for name, value in calls)


def mistral_with_ids(calls: Calls) -> str:
    return "".join(
        f"⟦[TOOL_CALLS]⟧{name}⟦[CALL_ID]⟧aB3dE5g{i:02}⟦[ARGS]⟧{dumps(value)}"
        for i, (name, value) in enumerate(calls)
    )


def mistral_old(calls: Calls) -> str:
    return "⟦[TOOL_CALLS]⟧ [" + ", ".join(named(*call) for call in calls) + "]"


def harmony(calls: Calls) -> str:
    return "⟦<|start|>⟧assistant".join(
        f"⟦<|channel|>⟧commentary to=functions.{name} ⟦<|constrain|>⟧json⟦<|message|>⟧"
        f"{dumps(value)}⟦<|call|>⟧"
        for name, value in calls
    )


def gemma_python(calls: Calls) -> str:
    return "```tool_code\n" + "\n".join(f"{n}({keywords(v)})" for n, v in calls) + "\n```"


def gemma(calls: Calls) -> str:
    quote = '⟦<|"|>⟧'
    return "".join(f"⟦<|tool_call>⟧call:{n}{bare(v, quote)}⟦<tool_call|>⟧" for n, v in calls)


def function_gemma(calls: Calls) -> str:
    begin, end = "⟦<start_function_call>⟧", "⟦<end_function_call>⟧"
    return "".join(f"{begin}call:{n}{bare(v, '⟦<escape>⟧')}{end}" for n, v in calls)


def lfm(calls: Calls) -> str:
    said = ", ".join(f"{name}({keywords(value)})" for name, value in calls)
    return f"⟦<|tool_call_start|>⟧[{said}]⟦<|tool_call_end|>⟧"


DS_CALL, DS_SEP, DS_END = "⟦<｜tool▁call▁begin｜>⟧", "⟦<｜tool▁sep｜>⟧", "⟦<｜tool▁call▁end｜>⟧"


def _deepseek(said: str) -> str:
    return f"⟦<｜tool▁calls▁begin｜>⟧{said}⟦<｜tool▁calls▁end｜>⟧"


def deepseek(calls: Calls) -> str:
    return _deepseek(
        "\n".join(
            f"{DS_CALL}function{DS_SEP}{name}\n```json\n{dumps(value)}\n```{DS_END}"
            for name, value in calls
        )
    )


def deepseek_short(calls: Calls) -> str:
    return _deepseek("".join(f"{DS_CALL}{n}{DS_SEP}{dumps(v)}{DS_END}" for n, v in calls))


def deepseek_tags(calls: Calls) -> str:
    tag = "⟦｜DSML｜⟧"
    said = ""
    for name, value in calls:
        said += f'<{tag}invoke name="{name}">\n'
        for key, one in value.items():
            kind = "true" if isinstance(one, str) else "false"
            said += f'<{tag}parameter name="{key}" string="{kind}">{raw(one)}</{tag}parameter>\n'
        said += f"</{tag}invoke>\n"
    return f"<{tag}function_calls>\n{said}</{tag}function_calls>"


def _glm(calls: Calls, line: str) -> str:
    said = []
    for name, value in calls:
        inside = "".join(
            f"⟦<arg_key>⟧{key}⟦</arg_key>⟧{line}⟦<arg_value>⟧{raw(one)}⟦</arg_value>⟧{line}"
            for key, one in value.items()
        )
        said.append(f"⟦<tool_call>⟧{name}{line}{inside}⟦</tool_call>⟧")
    return line.join(said)


def glm(calls: Calls) -> str:
    return _glm(calls, "\n")


def glm_short(calls: Calls) -> str:
    return _glm(calls, "")


def granite(calls: Calls) -> str:
    return "⟦<|tool_call|>⟧[" + ", ".join(named(*call) for call in calls) + "]"


def kimi(calls: Calls) -> str:
    said = "".join(
        f"⟦<|tool_call_begin|>⟧functions.{name}:{i}⟦<|tool_call_argument_begin|>⟧{dumps(value)}"
        f"⟦<|tool_call_end|>⟧"
        for i, (name, value) in enumerate(calls)
    )
    return f"⟦<|tool_calls_section_begin|>⟧{said}⟦<|tool_calls_section_end|>⟧"


def minimax(calls: Calls) -> str:
    said = ""
    for name, value in calls:
        inside = "".join(f'<parameter name="{k}">{raw(v)}</parameter>\n' for k, v in value.items())
        said += f'<invoke name="{name}">\n{inside}</invoke>\n'
    return f"⟦<minimax:tool_call>⟧\n{said}⟦</minimax:tool_call>⟧"


def minimax_json(calls: Calls) -> str:
    return "<tool_calls>\n" + "".join(f"{named(*call)}\n" for call in calls) + "</tool_calls>"


@dataclass(frozen=True)
class Format:
    """How the outputs of a dialect are made.

    Attributes:
        write: calls.
        think: marks around reasoning; None: it has none.
        front: what a call has to stand behind, where text comes before it.
        kind: ``json``, ``tags``, ``python``, ``bare`` or ``channels``.
        close: mark that ends a call, which strings spell.
        malformed: outputs that are no calls: as text, or broken (true).
    """

    write: Callable[[Calls], str]
    think: tuple[str, str] | None
    kind: str
    close: str
    malformed: tuple[tuple[str, bool], ...]
    front: str = ""


THINK = ("⟦<think>⟧", "⟦</think>⟧")
ONE = ("⟦<tool_call>⟧", "⟦</tool_call>⟧")

FORMATS = {
    "hermes": Format(
        hermes,
        THINK,
        "json",
        "</tool_call>",
        (
            ("⟦<tool_call>⟧\nnot json\n⟦</tool_call>⟧", False),
            ('⟦<tool_call>⟧\n{"name": "run"', False),
            ('⟦<tool_call>⟧\n{"name": "run", "arguments": [1]}\n⟦</tool_call>⟧', False),
            ('⟦<tool_call>⟧\n{"name": 5, "arguments": {}}\n⟦</tool_call>⟧', False),
            ('⟦<tool_call>⟧\n{"name": "run", "arguments": {"n": }}\n⟦</tool_call>⟧', True),
            ('⟦<tool_call>⟧\n{"name": "run", "arguments": {"n" 1}}\n⟦</tool_call>⟧', True),
            ("⟦<tool_call>⟧", False),
        ),
    ),
    "smollm3": Format(
        smollm,
        THINK,
        "json",
        "</tool_call>",
        (
            ("⟦<tool_call>⟧run()⟦</tool_call>⟧", False),
            ('⟦<tool_call>⟧{"name": "run", "arguments": {"n": 01}}⟦</tool_call>⟧', True),
        ),
    ),
    "qwen3-coder": Format(
        qwen_coder,
        THINK,
        "tags",
        "</parameter>",
        (
            ("⟦<tool_call>⟧\nfunction run\n⟦</tool_call>⟧", False),
            ("⟦<tool_call>⟧\n<function=>\n</function>\n⟦</tool_call>⟧", False),
            ("⟦<tool_call>⟧\n<function=run>\nnothing of it\n</function>\n⟦</tool_call>⟧", False),
            ("⟦<tool_call>⟧\n<function=run>\n<param>\n</function>\n⟦</tool_call>⟧", True),
        ),
    ),
    "llama3": Format(
        llama_json,
        None,
        "json",
        "}",
        (
            ('{"nome": "run", "parameters": {}}', False),
            ('{"name": "run"', False),
            ('{"name": "run", "parameters": "none"}', False),
            ("⟦<|python_tag|>⟧print(1)", False),
            ('{"name": "run", "parameters": {n: 1}}', True),
        ),
        front="⟦<|python_tag|>⟧",
    ),
    "llama4": Format(
        llama_python,
        None,
        "python",
        ")]",
        (
            ("[1, 2, 3]", False),
            ("[run(n=1", False),
            ("[run(n=os.getcwd())]", False),
            ("[run(n=1}]", False),
            ("[run(n=)]", False),
        ),
        front="⟦<|python_start|>⟧",
    ),
    "mistral": Format(
        mistral,
        ("⟦[THINK]⟧", "⟦[/THINK]⟧"),
        "json",
        "[TOOL_CALLS]",
        (
            ("⟦[TOOL_CALLS]⟧run", False),
            ("⟦[TOOL_CALLS]⟧run⟦[ARGS]⟧none", False),
            ("⟦[TOOL_CALLS]⟧run⟦[ARGS]⟧{'n': 1}", True),
            ("⟦[TOOL_CALLS]⟧⟦[ARGS]⟧{}", False),
        ),
    ),
    "mistral-v11": Format(
        mistral_with_ids,
        ("⟦[THINK]⟧", "⟦[/THINK]⟧"),
        "json",
        "[ARGS]",
        (
            ("⟦[TOOL_CALLS]⟧run⟦[CALL_ID]⟧aB3dE5g00", False),
            ("⟦[TOOL_CALLS]⟧run⟦[CALL_ID]⟧⟦[ARGS]⟧{}", False),
            ("⟦[TOOL_CALLS]⟧run⟦[CALL_ID]⟧aB3dE5g00⟦[ARGS]⟧{1: 2}", True),
        ),
    ),
    "mistral-v3": Format(
        mistral_old,
        None,
        "json",
        "]",
        (
            ("⟦[TOOL_CALLS]⟧ run", False),
            ('⟦[TOOL_CALLS]⟧ [{"name": "run"', False),
            ('⟦[TOOL_CALLS]⟧ [{"name": "run", "arguments": {"n": 1,}}]', True),
            ("⟦[TOOL_CALLS]⟧ [5]", False),
        ),
    ),
    "harmony": Format(
        harmony,
        ("⟦<|channel|>⟧analysis⟦<|message|>⟧", "⟦<|end|>⟧⟦<|start|>⟧assistant"),
        "channels",
        "<|call|>",
        (
            ("⟦<|channel|>⟧commentary to=functions.run {}⟦<|end|>⟧", False),
            (
                "⟦<|channel|>⟧commentary to=functions.run ⟦<|constrain|>⟧json⟦<|message|>⟧run",
                True,
            ),
        ),
    ),
    "gemma3": Format(
        gemma_python,
        None,
        "python",
        "```",
        (
            ("```tool_code\nimport os\n```", False),
            ("```tool_code\nrun(n=1\n```", False),
            ("```tool_code\nrun(*x)\n```", False),
            ("```python\nrun(n=1)\n```", False),
        ),
    ),
    "gemma4": Format(
        gemma,
        ("⟦<|channel>⟧thought\n", "⟦<channel|>⟧"),
        "bare",
        "<tool_call|>",
        (
            ("⟦<|tool_call>⟧run{}⟦<tool_call|>⟧", False),
            ("⟦<|tool_call>⟧call:run{n:}⟦<tool_call|>⟧", False),
            ("⟦<|tool_call>⟧call:run{n 1}⟦<tool_call|>⟧", False),
            ('⟦<|tool_call>⟧call:run{text:⟦<|"|>⟧never ends', False),
        ),
    ),
    "functiongemma": Format(
        function_gemma,
        None,
        "bare",
        "<end_function_call>",
        (
            ("⟦<start_function_call>⟧run⟦<end_function_call>⟧", False),
            ("⟦<start_function_call>⟧call:run{n:x}⟦<end_function_call>⟧", False),
        ),
    ),
    "lfm2": Format(
        lfm,
        THINK,
        "python",
        "<|tool_call_end|>",
        (
            ("⟦<|tool_call_start|>⟧run⟦<|tool_call_end|>⟧", False),
            ("⟦<|tool_call_start|>⟧[run(n=1⟦<|tool_call_end|>⟧", False),
            ("⟦<|tool_call_start|>⟧[run(n=a + b)]⟦<|tool_call_end|>⟧", False),
        ),
    ),
    "deepseek-v3": Format(
        deepseek,
        THINK,
        "json",
        "```",
        (
            (f"⟦<｜tool▁calls▁begin｜>⟧{DS_CALL}function{DS_SEP}run\nrun()", False),
            (f"⟦<｜tool▁calls▁begin｜>⟧{DS_CALL}function{DS_SEP}run\n```json\n{{]\n```", True),
        ),
    ),
    "deepseek-v3.1": Format(
        deepseek_short,
        THINK,
        "json",
        "<｜tool▁call▁end｜>",
        (
            ("⟦<｜tool▁calls▁begin｜>⟧run⟦<｜tool▁calls▁end｜>⟧", False),
            (f"⟦<｜tool▁calls▁begin｜>⟧{DS_CALL}run{DS_SEP}{{,}}", True),
        ),
    ),
    "deepseek-v3.2": Format(
        deepseek_tags,
        THINK,
        "tags",
        "</parameter>",
        (
            ("<⟦｜DSML｜⟧function_calls>\nrun\n</⟦｜DSML｜⟧function_calls>", False),
            ('<⟦｜DSML｜⟧function_calls>\n<⟦｜DSML｜⟧invoke name="run">\n<x>', True),
        ),
    ),
    "glm-4.5": Format(
        glm,
        THINK,
        "tags",
        "</tool_call>",
        (
            ("⟦<tool_call>⟧run, please", False),
            ("⟦<tool_call>⟧run\n⟦<arg_value>⟧1⟦</arg_value>⟧\n⟦</tool_call>⟧", True),
        ),
    ),
    "glm-4.7": Format(
        glm_short,
        THINK,
        "tags",
        "</tool_call>",
        (("⟦<tool_call>⟧", False), ("⟦<tool_call>⟧run⟦<arg_value>⟧1⟦</arg_value>⟧", True)),
    ),
    "granite-3": Format(
        granite,
        THINK,
        "json",
        "]",
        (
            ("⟦<|tool_call|>⟧run()", False),
            ('⟦<|tool_call|>⟧[{"name": "run", "arguments": {"n": 1e}}]', True),
        ),
    ),
    "kimi-k2": Format(
        kimi,
        THINK,
        "json",
        "<|tool_call_end|>",
        (
            ("⟦<|tool_calls_section_begin|>⟧⟦<|tool_calls_section_end|>⟧", False),
            ("⟦<|tool_calls_section_begin|>⟧⟦<|tool_call_begin|>⟧run", False),
        ),
    ),
    "minimax-m2": Format(
        minimax,
        THINK,
        "tags",
        "</parameter>",
        (
            ("⟦<minimax:tool_call>⟧\nrun\n⟦</minimax:tool_call>⟧", False),
            ('⟦<minimax:tool_call>⟧\n<invoke name="run">\n{}</invoke>', False),
            ('⟦<minimax:tool_call>⟧\n<invoke name="run">\n<x>{}</invoke>', True),
        ),
    ),
    "minimax-m1": Format(
        minimax_json,
        THINK,
        "json",
        "}",
        (
            ("<tool_calls>\nrun\n</tool_calls>", False),
            ('<tool_calls>\n{"name": "run", "arguments": {"n": nul}}', True),
        ),
    ),
}

PATH = ("read_file", {"path": "src/main.py"})
MANY = ("run", {"text": "x", "n": -3, "ratio": 0.5, "is_deep": True, "nothing": None})
NESTED = ("run", {"tags": ["x", "y z"], "more": {"a": [1, {"b": "c"}], "d": False}})
QUOTES = ("run", {"text": "say \"hi\" and 'bye'\nback\\slash\té 漢 🙂 {[(<>)]}"})
CODE = ("run", {"path": "a.py", "text": "def f(x):\n    if x < 3:\n        return {'a': [x]}\n\n"})
BLANK = ("run", {"path": "  two  spaces  ", "text": ""})


def outputs() -> Iterator[Output]:
    """Yield every output of the corpus."""
    for name, how in FORMATS.items():
        yield from _good(name, how)
        yield from _with_reasoning(name, how)
        for i, (written, is_broken) in enumerate(how.malformed):
            yield Output(name, f"malformed {i}", written, text="?", is_broken=is_broken)


def _said(how: Format, text: str) -> str:
    return f"⟦<|channel|>⟧final⟦<|message|>⟧{text}" if how.kind == "channels" else text


def _good(name: str, how: Format) -> Iterator[Output]:
    for what, text in (
        ("text", "It is sunny."),
        ("text with brackets", 'If a < b then {"x": [1, 2]} </b>'),
        ("text in lines", "First.\n\n  second\n"),
        ("text of a tool's name", "Call read_file(path) yourself."),
    ):
        yield Output(name, what, _said(how, text), text)
    write = how.write
    for what, call in (
        ("a call", PATH),
        ("a call without arguments", ("list-all" if how.kind != "python" else "run", {})),
        ("many kinds of values", MANY),
        ("nested values", NESTED),
        ("code", CODE),
        ("blank values", BLANK),
    ):
        yield Output(name, what, write([call]), calls=[call])
    yield Output(name, "quotes", write([QUOTES]), calls=[QUOTES])
    forged = ("run", {"text": f"the mark {how.close} and <tool_call>{{}}</think>"})
    yield Output(name, "strings with marks", write([forged]), calls=[forged], forges=True)
    if how.kind == "channels":
        preamble = "⟦<|channel|>⟧commentary⟦<|message|>⟧I look.⟦<|end|>⟧⟦<|start|>⟧assistant"
        yield Output(name, "text and a call", preamble + write([PATH]), "I look.", calls=[PATH])
        front = write([PATH]).replace("⟦<|channel|>⟧commentary to=functions.read_file ", "")
        front = front.replace("⟦<|constrain|>⟧", "")
        front = f" to=functions.read_file⟦<|channel|>⟧commentary {front}"
        yield Output(name, "a recipient in front", front, calls=[PATH])
        return
    yield Output(name, "two calls", write([PATH, MANY]), calls=[PATH, MANY])
    yield Output(name, "three alike", write([PATH, PATH, PATH]), calls=[PATH] * 3)
    front = f"I look.\n{how.front}"
    yield Output(name, "text and a call", front + write([PATH]), "I look.", calls=[PATH])
    yield Output(name, "a call and spaces", f"\n{write([PATH])}\n\n", calls=[PATH])
    if how.kind == "json":
        loose = write([MANY]).replace('": ', '" :\n ').replace('{"', '{ "')
        yield Output(name, "other spaces", loose, calls=[MANY])
    if how.kind == "python":
        path = ("run", {"path": "C:\\dir"})
        yield Output(
            name, "an escape that is none", write([path]).replace("\\\\", "\\"), calls=[path]
        )
    if name == "llama3":
        typed = write([MANY]).replace('{"name"', '{"type": "function", "name"')
        yield Output(name, "a type before the name", typed, calls=[MANY])
    if how.kind != "json" or how.close != "}":
        yield Output(name, "a call and text", f"{write([PATH])}\nDone.", "\nDone.", calls=[PATH])


def _with_reasoning(name: str, how: Format) -> Iterator[Output]:
    if how.think is None:
        return
    begin, end = how.think
    write = how.write
    line = "" if how.kind == "channels" or begin.endswith("\n") else "\n"
    thought = f"{begin}{line}I had better look.\n{end}"
    rest = _said(how, "Yes.")
    space = "" if how.kind == "channels" else "\n\n"
    why = "I had better look."
    yield Output(name, "reasoning", f"{thought}{space}{rest}", "Yes.", why)
    calls = [PATH]
    yield Output(name, "reasoning and a call", thought + space + write(calls), "", why, calls)
    inside = write(calls)
    if how.kind == "channels":
        inside = "to=functions.run {}"
    hidden = f"{begin}I could say {inside}.{end}{space}{rest}"
    yield Output(name, "a call inside reasoning", hidden, "Yes.", f"I could say {inside}.")
    yield Output(name, "reasoning that never ends", f"{begin}Well, I", "", "Well, I")
    if how.kind != "channels":
        yield Output(name, "nothing thought", f"{begin}\n\n{end}\n\n{rest}", "Yes.")
