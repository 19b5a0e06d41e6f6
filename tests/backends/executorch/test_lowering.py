"""Lowering leaves out work whose result is known, and nothing else."""

from __future__ import annotations

import contextlib

from kvcellar.backends.executorch import export_program
from tests.backends.executorch.programs import MAX_TOKENS, quietly

with quietly():
    from kvcellar.backends.executorch import lowering


def test_a_program_is_byte_for_byte_what_executorch_makes_of_it_unaided(
    checkpoint, tmp_path, monkeypatch
):
    found = {}
    for name, context in (("ours", lowering.work_done_once), ("theirs", contextlib.nullcontext)):
        monkeypatch.setattr(lowering, "work_done_once", context)
        with quietly():
            export_program(
                checkpoint("mistral"),
                tmp_path / f"{name}.pte",
                quantize="8da4w",
                max_tokens_per_step=MAX_TOKENS,
            )
        found[name] = (tmp_path / f"{name}.pte").read_bytes()
    assert found["ours"] == found["theirs"]


def test_lowering_runs_an_operator_on_the_same_operands_once_and_leaves_all_as_it_was(
    checkpoint, tmp_path, monkeypatch
):
    calls = []
    key = lowering._key

    def counting(*operands):
        found = key(*operands)
        calls.append(found)
        return found

    monkeypatch.setattr(lowering, "_key", counting)
    replaced = (
        (lowering.pass_base._ExportPassBase, "_fx"),
        (lowering.ExportedProgram, "run_decompositions"),
        (lowering.quant_primitives, "_quantize_affine_no_dtype_cast"),
        (lowering.quant_primitives, "_dequantize_affine_no_dtype_check"),
        (lowering.traceback, "copy"),
        (lowering.torch.fx.GraphModule, "print_readable"),
    )
    before = [getattr(owner, name) for owner, name in replaced]
    with quietly():
        export_program(checkpoint("llama"), tmp_path / "a.pte", max_tokens_per_step=MAX_TOKENS)
    assert [getattr(owner, name) for owner, name in replaced] == before
    assert len(calls) > 3 * len(set(calls))  # most replays find what an earlier one found
