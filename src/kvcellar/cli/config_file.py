"""Defaults of commands' options from the user's own file, which is TOML.

A table has the name of a command (``[serve]``, ``[agents.chat]``) and in it options as they are
typed, without the dashes in front (``kv-dtype = "int8"``). ``[all]`` is for every command that has
an option of that name. What is typed wins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import ConfigError
from kvcellar.home import default_config
from kvcellar.valid import nearest

ALL = "all"
"""The table of what is meant for every command."""

_FEW_NAMES = 12
"""So many names are listed where none comes near; of more, the nearest."""

Defaults = dict[str, Any]
"""Parameter -> value, and for groups command -> its defaults, as the parser takes them."""


def defaults_of(group: Any, file: Path | None = None) -> Defaults:
    """Return the defaults of a group's commands, as the user's file has them.

    Args:
        group: the parser's group of all commands.
        file: None: the user's own; it need not be there.

    Raises:
        ConfigError: it cannot be read, or names what there is not.
    """
    file = default_config() if file is None else file
    tables = _read(file)
    everywhere = tables.pop(ALL, {})
    found = _of_group(group, tables, (), file)
    if not isinstance(everywhere, Mapping):
        raise ConfigError(f"{ALL} in {file} has to be a table, [{ALL}]")
    known: set[str] = set()
    if everywhere:  # it is looked at what every command takes
        known = _spread(group, everywhere, found, f"[{ALL}] of the config file {file}")
    for name in everywhere.keys() - known:
        raise _unknown(f"option {name!r} in [{ALL}]", name, _all_names(group), file)
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"the config file {file} cannot be read: {said}") from error


def _of_group(
    group: Any, tables: Mapping[str, Any], above: tuple[str, ...], file: Path
) -> Defaults:
    """Return the defaults of the commands of a group, each table looked at by name."""
    found: Defaults = {}
    for name, table in tables.items():
        path = (*above, name)
        command = group.commands.get(name)
        if command is None or not isinstance(table, Mapping):
            if command is not None:
                raise ConfigError(
                    f"{'.'.join(path)} in {file} has to be a table, [{'.'.join(path)}]"
                )
            if not isinstance(table, Mapping):
                raise _without_a_table(name, group, above, file)
            commands = [*group.commands, *([] if above else [ALL])]
            raise _unknown(f"command [{'.'.join(path)}]", name, commands, file)
        if hasattr(command, "commands"):
            found[name] = _of_group(command, table, path, file)
            continue
        names, at = _names(command), f"[{'.'.join(path)}] of the config file {file}"
        for option in table:
            if option not in names:
                raise _unknown(f"option {option!r} in [{'.'.join(path)}]", option, names, file)
        found[name] = {
            names[option].name: _taken(names[option], option, value, at)
            for option, value in table.items()
        }
    return found


def _spread(group: Any, everywhere: Mapping[str, Any], found: Defaults, at: str) -> set[str]:
    """Give every command what is meant for all and it has; return the options that one had."""
    known: set[str] = set()
    for name, command in group.commands.items():
        mine = found.setdefault(name, {})
        if hasattr(command, "commands"):
            known |= _spread(command, everywhere, mine, at)
            continue
        for option, parameter in _names(command).items():
            if option in everywhere:
                mine.setdefault(parameter.name, _taken(parameter, option, everywhere[option], at))
                known.add(option)
    return known


def _taken(parameter: Any, option: str, value: Any, at: str) -> Any:
    """Return a value of the file as the parser takes it: one of what may be several, as a list.

    Raises:
        ConfigError: there are several where the option takes one.
    """
    if getattr(parameter, "multiple", False) or parameter.nargs != 1:
        return value if isinstance(value, list) else [value]
    if isinstance(value, list | Mapping):
        raise ConfigError(f"{option} in {at} takes one value, and there is {value!r}")
    return value


def _names(command: Any) -> dict[str, Any]:
    """Return name as it is typed, without dashes -> parameter, of what a command takes.

    Flags that switch off have their own name, ``--raw`` of ``--chat``; a file says false instead.
    """
    named: dict[str, Any] = {}
    for parameter in command.params:
        if parameter.name in ("help", None):
            continue
        for option in parameter.opts:
            if option.startswith("--"):
                named[option[2:]] = parameter
            elif not option.startswith("-"):
                named[option.lower()] = parameter
    return named


def _all_names(group: Any) -> set[str]:
    commands = group.commands.values()
    return {
        name
        for command in commands
        for name in (_all_names(command) if hasattr(command, "commands") else _names(command))
    }


def _unknown(what: str, name: str, there: Iterable[str], file: Path) -> ConfigError:
    """Return the refusal of a name, with those that come near."""
    names = sorted(there)
    near = nearest(name, names, 1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif len(names) <= _FEW_NAMES:
        hint = f"there are: {', '.join(names)}"
    else:
        hint = "kvcellar COMMAND --help has all that a command takes"
    return ConfigError(f"there is no {what} of the config file {file}; {hint}")


def _without_a_table(name: str, group: Any, above: tuple[str, ...], file: Path) -> ConfigError:
    """Return the refusal of an option that stands in no command's table, with where it belongs."""
    near = nearest(name, _all_names(group), 1)
    if not near:
        return _unknown(f"key {name!r}", name, [*group.commands, *([] if above else [ALL])], file)
    takes = [
        ".".join([*above, command])
        for command, one in group.commands.items()
        if near[0] in (_all_names(one) if hasattr(one, "commands") else _names(one))
    ]
    tables = " or ".join(f"[{one}]" for one in (takes[0], ALL))
    said = "" if near[0] == name else f"did you mean {near[0]!r}? "
    return ConfigError(
        f"{name!r} in the config file {file} stands in no table; {said}put it below a line such as "
        f"{tables}"
    )
