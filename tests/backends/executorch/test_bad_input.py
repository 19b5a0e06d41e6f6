"""Whatever is wrong with a program, its session or the installation: one clear error, no abort."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcellar as kv
from kvcellar.backends.executorch import Program, building, native
from kvcellar.backends.executorch.archive import seal
from kvcellar.errors import (
    BackendError,
    CacheFullError,
    ConfigError,
    MetadataError,
    ModelError,
    PositionError,
    PromptError,
    SessionClosedError,
    ShapeError,
    StepError,
    UnknownCacheError,
)
from kvcellar.models import load_model
from kvcellar.types import LayerGroup, ModelCacheParams
from tests.backends.executorch.programs import MAX_TOKENS, quietly
from tests.models.players import Player, assert_close, text


class Tiny(torch.nn.Module):
    """One layer that attends: what others may have exported, without metadata."""

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = x[:, :, :, :8], x[:, :2, :, 8:16], x[:, :2, :, 16:]
        return torch.ops.kvcache.update_and_attend(q, k, v, position, 0, 0.5, torch.float32)


def write_tiny(path: Path, constants: dict[str, Any] | None = None, column: bool = True) -> Path:
    with quietly():
        return _write_tiny(path, constants, column)


def _write_tiny(path: Path, constants: dict[str, Any] | None, column: bool) -> Path:
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    n = torch.export.Dim("n", min=1, max=16)
    position = torch.arange(3)[:, None] if column else torch.arange(3)
    graph = torch.export.export(
        Tiny(),
        (torch.randn(1, 4, 3, 24), position),
        dynamic_shapes=({2: n}, {0: n}),
        strict=False,
    )
    edge = to_edge_transform_and_lower(
        graph,
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        constant_methods=constants,
    )
    with path.open("wb") as file:
        edge.to_executorch().write_to_file(file)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.pte")


# Metadata ---------------------------------------------------------------------------------------


def test_a_program_without_metadata_is_no_model(tiny):
    with pytest.raises(MetadataError, match=r"tiny\.pte.*no kv_cache\.schema_version"):
        load_model(tiny, backend="executorch")


@pytest.mark.parametrize(
    ("constants", "what"),
    [
        ({"kv_cache.schema_version": 99}, "schema_version is 99"),
        (
            {"kv_cache.schema_version": 1, "kv_cache.n_layers": 1, "kv_cache.n_kv_heads": 2},
            "head_dim is missing",
        ),
        (
            {
                "kv_cache.schema_version": 1,
                "kv_cache.n_layers": 1,
                "kv_cache.n_kv_heads": 2,
                "kv_cache.head_dim": 8,
            },
            "no model that 'kvcellar export' wrote",
        ),
    ],
    ids=["another schema", "a fact missing", "no tokenizer"],
)
def test_other_metadata_is_refused_by_what_is_wrong_with_it(tmp_path, constants, what):
    path = write_tiny(tmp_path / "other.pte", constants)
    with pytest.raises(MetadataError, match=what):
        load_model(path, backend="executorch")


# Programs of others -----------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["ExecuTorch's own op", "[T, 1]", "[T]"])
def test_a_program_of_others_runs_with_positions_as_a_column_or_flat(tmp_path, who):
    path, column = tmp_path / "theirs.pte", who != "[T]"
    if who == "ExecuTorch's own op":
        script = Path(__file__).parent / "theirs.py"
        done = subprocess.run(
            [sys.executable, str(script), str(path)], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    else:
        write_tiny(path, column=column)
    program = Program(path)
    assert not program.is_sealed
    params = ModelCacheParams(1, 2, 8)
    x = torch.randn(1, 4, 9, 24)
    want = torch.nn.functional.scaled_dot_product_attention(
        x[..., :8],
        x[:, :2, :, 8:16],
        x[:, :2, :, 16:],
        is_causal=True,
        scale=0.5,
        enable_gqa=True,
    )
    for make in (kv.make_decode_session, kv.make_seq_session):
        with make("executorch", kv.make_config(params, 64)) as session:
            method = program.load_method(cache_key=session.cache_key)
            got = []
            for start, stop in ((0, 5), (5, 6), (6, 9)):
                if make is kv.make_seq_session:
                    session.cache.begin_step([(3, stop - start)])
                at = torch.arange(start, stop)
                (rows,) = method(x[:, :, start:stop], at[:, None] if column else at)
                got.append(rows)
            torch.testing.assert_close(torch.cat(got, dim=2), want, atol=1e-5, rtol=0)


def test_a_program_of_others_on_a_cache_of_more_layers_is_taken_back(tiny):
    config = kv.make_config(ModelCacheParams(2, 2, 8), 64)
    with kv.make_decode_session("executorch", config) as session:
        method = Program(tiny).load_method(cache_key=session.cache_key)
        with pytest.raises(StepError, match="not all of the cache's 2 layers"):
            method(torch.randn(1, 4, 3, 24), torch.arange(3)[:, None])
        assert session.cache.length == 0


def test_a_program_of_others_on_a_cache_of_other_heads_is_refused(tiny):
    config = kv.make_config(ModelCacheParams(1, 4, 8), 64)
    with kv.make_decode_session("executorch", config) as session:
        method = Program(tiny).load_method(cache_key=session.cache_key)
        with pytest.raises(ShapeError, match="2 KV heads of 8"):
            method(torch.randn(1, 4, 3, 24), torch.arange(3)[:, None])
        assert session.cache.length == 0


def test_a_program_of_others_on_a_full_cache_is_refused(tiny):
    config = kv.make_config(ModelCacheParams(1, 2, 8), 8)
    with kv.make_decode_session("executorch", config) as session:
        method = Program(tiny).load_method(cache_key=session.cache_key)
        with pytest.raises(CacheFullError):
            method(torch.randn(1, 4, 9, 24), torch.arange(9)[:, None])
        assert session.cache.length == 0


def test_without_its_native_part_no_program_is_opened(tiny, monkeypatch):
    def missing() -> None:
        raise BackendError("no compiler")

    monkeypatch.setattr(native, "library", missing)
    with pytest.raises(BackendError, match="no compiler"):
        Program(tiny)


# Sessions ---------------------------------------------------------------------------------------


def test_a_session_of_another_layer_count_is_refused(exported, loaded):
    model = loaded("llama")
    group = model.params.groups[0]
    params = ModelCacheParams(
        3, groups=(LayerGroup((0, 1, 2), group.n_kv_heads, group.head_dim, group.head_dim),)
    )
    config = kv.make_config(params, 64)
    with kv.make_seq_session("executorch", config) as session:
        with pytest.raises(ConfigError, match="3 layers"):
            model.bind(session)
        with pytest.raises(ConfigError, match=r"made for 3 layers .*llama.* has 2 layers"):
            Program(exported("llama")).load_method(cache_key=session.cache_key)


def test_a_session_of_the_wrong_kind_is_refused(exported, loaded):
    model = loaded("llama")
    config = kv.make_config(model.params, 64)
    with kv.make_seq_session("reference", config) as session:
        with pytest.raises(BackendError, match="reference"):
            model.bind(session)
        with pytest.raises(BackendError, match="cannot attend the tensors"):
            Program(exported("llama")).load_method(cache_key=session.cache_key)


def test_a_program_loaded_after_its_session_ended_is_refused(exported, loaded):
    model = loaded("llama")
    with kv.make_seq_session("executorch", kv.make_config(model.params, 64)) as session:
        runner = model.bind(session)
    with pytest.raises(UnknownCacheError, match=session.cache_key):
        Program(exported("llama")).load_method(cache_key=session.cache_key)
    with pytest.raises(SessionClosedError):
        runner.forward([1], [0])


def test_a_method_without_a_cache_says_what_to_do(exported):
    method = Program(exported("llama")).load_method()
    with pytest.raises(StepError, match="cache_key"):
        method(torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([0]))


# Forwards ---------------------------------------------------------------------------------------


def test_more_tokens_than_planned_are_refused_and_nothing_is_claimed(loaded, oracle):
    prompt = text(MAX_TOKENS + 1)
    for kind in ("contiguous", "seq", "tree"):
        with Player(loaded("llama"), kind) as player:
            with pytest.raises(StepError, match=rf"at most {MAX_TOKENS} tokens.*{MAX_TOKENS + 1}"):
                player.feed(prompt)
            got = player.feed(prompt[:MAX_TOKENS], rows="all")
            assert_close(got, oracle("llama").logits(prompt)[:MAX_TOKENS])


def test_the_runtime_itself_refuses_more_tokens_without_ending_the_process(exported, loaded):
    program = Program(exported("llama"))
    with kv.make_decode_session("executorch", kv.make_config(program.params, 256)) as session:
        method = program.load_method(cache_key=session.cache_key)
        n = MAX_TOKENS + 1
        with pytest.raises(StepError, match="did not run"):
            method(torch.ones(1, n, dtype=torch.int64), torch.arange(n)[None], torch.tensor([0]))
        for wrong in (
            (torch.ones(1, 2), torch.arange(2)[None], torch.tensor([0])),  # of another type
            (torch.ones(1, 2, dtype=torch.int64), torch.arange(2)[None]),  # one too few
            (torch.ones(2, dtype=torch.int64), torch.arange(2), torch.tensor([0])),  # flat
        ):
            with pytest.raises(StepError):
                method(*wrong)
        assert session.cache.length == 0


def test_wrong_tokens_positions_and_rows_are_refused_as_under_torch(loaded):
    with Player(loaded("llama"), "contiguous") as player:
        forward = player.runner.forward
        for tokens, positions, rows, error in (
            ([], [], None, PromptError),
            ([10_000], [0], None, PromptError),
            ([1, 2], [0], None, StepError),
            ([1, 2], [0, 1], [5], StepError),
            ([1, 2], [4, 5], None, PositionError),
        ):
            with pytest.raises(error):
                forward(tokens, positions, rows)
            assert player.cache.length == 0
        assert forward([1, 2], [0, 1], []).shape == (0, loaded("llama").vocab_size)
        assert player.cache.length == 2


def test_a_closed_program_is_not_run(exported):
    program = Program(exported("llama"))
    method = program.load_method()
    program.close()
    program.close()
    with pytest.raises(ModelError, match="was closed"):
        method(torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([0]))
    with pytest.raises(ModelError, match="was closed"):
        program.load_method()


def test_an_unknown_method_is_named_beside_those_that_are_there(exported):
    with pytest.raises(ModelError, match=r"no method 'backward'; it has: forward"):
        Program(exported("llama")).load_method("backward")


# Files ------------------------------------------------------------------------------------------


def test_what_is_no_program_is_refused(tmp_path):
    for name, content in (("empty", b""), ("text", b"hello " * 100), ("zeros", bytes(4096))):
        path = tmp_path / f"{name}.pte"
        path.write_bytes(content)
        with pytest.raises(ModelError, match="not an ExecuTorch program"):
            Program(path)
    with pytest.raises(ModelError, match="cannot be read"):
        Program(tmp_path / "nowhere.pte")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_refused(exported, tmp_path, share):
    data = exported("llama").read_bytes()
    path = tmp_path / "cut.pte"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"cut\.pte"):
        program = Program(path)
        # Without its seal alone it is a program like those of others.
        assert len(path.read_bytes()) >= len(data) - 64
        program.close()
        raise ModelError("cut.pte: only the seal is missing")


def test_every_changed_byte_of_a_sealed_file_is_found(exported, tmp_path):
    data = bytearray(exported("llama").read_bytes())
    path = tmp_path / "changed.pte"
    at_random = random.Random(0)
    places = [at_random.randrange(len(data)) for _ in range(40)]
    for place in [4, 8, 12, 40, *places, len(data) - 1, len(data) - 20]:
        data[place] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"changed\.pte"):
            Program(path)
        data[place] ^= 0x10
    path.write_bytes(data)
    assert Program(path).is_sealed


def test_a_damaged_program_of_others_never_ends_the_process(tiny, tmp_path):
    """Nothing tells a changed weight there; tables that lead nowhere do not get far."""
    data = tiny.read_bytes()
    path = tmp_path / "damaged.pte"
    at_random = random.Random(1)
    config = kv.make_config(ModelCacheParams(1, 2, 8), 64)
    n_refused = 0
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(at_random.choice((1, 3))):
            changed[at_random.randrange(len(data))] = at_random.randrange(256)
        path.write_bytes(changed)
        with kv.make_decode_session("executorch", config) as session:
            try:
                method = Program(path).load_method(cache_key=session.cache_key)
                method(torch.randn(1, 4, 3, 24), torch.arange(3)[:, None])
            except kv.KVCellarError:
                n_refused += 1
    assert n_refused


def test_a_file_that_was_replaced_is_read_again(exported, tmp_path):
    path = tmp_path / "one.pte"
    shutil.copy(exported("llama"), path)
    assert Program(path).is_sealed
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(ModelError, match="checksum"):
        Program(path)


def test_a_sealed_program_of_others_is_known_by_every_byte(tiny, tmp_path):
    path = tmp_path / "sealed.pte"
    shutil.copy(tiny, path)
    with path.open("r+b") as file:
        seal(file, path.stat().st_size)
    assert Program(path).is_sealed


# The native part --------------------------------------------------------------------------------


def test_a_native_part_of_another_executorch_is_refused(home, monkeypatch):
    path = building.native_library()
    monkeypatch.setattr(building, "executorch_version", lambda: "9.9.9")
    with pytest.raises(BackendError, match=r"was built for ExecuTorch 1\..*installed is 9\.9\.9"):
        native.load_library(path)


def test_without_a_compiler_the_error_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(building, "PREBUILT", tmp_path / "none")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendError, match=r"no C\+\+ compiler here.*apt install g\+\+"):
        building.native_library()
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BackendError, match="no-such-compiler"):
        building.native_library()
    assert not list(tmp_path.rglob("*.so"))


def test_sources_that_do_not_compile_leave_nothing_behind(tmp_path, monkeypatch):
    sources = tmp_path / "native"
    shutil.copytree(building.SOURCES, sources)
    (sources / "op.cpp").write_text("not C++ at all")
    monkeypatch.setattr(building, "SOURCES", sources)
    with pytest.raises(BackendError, match="did not compile against ExecuTorch"):
        building.build(tmp_path / "builds")
    assert list((tmp_path / "builds").iterdir()) == []


def test_a_file_that_is_no_library_says_that_it_can_be_removed(tmp_path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(BackendError, match="remove the file"):
        native.load_library(path)


def test_a_build_is_named_by_version_and_sources(tmp_path, monkeypatch):
    before = building.build_name()
    assert building.executorch_version() in before
    sources = tmp_path / "native"
    shutil.copytree(building.SOURCES, sources)
    monkeypatch.setattr(building, "SOURCES", sources)
    assert building.build_name() == before
    (sources / "op.cpp").write_text("// changed")
    assert building.build_name() != before


def test_a_build_that_came_with_the_wheel_is_used(home, tmp_path, monkeypatch):
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    monkeypatch.setattr(building, "PREBUILT", prebuilt)
    built = building.native_library()
    assert built.parent == home / "executorch" / "native"
    shutil.copy(built, prebuilt / built.name)
    assert building.native_library() == prebuilt / built.name
