"""Every dialect, described."""

from __future__ import annotations

from kvcellar.dialects.dialect import (
    BareArguments,
    CallForm,
    Dialect,
    JsonArguments,
    PythonArguments,
    ReasoningMarks,
    TaggedArguments,
)

_JSON = JsonArguments()
_NAMED = '{"name": "$name", "arguments": '
_THINK = ReasoningMarks()

HERMES = Dialect(
    "hermes",
    CallForm("<tool_call>", (f"\n{_NAMED}",), _JSON, "}", "\n</tool_call>", apart="\n"),
    _THINK,
)

QWEN_CODER = Dialect(
    "qwen3-coder",
    CallForm(
        "<tool_call>\n",
        ("<function=$name>\n",),
        TaggedArguments("<parameter=$key>\n", "\n</parameter>\n"),
        "</function>",
        "\n</tool_call>",
        apart="\n",
    ),
    _THINK,
)

LLAMA_JSON = Dialect(
    "llama3",
    CallForm(
        "",
        (
            '{"name": "$name", "parameters": ',
            '{"type": "function", "name": "$name", "parameters": ',
        ),
        _JSON,
        "}",
        "",
        between="; ",
        is_first=True,
        other_begins=("<|python_tag|>",),
    ),
)

LLAMA_PYTHON = Dialect(
    "llama4",
    CallForm(
        "[",
        ("$name(",),
        PythonArguments(),
        ")",
        "]",
        between=", ",
        is_first=True,
        other_begins=("<|python_start|>[",),
    ),
)

MISTRAL = Dialect(
    "mistral",
    CallForm("[TOOL_CALLS]", ("$name[ARGS]", "$name[CALL_ID]$id[ARGS]"), _JSON, "", ""),
    ReasoningMarks("[THINK]", "[/THINK]"),
)

MISTRAL_WITH_IDS = Dialect(
    "mistral-v11",
    CallForm("[TOOL_CALLS]", ("$name[CALL_ID]$id[ARGS]", "$name[ARGS]"), _JSON, "", ""),
    ReasoningMarks("[THINK]", "[/THINK]"),
)

MISTRAL_OLD = Dialect(
    "mistral-v3",
    CallForm("[TOOL_CALLS] [", (_NAMED,), _JSON, '$[, "id": "$id"$]}', "]", between=", "),
)

GEMMA_PYTHON = Dialect(
    "gemma3",
    CallForm("```tool_code\n", ("$name(",), PythonArguments(), ")", "\n```", between="\n"),
)

GEMMA = Dialect(
    "gemma4",
    CallForm("<|tool_call>", ("call:$name{",), BareArguments('<|"|>'), "}", "<tool_call|>"),
    ReasoningMarks("<|channel>thought\n", "<channel|>"),
)

FUNCTION_GEMMA = Dialect(
    "functiongemma",
    CallForm(
        "<start_function_call>",
        ("call:$name{",),
        BareArguments("<escape>"),
        "}",
        "<end_function_call>",
    ),
)

LFM = Dialect(
    "lfm2",
    CallForm(
        "<|tool_call_start|>[",
        ("$name(",),
        PythonArguments(),
        ")",
        "]<|tool_call_end|>",
        between=", ",
    ),
    _THINK,
)

_CALL = "<｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"

DEEPSEEK = Dialect(
    "deepseek-v3",
    CallForm(
        "<｜tool▁calls▁begin｜>",
        (f"{_CALL}function{_SEP}$name\n```json\n",),
        _JSON,
        "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        between="\n",
    ),
    _THINK,
)

DEEPSEEK_SHORT = Dialect(
    "deepseek-v3.1",
    CallForm(
        "<｜tool▁calls▁begin｜>",
        (f"{_CALL}$name{_SEP}",),
        _JSON,
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        between="",
    ),
    _THINK,
)

DEEPSEEK_TAGS = Dialect(
    "deepseek-v3.2",
    CallForm(
        "<｜DSML｜function_calls>\n",
        ('<｜DSML｜invoke name="$name">\n',),
        TaggedArguments(
            '<｜DSML｜parameter name="$key" string="$string">', "</｜DSML｜parameter>\n"
        ),
        "</｜DSML｜invoke>\n",
        "</｜DSML｜function_calls>",
        between="",
    ),
    _THINK,
)

GLM = Dialect(
    "glm-4.5",
    CallForm(
        "<tool_call>",
        ("$name\n",),
        TaggedArguments("<arg_key>$key</arg_key>\n<arg_value>", "</arg_value>\n"),
        "",
        "</tool_call>",
        apart="\n",
    ),
    _THINK,
)

GLM_SHORT = Dialect(
    "glm-4.7",
    CallForm(
        "<tool_call>",
        ("$name",),
        TaggedArguments("<arg_key>$key</arg_key><arg_value>", "</arg_value>"),
        "",
        "</tool_call>",
    ),
    _THINK,
)

GRANITE = Dialect(
    "granite-3",
    CallForm("<|tool_call|>[", (_NAMED,), _JSON, "}", "]", between=", "),
    _THINK,
)

KIMI = Dialect(
    "kimi-k2",
    CallForm(
        "<|tool_calls_section_begin|>",
        ("<|tool_call_begin|>$<functions.$name:$index$><|tool_call_argument_begin|>",),
        _JSON,
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        between="",
    ),
    _THINK,
)

MINIMAX = Dialect(
    "minimax-m2",
    CallForm(
        "<minimax:tool_call>\n",
        ('<invoke name="$name">\n',),
        TaggedArguments('<parameter name="$key">', "</parameter>\n"),
        "</invoke>\n",
        "</minimax:tool_call>",
        between="",
    ),
    _THINK,
)

MINIMAX_JSON = Dialect(
    "minimax-m1",
    CallForm("<tool_calls>\n", (_NAMED,), _JSON, "}\n", "</tool_calls>", between=""),
    _THINK,
)

SMOLLM = Dialect(
    "smollm3",
    CallForm("<tool_call>", (_NAMED,), _JSON, "}", "</tool_call>", apart="\n"),
    _THINK,
)

HARMONY = Dialect("harmony")

ALL = (
    *(HERMES, QWEN_CODER, LLAMA_JSON, LLAMA_PYTHON, MISTRAL, MISTRAL_WITH_IDS, MISTRAL_OLD),
    HARMONY,
    *(GEMMA_PYTHON, GEMMA, FUNCTION_GEMMA, LFM, DEEPSEEK, DEEPSEEK_SHORT, DEEPSEEK_TAGS),
    *(GLM, GLM_SHORT, GRANITE, KIMI, MINIMAX, MINIMAX_JSON, SMOLLM),
)
