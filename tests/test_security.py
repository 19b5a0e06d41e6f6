"""Promises of docs/security.md (not all of them) by their tests, and what no module may call."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROVED = {
    "a name that an attacker rebinds to 127.0.0.1 is refused": (
        "tests/server/test_trust.py::test_a_name_that_was_rebound_is_refused",
    ),
    "an `Origin` has to be the server's own": (
        "tests/server/test_trust.py::test_a_page_elsewhere_cannot_drive_the_server",
        "tests/server/test_trust.py::test_the_own_page_may_call",
    ),
    "bodies of POST are JSON by their type": (
        "tests/server/test_trust.py::test_another_type_of_body_is_refused",
    ),
    "A request whose length is said in two ways is refused": (
        "tests/server/test_connections.py::"
        "test_nothing_is_read_behind_a_request_whose_end_cannot_be_told",
    ),
    "With one, everything but `/health`, `/ready`": (
        "tests/server/test_trust.py::test_a_key_is_wanted_where_one_is_set",
    ),
    "guests share no prefix": (
        "tests/server/test_salts.py::test_guests_share_nothing_with_each_other_or_the_owner",
    ),
    "keeps requests apart the same way": (
        "tests/server/test_salts.py::test_a_prompt_is_reused_within_its_salt_alone",
    ),
    "The file is its owner's alone (0600": (
        "tests/cli/test_attached.py::test_a_server_is_found_while_it_lives_and_its_file_is_its_owners",
    ),
    "It is taken from this machine alone": (
        "tests/server/test_folder_token.py::test_it_is_good_on_this_machine_alone",
    ),
    "never logged. A command": (
        "tests/server/test_folder_token.py::"
        "test_it_is_in_no_log_and_in_no_words_of_the_configuration",
    ),
    "Folders have mode 0700, files 0600": (
        "tests/store/test_store.py::test_files_and_folders_are_for_their_owner_alone",
    ),
    "links that are planted in it are not followed": (
        "tests/store/test_links.py::"
        "test_a_link_in_a_store_is_refused_and_what_it_points_to_is_as_it_was",
    ),
    "which nobody can foretell": (
        "tests/agents/test_canary.py::test_an_import_is_verified_before_anybody_uses_its_rows",
        "tests/agents/test_canary.py::test_nobody_can_foretell_which_rows_of_an_import_are_looked_at",
    ),
    "`--forever` removes it": (
        "tests/agents/test_undo.py::test_what_is_deleted_for_ever_does_not_come_back",
    ),
    "are neither stored nor logged": (
        "tests/store/shared/test_secrets.py::test_no_password_of_valkey_is_told",
        "tests/store/shared/test_secrets.py::test_no_key_of_s3_is_told",
    ),
    "No prompt, answer or key; `--log-text` lets prompts in": (
        "tests/server/test_trust.py::test_a_log_line_has_an_id_and_never_the_text",
        "tests/server/test_trust.py::test_the_text_is_in_the_log_where_that_was_asked_for",
    ),
}
"""Tests by an exact part of the sentence; other sentences have not been gone through."""

MAY_PICKLE = {
    "models/rendering.py": "to a process that it has started",
    "models/render_worker.py": "from the process that has started it",
    "backends/torch/ranks/following.py": "between the ranks of one server",
    "backends/torch/ranks/processes.py": "between the ranks of one server",
}
"""Modules that pickle, and between whom."""


@functools.cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("part", PROVED)
def test_what_is_proved_is_on_the_page_and_its_tests_exist(part: str) -> None:
    assert part in " ".join((ROOT / "docs" / "security.md").read_text().split())
    for node in PROVED[part]:
        path, _, name = node.partition("::")
        assert name in names_in(path), node


def what_runs_code(source: str) -> set[str]:
    """Return what a module uses that runs what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {"pickle", "marshal", "shelve", "dill"} & {n.split(".")[0] for n in names}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found |= {called} & {"eval", "exec", "torch.load"}
            for word in node.keywords:
                if word.arg == "trust_remote_code" and ast.unparse(word.value) != "False":
                    found.add("trust_remote_code")
    return found


def test_no_module_runs_what_a_file_holds() -> None:
    package = ROOT / "src" / "kvcellar"
    found = {
        path.relative_to(package).as_posix(): what_runs_code(path.read_text())
        for path in package.rglob("*.py")
    }
    assert {name: uses for name, uses in found.items() if uses} == {
        name: {"pickle"} for name in MAY_PICKLE
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval(x)",
        "torch.load(x)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=wanted)",
    ],
)
def test_what_runs_code_is_found(source: str) -> None:
    assert what_runs_code(source)
