"""Options in groups are typed one by one, and reach a command as one value."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvcellar.cli import app as kvcellar_app
from kvcellar.cli.common.commands import add_command
from kvcellar.cli.common.groups import ChatSampling, SamplingOptions


@dataclass(frozen=True, kw_only=True)
class Place:
    """A group with an option that has to be given, and one that has a default."""

    host: Annotated[str, typer.Option(help="Where.")]
    port: Annotated[int, typer.Option(help="Which.")] = 1


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A group that has an option of the same name."""

    port: Annotated[int, typer.Option(help="Another.")] = 2


def run(command, *typed):
    """What a command prints, as the only one of a program."""
    app = typer.Typer()
    add_command(app, "go", command, "go --host here")
    return CliRunner().invoke(app, list(typed))


def go(
    name: Annotated[str, typer.Argument()], *, place: Place, loud: Annotated[bool, typer.Option()]
) -> None:
    """Go somewhere."""
    typer.echo(f"{name} {place} {loud}")


def test_a_group_arrives_as_one_value_with_its_defaults():
    assert run(go, "Ann", "--host", "here", "--loud").output == f"Ann {Place(host='here')} True\n"


def test_a_groups_option_without_a_default_has_to_be_given():
    said = run(go, "Ann", "--loud")
    assert said.exit_code == 2 and "--host" in said.output


def test_the_help_lists_the_options_of_a_group_and_the_examples():
    said = run(go, "--help").output
    assert "Go somewhere." in said and "--port" in said and "go --host here" in said


def helps(group, path=("kvcellar",)):
    """``(names, help's end)`` of every command and group."""
    yield path, group.epilog
    for name, command in getattr(group, "commands", {}).items():
        yield from helps(command, (*path, name))


def test_every_help_ends_with_examples_that_the_parser_takes():
    root = typer.main.get_command(kvcellar_app)
    for path, end in helps(root):
        heading, *examples = end.splitlines()
        assert heading == "Examples:" and examples, path
        typed = [
            shlex.split(example[example.index("kvcellar ") :].split(" | ")[0])
            for example in examples
            if "kvcellar " in example  # others are what one types beside it
        ]
        assert any(words[: len(path)] == list(path) for words in typed), path
        for words in typed:
            command, rest = root, words[1:]
            while hasattr(command, "commands"):
                command, rest = command.commands[rest[0]], rest[1:]
            with command.make_context(command.name, rest):
                pass


def test_two_groups_with_one_option_are_refused_when_the_command_is_made():
    def twice(*, place: Place, other: Elsewhere) -> None:
        """Go to two places."""

    with pytest.raises(ValueError, match="port"):
        run(twice)


def test_what_a_chat_samples_by_default_holds_where_the_model_says_nothing():
    plain, chat = SamplingOptions().params(), ChatSampling().params()
    assert plain.is_greedy and not chat.is_greedy
    assert chat.for_model({"temperature": 0.1}).temperature == 0.1
    assert ChatSampling(temperature=0.3).params().for_model({"temperature": 0.1}).temperature == 0.3
