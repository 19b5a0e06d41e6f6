"""The process that renders chat templates, so that one that never ends can be stopped.

Run as a script by ``rendering.py``; imports nothing of kvcellar. Templates run in Jinja as they do
in transformers, and see the same values, since they are tried there. A job comes as a length and a
pickle, an answer goes as a length and JSON. What a job may take is limited by the system: a timer
of CPU time ends this process, whatever it is in, and memory beyond the limit is not granted.
Windows has neither: there whoever asked ends this process when it takes too long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import struct
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
"""What rendering may take beyond what the process holds when it is ready."""


def main() -> None:
    """Answer jobs until nobody sends any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what a library prints is no answer
    _limit_memory()
    _send(answers, {"ready": True})
    while header := jobs.read(4):
        payload = jobs.read(struct.unpack("<I", header)[0])
        job = pickle.loads(payload)
        _limit_time(job.pop("cpu_s"))
        try:
            if "literals" in job:
                found = {"text": literals(job["literals"])}
            elif "variables" in job:
                found = {"text": "\0".join(sorted(variables(job["variables"])))}
            else:
                found = _bounded(render(**job), 16 * len(payload) + (1 << 20))
        except MemoryError:
            found = {"exceeded": f"more than {MEMORY_BYTES >> 20} MB of memory"}
        except Exception as error:  # jinja's, or whatever the template raised
            found = {"error": str(error) or type(error).__name__}
        finally:
            _limit_time(0.0)
        _send(answers, found)


def render(
    conversations: list[Any],
    chat_template: str,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
    **more: Any,
) -> str:
    """Render a conversation.

    Args:
        conversations: one, of messages.
        chat_template: Jinja.
        tools: definitions, as the template takes them.
        add_generation_prompt: end with the opening of an answer.
        more: other variables, such as special tokens.

    Raises:
        TypeError: a message, or a tool, is no mapping.
        jinja2.TemplateError: the template is none, or refuses the conversation.
        Exception: whatever else it raises.
    """
    messages = _plain(conversations[0])
    for one in (*messages, *(tools or ())):
        if not isinstance(one, dict):
            raise TypeError(f"messages and tools are objects of JSON, got {one!r}")
    return _compiled(chat_template).render(
        messages=[_with_thoughts(message) for message in messages],
        tools=_plain(tools),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **_plain(more),
    )


def literals(template: str) -> str:
    """Return all text that is written in a template, joined with null characters."""
    tree = _compiled(template).environment.parse(template)
    found = {node.data for node in tree.find_all(nodes.TemplateData)}
    constants = (node.value for node in tree.find_all(nodes.Const))
    found.update(value for value in constants if isinstance(value, str))
    return "\0".join(found)


def variables(template: str) -> set[str]:
    """Return the names that a template reads and does not set."""
    return jinja2.meta.find_undeclared_variables(_compiled(template).environment.parse(template))


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda pattern: datetime.now().strftime(pattern),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks what a model is trained on: plain text here."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Any) -> Any:
        """Return what is in the block, as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """The ``dict`` of templates: not the type itself, with all that it leads to."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary of keys with one value."""
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """The ``namespace`` of templates, without names that lead into Python's own."""

    def __init__(*args: Any, **more: Any) -> None:  # so that ``self`` may be a name
        own, values = args[0], dict(*args[1:], **more)
        for name in values:
            _refuse_hidden(name)
        jinja2.utils.Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a chat template may not set {name!r} on a namespace, since it begins with an "
            f"underscore; rename it"
        )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Python does; Jinja's own filter escapes what HTML would read."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its thoughts under the names that templates read them by."""
    names = ("reasoning_content", "thinking", "reasoning")
    thoughts = next((message[name] for name in names if message.get(name) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: templates are strangers, and get no object with methods.

    What is nothing of JSON becomes the name of its type, in angle brackets.
    """
    for kind in (str, int, float):
        if isinstance(value, kind) and not isinstance(value, bool):
            return value if type(value) is kind else getattr(kind, f"__{kind.__name__}__")(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        kept = [_plain(part) for part in value]
        return kept if isinstance(value, list) else tuple(kept)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {part.name: _plain(getattr(value, part.name)) for part in fields}
    if type(value).__module__ == "numpy" and hasattr(value, "ndim") and not value.ndim:
        return _plain(value.item())
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _bounded(text: str, most: int) -> dict[str, str]:
    if len(text) > most:
        return {"exceeded": f"{len(text)} characters of output, where {most} are allowed"}
    return {"text": text}


def _limit_time(cpu_s: float) -> None:
    """Let so much CPU time pass before this process ends; 0: as much as there is."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _limit_memory() -> None:
    """Grant ``MEMORY_BYTES`` more than there is now; where that is unknown, nothing is limited."""
    if sys.platform == "win32":
        return
    import resource

    with contextlib.suppress(OSError, ValueError):  # no /proc, or a lower limit is set
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _send(answers: BinaryIO, value: dict[str, Any]) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    answers.write(struct.pack("<I", len(data)) + data)
    answers.flush()


if __name__ == "__main__":
    main()
