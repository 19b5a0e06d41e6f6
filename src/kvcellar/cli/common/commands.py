"""From a function to a command: its help, its examples, and options that come in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer.core
from typer._coercion import RuntimeParam, build_runtime_param


def add_command(app: typer.Typer, name: str, command: Callable[..., None], *shown: str) -> None:
    """Add a function as a command that takes one by one what the function takes in groups.

    A parameter whose type is a dataclass is a group of options: each field is one, annotated as
    typer wants it, or a group in its turn, and stands where the group does.

    Args:
        app: where it is added.
        name: what is typed.
        command: what is called; its docstring is the help.
        shown: examples for the end of the help.

    Raises:
        ValueError: two of its options have the same name.
    """
    app.command(name=name, help=_help_of(command), epilog=examples(*shown))(_spelt_out(command))


_MOST_DIGITS = 20
"""Digits of a number that is converted without typer, at most: it refuses longer ones in words."""


class _WhenGiven(RuntimeParam):
    """Conversion of an option's value: a plain one by itself, any other as typer has it.

    Typer makes one with pydantic for each option of a command, given or not, which takes longer
    than all else of a short command.
    """

    def _coerce_value(self, value: Any, param: Any, ctx: Any) -> Any:
        is_short = isinstance(value, str) and len(value) < _MOST_DIGITS and value.isdecimal()
        plain = int(value) if self.annotation is int and is_short else value
        if type(plain) is self.annotation in (str, int, float, bool) and self._is_inside(plain):
            return plain
        made = build_runtime_param(param.type_descriptor)
        return made._coerce_value(value, param=param, ctx=ctx)

    def _is_inside(self, value: Any) -> bool:
        """Return true where a value needs no parser and lies between the option's bounds."""
        info = self.parameter_info
        is_least = info.min is None or value >= info.min
        return info.parser is None and is_least and (info.max is None or value <= info.max)


vars(typer.core)["build_runtime_param"] = lambda said: _WhenGiven(
    said.parameter_info, said.annotation
)


def option(
    metavar: str | None, says: str, *names: str, panel: str | None = None, **more: Any
) -> Any:
    """Describe an option as typer wants it.

    Args:
        metavar: what stands for its value in the help; None for a flag.
        says: its help.
        names: how it is typed; none: as its parameter is called.
        panel: heading below which the help has it.
        more: what else ``typer.Option`` takes.
    """
    return typer.Option(*names, metavar=metavar, help=says, rich_help_panel=panel, **more)


def examples(*commands: str) -> str:
    """Write examples for the end of a command's help, one per line."""
    return "\n".join(["Examples:", *(f"  {command}" for command in commands)])


def _help_of(command: Callable[..., None]) -> str:
    """Take a command's help from its docstring, a line per paragraph for the terminal to break."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _spelt_out(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that its signature has the fields of its groups in their place."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = _filled(kind, given)
        command(**given)

    parameters = [
        one
        for parameter in inspect.signature(command).parameters.values()
        for one in (
            _parameters_of(groups[parameter.name])
            if parameter.name in groups
            else [_parameter(parameter.name, hints[parameter.name], parameter.default)]
        )
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _filled(group: Any, given: dict[str, Any]) -> Any:
    """Make a group of the options that were given, and take them out of these."""
    hints = get_type_hints(group, include_extras=True)
    values = {}
    for field in fields(group):
        kind = hints[field.name]
        values[field.name] = _filled(kind, given) if is_dataclass(kind) else given.pop(field.name)
    return group(**values)


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each option of a group."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind = hints[field.name]
        if is_dataclass(kind):
            yield from _parameters_of(kind)
        else:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield _parameter(field.name, kind, default)


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
