"""Tools of kinds that this server does not run, served around: which are told, which are left out.

Clients offer tools that their own provider runs (a web search), and tools that are no functions. A
model here is given functions; the rest is left out, and the answer says so. What such tools said in
earlier turns is told as text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcellar.server.errors import ApiError

_SAYS_NOTHING = ("id", "type", "status", "role", "encrypted_content", "signature", "cache_control")
_MOST_TOLD = 20_000
"""Characters of one item that is told as text."""


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def plain_name(name: str) -> str:
    """Return a function's name as every dialect can write it: itself, unless it is an odd one.

    Letters of other scripts, spaces and the like, and names of more than 128 characters have one
    made of what is left and of a digest, always the same.
    """
    if _PLAIN_NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_.:-]+', '_', name)[:100].strip('_')}_{digest}"


def with_plain_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls, or whose result, have the names that the model knows."""
    said = dict(message)
    if said.get("role") == "tool" and said.get("name"):
        said["name"] = plain_name(said["name"])
    if said.get("tool_calls"):
        said["tool_calls"] = [
            {**call, "function": {**call["function"], "name": plain_name(call["function"]["name"])}}
            for call in said["tool_calls"]
        ]
    return said


@dataclass(slots=True)
class Toolbox:
    """The tools of one request.

    Attributes:
        given: those that the model is told of, as OpenAI defines functions.
        strict: names of those whose arguments are promised to follow their schemas.
        deferred: those that it is told of where a message refers to them, by name.
        referred: names of deferred ones that a message refers to.
        left_out: names of the others (kinds, of those without a name), and their kinds.
        names: what clients call a function, by its name for the model, where that is another.
    """

    given: list[dict[str, Any]] = field(default_factory=list)
    strict: set[str] = field(default_factory=set)
    deferred: dict[str, dict[str, Any]] = field(default_factory=dict)
    referred: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        description: str | None,
        parameters: Mapping[str, Any] | None,
        *,
        is_strict: bool = False,
        is_deferred: bool = False,
    ) -> None:
        """Give the model a function, or keep it until a message refers to it."""
        sent, name = name, plain_name(name)
        if name != sent:
            self.names[name] = sent
        function: dict[str, Any] = {"name": name}
        if description is not None:
            function["description"] = description
        function["parameters"] = parameters or {"type": "object", "properties": {}}
        if is_strict:
            self.strict.add(name)
        tool = {"type": "function", "function": function}
        if is_deferred:
            self.deferred[name] = tool
        else:
            self.given.append(tool)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """All that the model knows of: those it was given, and those it was referred to."""
        return [*self.given, *(self.deferred[name] for name in sorted(self.referred))]

    def refer(self, name: str) -> str:
        """Let the model know of a deferred function; return what it is told in that place."""
        name = plain_name(name)
        if name not in self.deferred:
            return f"[tool_reference: {name[:128]}]"
        self.referred.add(name)
        definition = json.dumps(self.deferred[name]["function"], ensure_ascii=False)
        return f"<function>{definition}</function>"

    def leave_out(self, name: str | None, kind: str) -> None:
        """Go without a tool of a kind that is not run here."""
        self.left_out[(name or kind)[:128]] = kind[:128]

    def notes(self) -> list[str]:
        """Say which tools were left out, for the answer."""
        return [
            f"tool {name} was left out: this server has no tools of type {kind}, only functions"
            for name, kind in self.left_out.items()
        ]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Choice of whether tools are called, and which.

    Attributes:
        mode: ``auto``, ``none`` or ``required``.
        names: those that may be called; None: all.
    """

    mode: str = "auto"
    names: tuple[str, ...] | None = None


def chosen(tools: Toolbox, choice: ToolChoice) -> list[dict[str, Any]]:
    """Return the tools that an answer may call.

    Raises:
        ApiError: 400, the choice names what is no tool of the request, or is not run here; or a
            call is required and there is nothing to call.
    """
    if choice.mode == "none":
        return []
    if choice.mode == "required" and not (tools.functions or tools.left_out):
        wanted = " or ".join(repr(name) for name in choice.names or ("required",))
        raise ApiError(
            400,
            f"tool_choice is {wanted[:128]} and the request has no tools; give tools, or leave "
            f"tool_choice out",
            "no_tools",
            param="tool_choice",
        )
    known = {tool["function"]["name"]: tool for tool in tools.functions}
    names = None if choice.names is None else tuple(map(plain_name, choice.names))
    for name in choice.names or ():
        if plain_name(name) in known or (name in tools.left_out and len(choice.names or ()) > 1):
            continue
        if name in tools.left_out:
            raise ApiError(
                400,
                f"tool_choice names {name!r}, a tool of type {tools.left_out[name]!r}, which this "
                f"server does not run; name a function, or let the model choose",
                "unsupported_tool",
                param="tool_choice",
            )
        raise ApiError(
            400,
            f"tool_choice names {name[:128]!r}, which is no tool of this request",
            "unknown_tool",
            param="tool_choice",
        )
    found = [tool for name, tool in known.items() if names is None or name in names]
    if choice.mode == "required" and not found:
        what = f"; {', '.join(tools.left_out)} cannot be run here" if tools.left_out else ""
        raise ApiError(
            400,
            f"tool_choice wants a call, and this request has no function to call{what}",
            "no_tools",
            param="tool_choice",
        )
    return found


def told(kind: str, fields: Mapping[str, Any]) -> str:
    """Tell the model in a text what a tool that is not run here did in an earlier turn."""
    left = {
        key: _short(value)
        for key, value in fields.items()
        if key not in _SAYS_NOTHING and value is not None
    }
    name = left.pop("name", None)
    head = f"{kind} {name}" if name else kind
    texts = list(left.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        said = texts[0]
    else:
        said = json.dumps(left, ensure_ascii=False) if left else ""
    return f"[{head}: {said[:_MOST_TOLD]}]" if said else f"[{head}]"


def _short(value: Any) -> Any:
    """Return a value without what is no text: pictures and other data, and what is encrypted."""
    if isinstance(value, str):
        return "(data)" if value.startswith("data:") else value
    if isinstance(value, Mapping):
        return {k: _short(v) for k, v in value.items() if not str(k).startswith("encrypted")}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return value
