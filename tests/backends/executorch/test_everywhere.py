"""``backend="executorch"`` wherever a backend can be named: engine, agents' store, commands."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import kvcellar as kv
from kvcellar.agents import ModelHost, open_host
from kvcellar.backends.executorch import export_program
from kvcellar.cli import app
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.errors import BackendError, ModelError
from kvcellar.models import load_model
from tests.agents.fakes import eager as eager
from tests.agents.fakes import manager, run, tokens_of, turn
from tests.backends.executorch.programs import MAX_TOKENS
from tests.engine.speculate.test_lossless import CAPACITY, agrees
from tests.models.players import text

RUNNER = CliRunner()
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
FAMILIES = ("llama", "gemma2", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_batches_forks_and_preempts_as_under_torch(loaded, checkpoint, family):
    """Little room: prompts longer than a step, shared prefixes, sequences that must give way."""
    trunk = text(60, seed=1)
    prompts = [trunk + text(9, seed=s) for s in (2, 3, 4)] + [text(33, seed=5), trunk[:40]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ends: list[list[tuple[int, ...]]] = []
    counts = []
    for model in (load_model(checkpoint(family)), loaded(family)):
        config = kv.make_config(model.params, 180, "float32", min_chunk=16)
        with kv.make_seq_session(model.backend, config) as session:
            engine = Engine(
                model.bind(session),
                session.cache,
                model.tokenizer,
                config=EngineConfig(max_num_seqs=4),
            )
            for prompt in prompts:
                engine.submit(Request(tuple(prompt), params))
            done = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
            ends.append([tuple(done[i].token_ids) for i in sorted(done)])
            counts.append(engine.stats())
            limit = engine.scheduler.limits.max_num_batched_tokens
            assert limit == (MAX_TOKENS if model.backend == "executorch" else 512)
    assert ends[0] == ends[1]
    assert counts[1].preemptions > 0
    assert len(ends[1]) == len(prompts)


@pytest.mark.parametrize("kind", ["ngram", "draft model", "trees"])
@pytest.mark.parametrize("cache", ["seq", "tree"])
def test_guesses_change_nothing_under_executorch(loaded, cache, kind):
    """Trees are verified in one step of a program, with forks and preemption between."""
    agrees(loaded("gemma2"), cache, kind, capacity=CAPACITY - 20)


def test_a_head_guesses_for_a_program_that_tells_features(checkpoint, tmp_path):
    path = tmp_path / "telling.pte"
    layers = (0, 1, 2)
    export_program(checkpoint("llama"), path, max_tokens_per_step=MAX_TOKENS, feature_layers=layers)
    agrees(load_model(path, backend="executorch"), "tree", "eagle3")


@pytest.mark.usefixtures("eager")
def test_a_snapshot_restores_under_every_backend(exported, checkpoint, tmp_path):
    """Each turn by an engine of another backend, as in a process of its own; one store."""
    has_mlx = importlib.util.find_spec("mlx_lm") is not None
    backends = ("torch", "executorch", "mlx" if has_mlx else "torch", "executorch", "torch")
    folder, program = str(checkpoint("gemma2")), str(exported("gemma2"))
    lines = ("The first thing. " * 4, "And another.", "Then?", "And now?", "At last.")
    said = [list(line.encode()) for line in lines]

    def host(backend: str) -> Any:
        name = program if backend == "executorch" else folder

        def load(_: str) -> ModelHost:
            return open_host(name, capacity=1024, backend=backend, kv_dtype="float32")

        return load

    with manager(tmp_path / "one", host("torch")) as agents:
        run(agents.lifecycle.create("a", model=folder))
        for one in said:
            run(turn(agents, "a", tokens=one, params=GREEDY))
        want = tokens_of(agents, "a")
    for i, (one, backend) in enumerate(zip(said, backends, strict=True)):
        with manager(tmp_path / "two", host(backend)) as agents:
            if not i:
                run(agents.lifecycle.create("a", model=folder))
            before = len(tokens_of(agents, "a"))
            end = run(turn(agents, "a", tokens=one, params=GREEDY))
            if i:
                assert end.usage.restored_tokens == end.usage.cached_tokens == before - 1
            assert tokens_of(agents, "a") == want[: len(tokens_of(agents, "a"))]
    assert len(want) > 100


def test_a_checkpoint_is_exported_once_and_then_found(checkpoint, monkeypatch):
    from kvcellar.backends.executorch import exporting

    folder = checkpoint("qwen3")
    stages: list[str] = []
    first: Any = load_model(
        folder, backend="executorch", progress=lambda part, what: stages.append(what)
    )
    assert any("lowering to XNNPACK" in stage for stage in stages)
    monkeypatch.setattr(exporting, "export_program", None)
    again: Any = load_model(folder, backend="executorch")
    assert again.path == first.path
    assert again.params == load_model(folder).params


def invoke(*args: str) -> Result:
    result = RUNNER.invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_generate_and_chat_give_the_tokens_of_torch(exported, checkpoint):
    program, folder = str(exported("llama")), str(checkpoint("llama"))
    texts = []
    for model, backend in ((folder, "torch"), (program, "executorch")):
        for kind in ("contiguous", "tree"):
            result = invoke(
                *("generate", model, "--backend", backend, "--cache", kind, "--prompt", "Grüße"),
                *("--max-tokens", "12", "--json"),
            )
            assert result.exit_code == 0, result.stderr
            texts.append(json.loads(result.stdout)["token_ids"])
    assert texts == [texts[0]] * 4
    answers = []
    for model, backend in ((folder, "torch"), (program, "executorch")):
        args = ["chat", model, "--backend", backend, "--max-tokens", "6", "--temperature", "0"]
        result = RUNNER.invoke(app, args, input="hello\n")
        assert result.exit_code == 0, result.stderr
        answers.append(result.stdout)
    assert answers[0] == answers[1]


def test_export_writes_a_program_and_says_what_it_is(checkpoint, tmp_path):
    path = tmp_path / "out.pte"
    args = ("export", str(checkpoint("qwen3")), "-o", str(path), "--max-tokens-per-step", "16")
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["path"] == str(path)
    assert found["n_op_calls"] == 1
    assert found["max_tokens_per_step"] == 16
    assert path.stat().st_size == found["size_bytes"]
    result = invoke("export", str(checkpoint("qwen3")), "-o", str(path), "--quantize", "2bit")
    assert result.exit_code == 2
    assert "choose one of none, 8da4w, 8da8w" in result.stderr


def test_torch_says_which_backend_a_program_is_for(exported):
    with pytest.raises(ModelError, match="choose the backend executorch"):
        load_model(exported("llama"))
    with pytest.raises(BackendError, match="loads no models"):
        load_model("demo", backend="reference")
