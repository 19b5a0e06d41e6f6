"""The command line in process, with a tiny model of random weights and with the bundled one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import kvcellar
from kvcellar.cli import app
from kvcellar.cli.overview import COMMANDS, EXAMPLES, OPTIONS, overview
from kvcellar.cli.program import HABITS
from tests.backends.adapters import needs_mlx

pytest.importorskip("torch")
pytest.importorskip("transformers")

RUNNER = CliRunner()
RUNTIMES = {"torch", "transformers", "mlx", "executorch"}
SERVERS = {"fastapi", "uvicorn", "prometheus_client"}
ALWAYS_THERE = {
    "huggingface_hub",
    "numpy",
    "pydantic",
    "typer",
    "rich",
    "tokenizers",
    "psutil",
    "xxhash",
    "filelock",
}
KEYS = {
    "reasoning",
    "finish_cause",
    "text",
    "token_ids",
    "finish_reason",
    "finish_detail",
    "usage",
    "sampling",
}
USAGE_KEYS = {
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "time_to_first_token_s",
    "tokens_per_second",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with one token per byte, 512 positions and a chat template."""
    from tests.models.tiny_checkpoints import make_checkpoint

    return str(make_checkpoint("llama", tmp_path_factory.mktemp("tiny")))


def run(*args: str, stdin: str | None = None) -> Result:
    result = RUNNER.invoke(app, list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def error_of(*args: str, stdin: str | None = None) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    result = run(*args, stdin=stdin)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


# generate -----------------------------------------------------------------------------------------


def generated(*args: str, stdin: str | None = None) -> dict[str, Any]:
    raw = () if "--chat" in args else ("--raw",)
    result = run("generate", *args, *raw, "--json", stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    value: dict[str, Any] = json.loads(result.stdout)
    assert set(value) == KEYS
    assert set(value["usage"]) == USAGE_KEYS
    return value


def test_json_is_one_object_with_text_tokens_reason_and_usage(tiny: str) -> None:
    value = generated(tiny, "--prompt", "hello", "--max-tokens", "7")
    assert len(value["token_ids"]) == 7
    assert value["finish_reason"] == "length"
    assert value["usage"]["prompt_tokens"] == 5
    assert value["usage"]["completion_tokens"] == 7


def test_every_cache_gives_the_same_text(tiny: str) -> None:
    texts = [
        generated(tiny, "-p", "hello", "--max-tokens", "20", "--cache", kind)["text"]
        for kind in ("contiguous", "cells", "paged", "tree")
    ]
    assert len(set(texts)) == 1


def test_the_text_alone_is_streamed_and_a_pipe_hears_nothing_else(tiny: str) -> None:
    args = (tiny, "-p", "hello", "--max-tokens", "9", "--temperature", "0.8", "--seed", "3")
    result = run("generate", *args, "--raw")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == generated(*args)["text"].replace("\r\n", "\n") + "\n"


def test_a_prompt_of_a_dash_is_read_from_stdin(tiny: str) -> None:
    args = ("--max-tokens", "5", "--temperature", "1", "--top-k", "20", "--seed", "1")
    given = generated(tiny, "--prompt", "two\nlines", *args)
    piped = generated(tiny, "--prompt", "-", *args, stdin="two\nlines\n")
    assert piped["token_ids"] == given["token_ids"]


def test_stop_may_be_given_several_times(tiny: str) -> None:
    free = generated(tiny, "-p", "hello", "--max-tokens", "30")["text"]
    stop = next(c for c in free[3:] if c.isascii() and c.isprintable())
    value = generated(tiny, "-p", "hello", "--stop", "no such text", "--stop", stop)
    assert value["finish_reason"] == "stop"
    assert value["finish_detail"] == f"stop text {stop!r}"
    assert value["text"] == free[: free.index(stop)]


def test_a_chat_prompt_is_put_in_the_template(tiny: str) -> None:
    value = generated(tiny, "-p", "hi", "--chat", "--system", "be brief", "--max-tokens", "1")
    text = "<s><|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert value["usage"]["prompt_tokens"] == 6 + len("be brief") + len("hi"), text


def test_a_full_cache_is_said_on_stderr_too(tiny: str) -> None:
    result = run("generate", tiny, "-p", "hello", "--raw", "--capacity", "10", "--max-tokens", "50")
    assert result.exit_code == 0
    assert result.stderr == (
        "warning: the text is cut short: the cache is full: no cell is free of 10; raise capacity\n"
    )


def test_k_and_v_may_be_stored_in_fewer_bits(tiny: str) -> None:
    value = generated(tiny, "-p", "hello", "--max-tokens", "4", "--kv-dtype", "bfloat16")
    assert len(value["token_ids"]) == 4


@needs_mlx
def test_mlx_says_what_torch_says(tiny: str) -> None:
    for model in (tiny, "demo"):
        args = (model, "--prompt", "import os", "--max-tokens", "8")
        torch, mlx = generated(*args), generated(*args, "--backend", "mlx", "--cache", "cells")
        assert mlx["token_ids"] == torch["token_ids"]
    assert "mlx" in error_of("generate", "--prompt", "x", "--backend", "tensorflow")


@needs_mlx
def test_the_demo_and_a_chat_run_on_mlx(tiny: str) -> None:
    args = ("demo", "--branches", "2", "--max-tokens", "4", "--json")
    mlx, torch = (json.loads(run(*args, "--backend", b).stdout) for b in ("mlx", "torch"))
    assert [b["token_ids"] for b in mlx["branches"]] == [b["token_ids"] for b in torch["branches"]]
    said = run("chat", tiny, "--backend", "mlx", "--max-tokens", "4", "--json", stdin="hi\nyou\n")
    assert len(said.stdout.splitlines()) == 2


@needs_mlx
def test_a_memory_budget_holds_on_mlx_too(tiny: str) -> None:
    args = (tiny, "--prompt", "import os", "--max-tokens", "4", "--backend", "mlx")
    before = mlx_limits()
    try:
        assert generated(*args, "--memory", "8GB")["token_ids"]
    finally:
        mlx_limits(*before)


def mlx_limits(memory: int = 1 << 40, cache: int = 1 << 40) -> tuple[int, int]:
    import mlx.core as mx

    return mx.set_memory_limit(memory), mx.set_cache_limit(cache)


def test_the_bundled_model_is_the_default() -> None:
    value = generated("--prompt", "import os", "--max-tokens", "4")
    assert len(value["token_ids"]) == 4


# Wrong input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("--cache", "ring"),
            "cache 'ring' is unknown; choose one of contiguous, cells, paged, tree",
        ),
        (("--kv-dtype", "int3"), "kv_dtype 'int3' is not known; choose one of"),
        (("--backend", "abacus"), "backend 'abacus' is unknown; there are:"),
        (("--capacity", "0"), "capacity is the number of tokens a cache can hold"),
        (("--capacity", "513"), "capacity 513 is more than the 512 positions that"),
        (("--capacity", "3"), "the prompt has 5 tokens; the cache has 3 cells free of 3; shorten"),
        (("--dtype", "float7"), "float7"),
        (("--temperature", "-1"), "temperature must be 0 or more, got -1.0"),
        (("--top-p", "-1"), "top_p must be above 0 and up to 1"),
        (("--max-tokens", "0"), "invalid value for '--max-tokens': Input should be greater"),
        (
            ("--max-tokens", "many"),
            "a valid integer, unable to parse string as an integer; got 'many'; see",
        ),
        (("--stop", ""), "stop holds texts of at least one character"),
        (("--system", "x", "--raw"), "leave --raw out"),
        (("--wibble",), "no such option: --wibble; see kvcellar generate --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_gives_one_clear_line(tiny: str, args: tuple[str, ...], words: str) -> None:
    raw = () if "--raw" in args else ("--raw",)
    assert words in error_of("generate", tiny, "-p", "hello", *raw, *args)


@pytest.mark.parametrize("command", [("generate", "-p", "hello"), ("chat",)])
def test_a_model_that_is_not_there_gives_one_clear_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert f"there is no folder {tmp_path}/none" in error_of(*command, f"{tmp_path}/none")
    assert "no config.json" in error_of(*command, str(tmp_path))


def test_an_empty_prompt_gives_one_clear_line(tiny: str) -> None:
    assert "the prompt has no tokens" in error_of("generate", tiny, "-p", "", "--raw")


def test_a_missing_prompt_and_an_unknown_command_give_one_clear_line() -> None:
    assert error_of("generate") == "missing option '--prompt' / '-p'; see kvcellar generate --help"
    assert error_of("genrate").startswith("no such command 'genrate'. Did you mean 'generate'")


def test_settings_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    for args in (("--cache", "ring"), ("--kv-dtype", "int3"), ("--capacity", "0")):
        assert "there is no folder" not in error_of("generate", nowhere, "-p", "x", *args)


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcellar.models.load_model", interrupt)
    for command in (("generate", "-p", "x"), ("chat",), ("demo",)):
        result = run(*command)
        assert (result.exit_code, result.output) == (130, "")


def test_a_reader_that_leaves_ends_it_in_silence(
    monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    def closed(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("kvcellar.cli.common.terminal.write", closed)
    result = run("generate", tiny, "-p", "hello")
    assert (result.exit_code, result.output) == (141, "")


# chat ---------------------------------------------------------------------------------------------


def chat_lines(tiny: str, stdin: str, *args: str) -> list[dict[str, Any]]:
    result = run("chat", tiny, "--json", "--max-tokens", "6", "--seed", "1", *args, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["contiguous", "cells", "paged", "tree"])
def test_every_line_of_a_pipe_is_a_message_and_what_was_asked_before_is_not_computed(
    tiny: str, kind: str
) -> None:
    first, second, third = chat_lines(tiny, "one\n\ntwo\nthree\n", "--cache", kind)
    assert first["usage"]["cached_tokens"] == 0
    for before, after in ((first, second), (second, third)):
        held = before["usage"]["prompt_tokens"] + before["usage"]["completion_tokens"]
        # an answer may be read in other tokens than those in which chance has said it
        assert before["usage"]["prompt_tokens"] <= after["usage"]["cached_tokens"] <= held - 1
        assert after["usage"]["prompt_tokens"] > held


def test_undo_reset_and_quit_work_from_a_pipe(tiny: str) -> None:
    answers = chat_lines(tiny, "one\ntwo\n/undo\ntwo\n/reset\none\n/quit\nthree\n")
    assert len(answers) == 4
    assert answers[1]["token_ids"] == answers[2]["token_ids"]
    assert answers[0]["token_ids"] == answers[3]["token_ids"]
    n_first = answers[0]["usage"]["prompt_tokens"]
    assert n_first <= answers[2]["usage"]["cached_tokens"] <= n_first + 6
    assert answers[3]["usage"]["cached_tokens"] == 0


def test_answers_are_text_without_json(tiny: str) -> None:
    args = ("chat", tiny, "--max-tokens", "6", "--temperature", "0")
    result = run(*args, stdin="one\n")
    (answer,) = chat_lines(tiny, "one\n", "--temperature", "0")
    assert result.stdout == answer["text"].replace("\r\n", "\n") + "\n"
    assert result.stderr == ""


def test_an_unknown_command_of_a_chat_is_named_and_the_chat_goes_on(tiny: str) -> None:
    result = run("chat", tiny, "--max-tokens", "2", stdin="/redo\none\n")
    assert result.exit_code == 0
    assert result.stderr == "error: there is no command /redo; /help lists them\n"
    assert result.stdout != ""


def test_a_message_without_room_ends_a_piped_chat_with_one_clear_line(tiny: str) -> None:
    message = "x" * 40
    line = error_of("chat", tiny, "--capacity", "30", stdin=f"{message}\n")
    assert "the prompt has 44 tokens; the cache has 30 cells free of 30" in line


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    from tests.models.tiny_checkpoints import make_checkpoint, make_tokenizer

    folder = make_checkpoint("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    make_tokenizer(chat_template=None).save_pretrained(folder)
    assert "has no chat template" in error_of("chat", str(folder), stdin="hi\n")
    assert "has no chat template" in error_of("generate", str(folder), "--chat", "-p", "hi")


# demo ---------------------------------------------------------------------------------------------


def test_the_demo_shares_the_trunk_and_keeps_the_best() -> None:
    result = run("demo", "--json", "--max-tokens", "6", "--branches", "3", "--seed", "4")
    assert (result.exit_code, result.stderr) == (0, "")
    value = json.loads(result.stdout)
    branches = value["branches"]
    assert len(branches) == 3
    for branch in branches:
        assert branch["shared_cells"] == value["prompt_tokens"]
        assert branch["private_cells"] == len(branch["token_ids"]) - 1
    best = max(branches, key=lambda branch: branch["mean_logprob"])
    assert [branch for branch in branches if branch["is_kept"]] == [best]
    memory = value["memory"]
    assert memory["live_cells"] == value["prompt_tokens"] + sum(
        branch["private_cells"] for branch in branches
    )
    assert memory["kept_cells"] == best["cells"]
    assert memory["live_bytes"] < memory["unshared_bytes"] / 2
    again = json.loads(
        run("demo", "--json", "--max-tokens", "6", "--branches", "3", "--seed", "4").stdout
    )
    assert again["branches"] == branches


def test_the_demo_is_a_readable_table() -> None:
    result = run("demo", "--max-tokens", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("trunk", "branch 4", "cells shared", "cells private", "0 bytes copied", "kept"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


# The whole ----------------------------------------------------------------------------------------


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"kvcellar {kvcellar.__version__}\n"


@pytest.mark.parametrize("command", [(), ("generate",), ("chat",), ("demo",)])
def test_every_command_has_help_with_examples(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert "kvcellar " + " ".join(command) in result.stdout


def modules_of(*typed: str, home: Path) -> set[str]:
    """Return the packages that a command imports beside Python's own."""
    code = (
        "import atexit, sys\n"
        "from kvcellar.cli import main\n"
        "atexit.register(lambda: print(*{m.partition('.')[0] for m in sys.modules},"
        " file=sys.stderr))\n"
        f"sys.argv = ['kvcellar', *{typed!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVCELLAR_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout
    return {*done.stderr.splitlines()[-1].split()} - sys.stdlib_module_names


def test_the_help_imports_nothing_but_the_package(tmp_path: Path) -> None:
    """Seconds would be the machine's."""
    found = modules_of("--help", home=tmp_path)
    assert not (RUNTIMES | SERVERS | ALWAYS_THERE) & found, found


@pytest.mark.parametrize("typed", [("agents", "list", "--json"), ("store", "--help")])
def test_who_only_looks_imports_no_runtime_and_no_server(typed: tuple[str], tmp_path: Path) -> None:
    assert not (RUNTIMES | SERVERS) & modules_of(*typed, home=tmp_path)


def test_a_first_word_imports_no_runtime_and_no_pydantic(tmp_path: Path) -> None:
    typed = ("generate", "--prompt", "def", "--max-tokens", "1", "--backend", "native")
    found = modules_of(*typed, "--weights", "int8", home=tmp_path)
    unwanted = {"pydantic", "gguf", "sentencepiece", "yaml", "filelock"}
    assert not (RUNTIMES | SERVERS | unwanted) & found, found


def test_models_of_which_no_file_has_changed_are_listed_without_a_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    assert run("models", "list").exit_code == 0
    assert not RUNTIMES & modules_of("models", "list", home=tmp_path)


def test_the_overview_has_the_commands_and_options_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root: Any = typer.main.get_command(app)
    assert {name: one.help.partition("\n")[0] for name, one in root.commands.items()} == COMMANDS
    context = root.context_class(root)
    own = {one.opts[0]: one.help for one in root.get_params(context)}
    assert {name: own[name].rstrip(".") for name in own} == {
        name: says.rstrip(".") for name, says in OPTIONS.items()
    }
    monkeypatch.setenv("COLUMNS", "50")
    said = run("--help").stdout
    assert said == f"{overview()}\n"
    assert all(name in said for name in (*COMMANDS, *OPTIONS, *EXAMPLES))
    assert max(map(len, said.splitlines())) <= 60


def test_the_documentation_is_what_the_commands_say() -> None:
    tool = Path(__file__).parents[2] / "tools" / "write_cli_docs.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (["run", "smollm2"], "kvcellar chat smollm2"),
        (["run", "smollm2", "why", "not?"], "kvcellar generate smollm2 --prompt 'why not?'"),
        (["run", "smollm2", "--seed", "1"], "kvcellar chat smollm2 --seed 1"),
        (["list"], "kvcellar models list"),
        (["ls", "--json"], "kvcellar models list --json"),
        (["pull", "Qwen/Qwen3-0.6B"], "kvcellar models pull Qwen/Qwen3-0.6B"),
        (["rm", "my model"], "kvcellar models rm 'my model'"),
        (["show", "demo"], "kvcellar inspect demo"),
        (
            ["run", "smollm2", "why?", "--seed", "1"],
            "kvcellar generate smollm2 --prompt 'why?' --seed 1",
        ),
        (["help"], "kvcellar --help"),
        (["help", "agents", "fork"], "kvcellar agents fork --help"),
        (["version"], "kvcellar --version"),
        (["ps"], "kvcellar agents list; what a server holds in memory: curl http://"),
    ],
)
def test_a_command_of_another_program_is_answered_with_ours_word_for_word(typed, ours):
    assert f"there is no command {typed[0]!r}; here it is: {ours}" in error_of(*typed)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (["fork", "poet", "twin"], "kvcellar agents fork poet twin"),
        (["delete", "poet"], "kvcellar agents delete poet"),
        (["check", "demo"], "kvcellar models check demo"),
        (["stats"], "kvcellar store stats"),
    ],
)
def test_a_command_without_its_group_is_answered_with_the_whole_line(typed, ours):
    assert error_of(*typed) == f"there is no command {typed[0]!r}; here it is: {ours}"


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (["demo", "why not?"], "demo --prompt 'why not?'"),
        (["demo", "why", "not?", "--seed", "1"], "demo --prompt 'why not?' --seed 1"),
    ],
)
def test_a_prompt_without_its_option_is_answered_with_the_line_that_has_it(typed, ours):
    assert error_of("generate", *typed).endswith(f"here it is: kvcellar generate {ours}")


def test_every_habit_leads_to_a_command_that_there_is():
    for ours in HABITS.values():
        assert CliRunner().invoke(app, [*ours.split(), "--help"]).exit_code == 0
