"""Defaults of options from the user's own file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.cli.config_file import defaults_of
from kvcellar.home import default_config

RUNNER = CliRunner()


@pytest.fixture
def config(tmp_path, monkeypatch):
    file = tmp_path / "config.toml"
    monkeypatch.setenv("KVCELLAR_CONFIG", str(file))
    return file


def run(*args):
    return RUNNER.invoke(app, [*args], prog_name="kvcellar")


def inspected(*args):
    result = run("inspect", "demo", "--json", *args)
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_a_table_of_a_command_and_of_all_set_defaults_and_what_is_typed_wins(config):
    assert inspected()["context"] == 4096
    config.write_text("[all]\ncontext = 100\n")
    assert inspected()["context"] == 100
    config.write_text("[all]\ncontext = 100\n[inspect]\ncontext = 200\nagents = 3\n")
    found = inspected()
    assert found["context"] == 200 and found["agents"] == 3
    assert inspected("--context", "300")["context"] == 300


def test_arguments_flags_and_commands_of_groups_have_defaults_too(config, tmp_path):
    config.write_text(
        f'[all]\nstore = "{tmp_path}/store"\n[agents.list]\njson = true\n'
        f'[agents.create]\nsystem = "You write verse."\njson = true\n'
    )
    made = json.loads(run("agents", "create", "poet").stdout)
    assert made["id"] == "poet" and made["n_messages"] == 1
    assert [one["id"] for one in json.loads(run("agents", "list").stdout)] == ["poet"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[serv]\nport = 1\n",
            "no command [serv] of the config file {file}; did",
        ),
        (
            "[serve]\nprot = 1\n",
            "no option 'prot' in [serve] of the config file {file}; did",
        ),
        (
            "[agents.chatt]\n",
            "no command [agents.chatt] of the config file {file}; did",
        ),
        (
            "[all]\nmemroy = '1GB'\n",
            "no option 'memroy' in [all] of the config file {file}; did",
        ),
        (
            "[all]\nxyzzy = 1\n",
            "no option 'xyzzy' in [all] of the config file {file}; kvcellar COMMAND --help",
        ),
        (
            "[inspect]\nmemory = ['1GB', '2GB']\n",
            "memory in [inspect] of the config file {file} takes one value, and there is ['1GB'",
        ),
        (
            "[all]\nmemory = { most = '1GB' }\n",
            "memory in [all] of the config file {file} takes one value, and there is {{'most'",
        ),
        (
            "prot = 1\n",
            "'prot' in the config file {file} stands in no table; did you mean 'port'? put it "
            "below a line such as [serve] or [all]",
        ),
        (
            "port = 1\n",
            "'port' in the config file {file} stands in no table; put it below a line such as "
            "[serve] or [all]",
        ),
        ("[agents]\nmodle = 'x'\n", "did you mean 'model'? put it below a line such as [agents."),
        ("[all]\nprot = 1\n", "in [all] of the config file {file}; did you mean 'port'?"),
        ("xyzzy = 1\n", "no key 'xyzzy' of the config file {file}; "),
        ("all = 1\n", "all in {file} has to be a table"),
        ("[serve\n", "the config file {file} cannot be read: Expected"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_by_name(config, text, said):
    config.write_text(text)
    result = run("demo", "--json")
    assert result.exit_code == 2 and result.stdout == ""
    assert said.format(file=config) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_value_of_the_wrong_kind_is_refused_as_if_it_were_typed(config):
    config.write_text('[inspect]\ncontext = "many"\n')
    result = run("inspect", "demo")
    assert result.exit_code == 2 and "'--context': Input should be" in result.stderr


def test_what_may_be_several_may_be_one(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('[all]\nstop = "def"\n[serve]\nmodels = "demo"\nadapter = ["a=b", "c=d"]\n')
    found = defaults_of(typer.main.get_command(app), file)
    assert found["serve"] == {"models": ["demo"], "adapter": ["a=b", "c=d"]}
    assert found["generate"] == {"stop": ["def"]}


def test_a_name_that_nothing_comes_near_is_answered_in_a_line_one_can_read(config):
    config.write_text("[all]\nxyzzy = 1\n")
    said = run("demo", "--json").stderr
    assert len(said) < 300 and "kvcellar COMMAND --help" in said


def test_the_file_lies_where_settings_of_programs_lie(monkeypatch):
    for name in ("KVCELLAR_CONFIG", "KVCELLAR_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_config() == Path.home() / ".config" / "kvcellar" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/there")
    assert default_config() == Path("/there/kvcellar/config.toml")
    monkeypatch.setenv("KVCELLAR_HOME", "/home-of-it")
    assert default_config() == Path("/home-of-it/config.toml")
    monkeypatch.setenv("KVCELLAR_CONFIG", "/this.toml")
    assert default_config() == Path("/this.toml")


def test_without_a_command_one_is_told_where_to_begin(config):
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "kvcellar chat smollm2" in result.stdout and "defaults of" not in result.stdout
    config.write_text("")
    assert f"defaults of options come from {config}" in run().stdout


def test_a_shell_completes_commands():
    asked = {"_KVCELLAR_COMPLETE": "complete_bash", "COMP_WORDS": "kvcellar in", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvcellar"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["inspect"]


def test_the_page_s_example_is_taken(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "config-file.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "config.toml").write_text(example)
    found = defaults_of(typer.main.get_command(app), tmp_path / "config.toml")
    assert found["serve"]["port"] == 8000 and found["serve"]["memory"] == "24GB"
    assert found["agents"]["chat"] == {"temperature": 0.7, "memory": "24GB", "kv_dtype": "int8"}


def test_a_value_where_a_table_of_a_command_belongs_is_refused_as_that(config):
    config.write_text("[agents]\nchat = 3\n")
    result = run("models", "list")
    assert result.exit_code == 2 and "agents.chat in" in result.stderr
    assert "has to be a table, [agents.chat]" in " ".join(result.stderr.split())
