"""Promises of docs/security.md by their tests, and what no module may call."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROVED: dict[str, tuple[str, ...]] = {
    "| a web page in a browser on this machine |": (
        "tests/server/test_trust.py::test_a_page_elsewhere_cannot_drive_the_server",
    ),
    "| whoever made a model file |": (
        "tests/models/gguf/test_reader.py::test_a_damaged_file_is_refused_or_loaded_and_nothing_else",
    ),
    "| the model itself, and texts that it reads |": (
        "tests/server/test_page.py::test_markdown_is_shown_and_nothing_of_a_stranger_runs",
        "tests/models/test_prompts.py::test_text_of_messages_never_becomes_a_control_token",
    ),
    "| a guest with a key of their own |": (
        "tests/server/test_salts.py::test_guests_share_nothing_with_each_other_or_the_owner",
    ),
    "| anybody on the network |": (
        "tests/cli/test_serve_refusals.py::test_a_key_is_read_from_where_nobody_else_looks",
    ),
    "| another user of this machine |": (
        "tests/store/test_store.py::test_files_and_folders_are_for_their_owner_alone",
    ),
    "| somebody who can write to the store's folder |": (
        "tests/store/test_faults.py::test_a_thousand_faults_give_no_wrong_byte_and_are_all_reported",
    ),
    "The server listens on 127.0.0.1.": (
        "tests/cli/test_serve_refusals.py::test_a_key_is_read_from_where_nobody_else_looks",
    ),
    "a name that an attacker rebinds to 127.0.0.1 is refused": (
        "tests/server/test_trust.py::test_a_name_that_was_rebound_is_refused",
    ),
    "an `Origin` has to be the server's own": (
        "tests/server/test_trust.py::test_a_page_elsewhere_cannot_drive_the_server",
        "tests/server/test_trust.py::test_the_own_page_may_call",
    ),
    "where browsers send none, `Sec-Fetch-Site` says it": (
        "tests/server/test_trust.py::test_a_page_elsewhere_cannot_drive_the_server",
        "tests/server/test_trust.py::test_a_navigation_of_another_site_may_only_look",
    ),
    "bodies of POST are JSON by their type": (
        "tests/server/test_trust.py::test_another_type_of_body_is_refused",
        "tests/server/test_ollama.py::test_a_body_is_json_whatever_its_type_is_called_as_curls_is",
    ),
    "A request whose length is said in two ways is refused": (
        "tests/server/test_connections.py::test_nothing_is_read_behind_a_request_whose_end_cannot_be_told",
    ),
    "No cookie is ever set or read.": (
        "tests/server/test_trust.py::test_no_cookie_is_set_and_none_lets_anybody_in",
        "tests/test_security.py::test_the_server_and_its_page_know_no_cookies",
    ),
    "With one, everything but `/health`, `/ready`": (
        "tests/server/test_trust.py::test_a_key_is_wanted_where_one_is_set",
    ),
    "keys are compared in constant time": (
        "tests/server/test_trust.py::test_nothing_but_a_comparison_in_constant_time_decides_about_a_key",
    ),
    "The first line of the file is the owner's.": (
        "tests/cli/test_serve_refusals.py::test_a_key_is_read_from_where_nobody_else_looks",
    ),
    "guests share no prefix": (
        "tests/server/test_salts.py::test_guests_share_nothing_with_each_other_or_the_owner",
        "tests/server/test_trust.py::test_what_shows_all_that_is_done_is_the_owners",
    ),
    "a warning says so.": (
        "tests/cli/test_serve_refusals.py::test_a_key_is_read_from_where_nobody_else_looks",
    ),
    "keeps requests apart the same way": (
        "tests/server/test_salts.py::test_a_prompt_is_reused_within_its_salt_alone",
        "tests/server/test_salts.py::test_a_salt_may_come_as_a_header_and_not_as_two",
    ),
    "Limits are on size and number": (
        "tests/server/test_trust.py::test_too_many_requests_are_told_to_come_back",
        "tests/server/test_trust.py::test_a_body_that_is_too_large_is_refused_however_it_comes",
        "tests/server/test_connections.py::test_where_all_are_being_answered_one_more_is_told_so",
        "tests/server/test_connections.py::test_half_a_head_is_waited_for_so_long_and_no_longer",
        "tests/server/test_connections.py::test_a_slow_body_is_refused_in_the_end",
        "tests/test_valid.py::test_a_value_that_is_nested_without_end_is_refused_by_its_place",
        "tests/models/test_prompts.py::test_a_template_that_takes_too_much_is_stopped_and_the_next_one_is_rendered",
    ),
    "Nothing of a request is answered with an unlimited amount of work": (
        "tests/server/test_trust.py::test_a_prompt_that_cannot_fit_is_refused_with_numbers",
        "tests/server/test_fields.py::test_stop_texts_are_bounded_in_number_and_length",
        "tests/server/test_grammar.py::test_schemas_without_end_are_answered_all_the_same",
    ),
    "has its address and a token": (
        "tests/cli/test_attached.py::test_a_server_is_found_while_it_lives_and_its_file_is_its_owners",
    ),
    "The file is its owner's alone (0600": (
        "tests/cli/test_attached.py::test_a_server_is_found_while_it_lives_and_its_file_is_its_owners",
        "tests/store/test_store.py::test_files_and_folders_are_for_their_owner_alone",
    ),
    "Whoever brings the token is the owner": (
        "tests/server/test_folder_token.py::test_it_is_taken_beside_the_api_key_and_nothing_like_it_is",
    ),
    "It is taken from this machine alone": (
        "tests/server/test_folder_token.py::test_it_is_good_on_this_machine_alone",
    ),
    "it is compared in constant time and never logged": (
        "tests/server/test_trust.py::test_nothing_but_a_comparison_in_constant_time_decides_about_a_key",
        "tests/server/test_folder_token.py::test_it_is_in_no_log_and_in_no_words_of_the_configuration",
    ),
    "A command sends it only to a server that lives": (
        "tests/cli/test_attached.py::test_a_server_of_another_machine_or_a_process_that_is_gone_is_not_asked",
    ),
    "What a killed server left behind is sent to nobody.": (
        "tests/cli/test_attached.py::test_what_a_killed_server_left_behind_is_known_by_its_lock",
    ),
    "`--host 0.0.0.0` lets other machines in.": (
        "tests/server/test_trust.py::test_a_server_that_listens_for_all_takes_addresses_but_no_names",
    ),
    "**Weights**: safetensors and GGUF.": (
        "tests/models/test_loading.py::test_a_checkpoint_without_weights",
        "tests/models/test_loading.py::test_a_file_in_place_of_a_folder",
    ),
    "Pickles are refused.": (
        "tests/models/test_loading.py::test_a_checkpoint_without_weights",
        "tests/models/test_eagle3_head.py::test_a_pickle_is_refused_by_its_name",
        "tests/test_security.py::test_no_module_runs_what_a_file_holds",
    ),
    "Code of a checkpoint's own is never run": (
        "tests/models/test_loading.py::test_code_of_a_checkpoints_own_is_never_run",
        "tests/test_security.py::test_no_module_runs_what_a_file_holds",
    ),
    "takes no length on trust": (
        "tests/models/gguf/test_reader.py::test_a_file_that_cannot_be_right_is_refused_by_name",
    ),
    "A file that lies costs what its own size costs.": (
        "tests/models/gguf/test_reader.py::test_a_damaged_file_is_refused_or_loaded_and_nothing_else",
    ),
    "a mistake is an exception": (
        "tests/models/gguf/test_reader.py::test_a_damaged_file_is_refused_or_loaded_and_nothing_else",
    ),
    "reach the native kernel after their sizes were checked": (
        "tests/kernel/test_attend.py::test_a_plan_past_the_pools_end_is_refused_and_says_what_was_there",
        "tests/kernel/test_blocks.py::test_affine_weights_of_other_forms_are_refused",
    ),
    "undefined-behaviour sanitisers": (
        "tests/kernel/test_levels.py::test_random_steps_of_all_levels_of_x86_are_clean_under_the_sanitisers",
    ),
    "They run in a process of their own, in Jinja's sandbox": (
        "tests/models/test_prompts.py::test_a_template_that_takes_too_much_is_stopped_and_the_next_one_is_rendered",
        "tests/models/test_render_worker.py::test_what_templates_may_do_is_what_they_may_in_transformers",
    ),
    "one that takes more is stopped": (
        "tests/models/test_prompts.py::test_a_template_that_takes_too_much_is_stopped_and_the_next_one_is_rendered",
        "tests/server/test_templates.py::test_a_template_that_never_ends_refuses_its_chats_and_the_rest_goes_on",
    ),
    "the clock alone stops it": (
        "tests/models/test_prompts.py::test_a_template_that_is_not_stopped_by_its_computing_time_is_by_the_clock",
    ),
    "**ExecuTorch programs** of ours end with a checksum": (
        "tests/backends/executorch/test_bad_input.py::test_every_changed_byte_of_a_sealed_file_is_found",
    ),
    "verified by the runtime as far as it verifies them": (
        "tests/backends/executorch/test_bad_input.py::test_a_damaged_program_of_others_never_ends_the_process",
    ),
    "holds files to SHA-256": (
        "tests/models/test_hub.py::test_a_file_that_came_damaged_is_deleted",
        "tests/models/test_packaged.py::test_a_wheel_that_does_not_hold_the_file_is_refused_and_nothing_is_kept",
    ),
    "A server downloads no model that a request asks for": (
        "tests/server/test_trust.py::test_a_model_that_a_request_names_is_not_downloaded",
        "tests/server/test_ollama.py::test_the_models_of_a_server_are_not_changed_by_clients",
    ),
    "is ten characters;": (
        "tests/models/test_prompts.py::test_text_of_messages_never_becomes_a_control_token",
        "tests/models/test_prompts.py::test_names_results_definitions_and_arguments_are_text_too",
    ),
    "it cannot end the message or speak as somebody else": (
        "tests/models/test_prompts.py::test_texts_that_a_template_joins_never_make_a_control_token_together",
    ),
    "`--control-tokens-in-text` gives that up.": (
        "tests/models/test_prompts.py::test_text_of_messages_never_becomes_a_control_token",
    ),
    "only the token is the mark": (
        "tests/dialects/test_served.py::test_what_a_message_spells_like_a_mark_is_no_mark",
    ),
    "text that is spelt alike stays text": (
        "tests/dialects/test_served.py::test_what_a_message_spells_like_a_mark_is_no_mark",
    ),
    "are held to the declared tools and their schemas by a grammar": (
        "tests/dialects/test_lark.py::test_a_call_of_no_tool_or_with_other_arguments_cannot_come",
        "tests/dialects/test_lark.py::test_whatever_a_model_wants_forced_calls_are_calls_of_the_tools",
    ),
    "was not signed by this store": (
        "tests/server/test_reasoning.py::test_a_thought_that_was_not_signed_here_as_it_is_is_left_out_with_a_note",
        "tests/server/test_reasoning.py::test_signatures_are_known_again_after_a_restart_and_by_no_other_store",
    ),
    "escapes markup of messages": (
        "tests/server/test_page.py::test_markdown_is_shown_and_nothing_of_a_stranger_runs",
        "tests/server/test_page.py::test_the_policy_forbids_what_the_page_does_not_need",
    ),
    "Names, calls and reasoning never are markup.": (
        "tests/server/test_page.py::test_names_reasoning_and_calls_of_strangers_are_text",
    ),
    "A test injects through Markdown": (
        "tests/server/test_page.py::test_markdown_is_shown_and_nothing_of_a_stranger_runs",
        "tests/server/test_page.py::test_names_reasoning_and_calls_of_strangers_are_text",
    ),
    "are compiled by llguidance, with limits": (
        "tests/server/test_grammar.py::test_schemas_without_end_are_answered_all_the_same",
    ),
    "what fails ends that one request": (
        "tests/engine/test_failures.py::test_a_grammar_that_raises_ends_its_own_request_alone",
        "tests/engine/test_failures.py::test_a_tokenizer_that_raises_ends_the_request_whose_token_it_was",
    ),
    "Folders have mode 0700, files 0600": (
        "tests/store/test_store.py::test_files_and_folders_are_for_their_owner_alone",
    ),
    "links that are planted in it are not followed": (
        "tests/store/test_links.py::test_a_link_in_a_store_is_refused_and_what_it_points_to_is_as_it_was",
    ),
    "Checksums find accidents and torn writes.": (
        "tests/store/test_faults.py::test_a_thousand_faults_give_no_wrong_byte_and_are_all_reported",
    ),
    "`--verify canary` finds rows": (
        "tests/agents/test_canary.py::test_rows_that_were_saved_wrong_are_used_without_a_canary_and_found_with_one",
    ),
    "is held to types, ranges, checksums and finite numbers": (
        "tests/store/test_damage.py::test_an_export_that_says_what_cannot_be_is_refused_and_nothing_is_published",
        "tests/store/test_store.py::test_a_damaged_export_is_refused_and_nothing_is_published",
        "tests/agents/test_canary.py::test_an_import_that_holds_no_finite_numbers_is_refused_whole",
    ),
    "which nobody can foretell": (
        "tests/agents/test_canary.py::test_an_import_is_verified_before_anybody_uses_its_rows",
        "tests/agents/test_canary.py::test_nobody_can_foretell_which_rows_of_an_import_are_looked_at",
        "tests/store/shared/test_strangers.py::test_what_was_imported_is_no_other_machine_s_before_a_model_agrees",
    ),
    "else all of them are put away and computed again": (
        "tests/agents/test_canary.py::test_an_import_is_verified_before_anybody_uses_its_rows",
    ),
    "Deleting an agent keeps it for undo": (
        "tests/agents/test_undo.py::test_a_deleted_agent_comes_back_as_it_was",
    ),
    "`--forever` removes it": (
        "tests/agents/test_undo.py::test_what_is_deleted_for_ever_does_not_come_back",
    ),
    "Blocks that others share stay.": (
        "tests/store/test_store.py::test_deleting_one_of_two_that_share_blocks_leaves_the_others",
    ),
    "Files are removed, and": (
        "tests/store/test_store.py::test_deleting_one_of_two_that_share_blocks_leaves_the_others",
    ),
    "are neither stored nor logged": (
        "tests/store/shared/test_secrets.py::test_no_password_of_valkey_is_told",
        "tests/store/shared/test_secrets.py::test_no_key_of_s3_is_told",
        "tests/store/shared/test_places.py::test_who_has_no_credentials_is_told_where_they_are_looked_for",
    ),
    "Blocks are verified when they are fetched": (
        "tests/store/shared/test_tier.py::test_what_is_damaged_in_the_tier_costs_its_suffix_and_is_put_again",
        "tests/store/shared/test_strangers.py::test_a_block_that_holds_no_finite_numbers_is_computed_again",
    ),
    "What else is put there stops nobody": (
        "tests/store/shared/test_strangers.py::test_a_number_that_no_machine_reaches_is_nobodys_state",
        "tests/store/shared/test_strangers.py::test_what_is_longer_than_anything_of_ours_is_not_read",
        "tests/store/shared/test_strangers.py::test_nothing_is_written_or_read_behind_a_link",
        "tests/store/shared/test_strangers.py::test_a_pipe_in_a_block_s_place_is_computed_again_and_keeps_no_process",
    ),
    "unless Ray asks for a token": (
        "tests/deploy/test_ray.py::test_agents_stay_with_their_replica_and_outlive_it",
    ),
    "hashes of 32 tokens each": (
        "tests/deploy/test_replica.py::test_a_report_has_a_hash_for_so_many_tokens_and_no_token",
    ),
    "over the loopback device": (
        "tests/backends/test_ranks.py::test_ranks_of_a_cpu_listen_on_the_loopback_device_alone",
    ),
    "Pictures are decoded by Pillow": (
        "tests/server/test_pictures.py::test_a_hostile_picture_is_a_clear_400_and_nothing_else",
        "tests/server/test_pictures.py::test_too_large_and_too_many_are_refused",
    ),
    "SVG and other types are refused by name": (
        "tests/server/test_pictures.py::test_a_hostile_picture_is_a_clear_400_and_nothing_else",
    ),
    "A file is sent back with its own type": (
        "tests/server/test_pictures.py::test_a_picture_of_responses_is_shown_again_as_a_link",
    ),
    "A server fetches pictures from hosts alone": (
        "tests/server/test_fetching.py::test_nobody_is_asked_who_was_not_named",
    ),
    "It connects to the address that it has looked at": (
        "tests/server/test_fetching.py::test_a_name_is_resolved_once_and_that_address_is_connected_to",
        "tests/server/test_fetching.py::test_an_address_that_is_not_the_internets_is_never_connected_to",
        "tests/server/test_fetching.py::test_an_address_of_this_machine_is_never_connected_to",
        "tests/server/test_fetching.py::test_this_machine_is_refused_though_its_name_is_allowed",
    ),
    "Redirects are checked as the first address was": (
        "tests/server/test_fetching.py::test_a_redirect_is_checked_as_the_first_address_was",
        "tests/server/test_fetching.py::test_what_is_too_large_is_left_where_it_passes_the_bound",
        "tests/server/test_fetching.py::test_what_does_not_come_in_time_is_left",
    ),
    "Links to pictures are signed": (
        "tests/server/test_pictures.py::test_a_name_shows_a_picture_to_nobody_else",
    ),
    "A line of JSON per request": (
        "tests/server/test_trust.py::test_a_log_line_has_an_id_and_never_the_text",
    ),
    "No prompt, answer or key;": (
        "tests/server/test_trust.py::test_a_log_line_has_an_id_and_never_the_text",
    ),
    "`--log-text` lets prompts in": (
        "tests/server/test_trust.py::test_the_text_is_in_the_log_where_that_was_asked_for",
    ),
}
"""Tests by an exact part of the statement that they prove."""

NO_PROMISE = {
    "Pillow is native code": "asked of readers",
    "This page says what kvcellar defends": "what the page is",
    "Tell the maintainers of a hole": "asked of readers",
    "has the details": "a link",
    "Before any route is reached:": "begins what follows",
    "Without `--api-key-file` or `KVCELLAR_API_KEY`": "admits",
    "can be read by every user of the machine with `ps`": "admits",
    "What salts do not hide": "admits",
    "There are no accounts, quotas or rates.": "admits",
    "The server speaks plain HTTP": "admits",
    "It has not been audited": "admits",
    "**Chat templates** are programs.": "begins what follows",
    "the sandbox is Jinja's": "admits",
    "A program is native code's input": "asked of readers",
    "A model whose weights were made to misbehave": "admits",
    "no check of ours sees that": "admits",
    "What a tool does with its arguments is the client's": "left to clients",
    "Contents are not encrypted": "admits",
    "Whoever can write to the folder can forge a block": "admits",
    "That finds inventions, not each one": "admits",
    "Import agents of people whom you trust.": "asked of readers",
    "Whoever can read the place reads": "admits",
    "whoever can write to it can forge blocks": "admits",
    "Use a bucket and a key of their own": "asked of readers",
    "Ray's ports listen at all addresses": "admits",
    "Keep the ports in a network of your own": "asked of readers",
}
"""Other statements of the page, by an exact part, and what each does in place of promising."""

OF_NO_PROMISES = ("What is worth defending", "What is not defended")
"""Headings below which nothing is promised."""

MAY_PICKLE = {
    "models/text/rendering.py": "to a process that it has started",
    "models/text/render_worker.py": "from the process that has started it",
    "backends/torch/ranks/following.py": "between the ranks of one server",
    "backends/torch/ranks/processes.py": "between the ranks of one server",
}
"""Modules that pickle, and between whom."""


@functools.cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def statements(page: str) -> list[str]:
    """Return what a page says: rows of tables, and what bullets, full stops and semicolons part."""
    sections = re.split(r"^#+ (.+)\n", page, flags=re.MULTILINE)
    told = zip(sections[1::2], sections[2::2], strict=True)
    text = "\n\n".join(text for heading, text in told if heading not in OF_NO_PROMISES)
    text = re.sub(r"^\| (who |---).*\n", "", text, flags=re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- |\|)", text):
        said = " ".join(block.removeprefix("- ").split())
        found += [said] if said.startswith("|") else re.split(r"(?<=[.;]) (?!\*\* )", said)
    return [said for said in found if said]


def untied(page: str) -> list[str]:
    """Return the statements of a page that are neither proved nor known to promise nothing."""
    parts = (*PROVED, *NO_PROMISE)
    return [said for said in statements(page) if not any(part in said for part in parts)]


PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_statement_of_the_page_has_a_test_or_promises_nothing() -> None:
    assert not untied(PAGE)


@pytest.mark.parametrize(
    "more",
    [
        "\nNothing can go wrong.\n",
        "\n- nothing can go wrong;\n- or nearly so\n",
        "\n| nobody | do anything | defended |\n",
    ],
)
def test_a_new_statement_wants_a_test(more: str) -> None:
    page = PAGE.replace("\n## Keys\n", f"{more}\n## Keys\n")
    assert len(untied(page)) == more.count("\n") - 1


@pytest.mark.parametrize("part", [*PROVED, *NO_PROMISE])
def test_what_is_proved_is_said_once_and_its_tests_exist(part: str) -> None:
    assert len([said for said in statements(PAGE) if part in said]) == 1
    for node in PROVED.get(part, ()):
        path, _, name = node.partition("::")
        assert name in names_in(path), node


def test_the_server_and_its_page_know_no_cookies() -> None:
    server = ROOT / "src" / "kvcellar" / "server"
    own = [path for path in server.rglob("*") if path.suffix in (".py", ".js", ".html")]
    own = [path for path in own if "vendor" not in path.parts]
    assert len(own) > 50
    assert not [path for path in own if "cookie" in path.read_text().lower()]


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
