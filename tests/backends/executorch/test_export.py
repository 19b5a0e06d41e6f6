"""What is in a program: the op and no cache, the model's facts, its tokenizer, its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.backends.executorch import Program, export_program, exporting
from kvcellar.backends.executorch.exporting import trace
from kvcellar.backends.executorch.quantising import quantise
from kvcellar.backends.executorch.rewriting import rewrite
from kvcellar.engine import encode_chat
from kvcellar.errors import ConfigError, ModelError
from kvcellar.metadata import read_kv_cache_metadata
from kvcellar.models import LoadedModel, load_model
from tests.backends.executorch.programs import FEW_LAYERS, MAX_TOKENS, quietly
from tests.models.fingerprints import differences
from tests.models.gguf.families import CASES
from tests.models.players import Player, text
from tests.models.tiny_checkpoints import VOCAB_SIZE

MAX_POSITIONS = 512


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_the_graph_has_one_op_per_layer_no_mutated_buffer_and_no_context_length(checkpoint, family):
    model = load_model(checkpoint(family))
    rewrite(model.network)
    with quietly():
        program = trace(model.network, MAX_TOKENS)
    calls = [n for n in program.graph.nodes if "update_and_attend" in str(n.target)]
    assert [n.args[4] for n in calls] == list(range(model.params.n_layers))
    assert not program.graph_signature.buffers_to_mutate
    assert not program.graph_signature.user_inputs_to_mutate
    # Positions that YaRN stretches (gpt-oss) are more than the config's other number.
    lengths = {MAX_POSITIONS, model.max_positions}
    for node in program.graph.nodes:
        if node.op == "call_function":
            assert not any(arg in lengths for arg in node.args if type(arg) is int), (
                node.format_node()
            )
        shape = getattr(node.meta.get("val"), "shape", ())
        assert all(dim not in lengths for dim in shape if isinstance(dim, int)), node.name


@pytest.mark.parametrize("family", FEW_LAYERS)
def test_a_program_carries_the_facts_of_its_model_and_nothing_of_a_session(
    exported, checkpoint, family
):
    program = Program(exported(family))
    model = load_model(checkpoint(family))
    assert program.is_sealed
    assert program.params == model.params
    assert program.method_names == ("forward",)
    assert read_kv_cache_metadata(program.metadata) == model.params
    assert program.metadata["kv_cache.vocab_size"] == VOCAB_SIZE
    names = {key.removeprefix("kv_cache.") for key in program.metadata}
    assert not [n for n in names if "capacity" in n or "context" in n or "kv_dtype" in n]


def test_a_gguf_file_becomes_a_program_with_its_tokenizer_and_template_inside(
    tmp_path, monkeypatch
):
    # As a user has it: what runs a model by default is not what is exported.
    monkeypatch.delenv("KVCELLAR_PREFERS")
    path, program = tmp_path / "model.gguf", tmp_path / "model.pte"
    CASES["llama"].write(path)
    with quietly():
        export_program(path, program, max_tokens_per_step=MAX_TOKENS)
    inside = load_model(program, backend="executorch")
    outside = load_model(path, dtype="float32", weights="none")
    path.unlink()
    chat = [{"role": "user", "content": "Grüße, 世界 the in<|think|>"}]
    assert encode_chat(inside.tokenizer, chat) == encode_chat(outside.tokenizer, chat)
    assert inside.eos_token_ids == outside.eos_token_ids == {261, 263}
    assert inside.tokenizer.get_vocab() == outside.tokenizer.get_vocab()
    found = []
    for model in (inside, outside):
        with Player(model, "contiguous") as player:
            found.append(player.feed([1, 40, 7, 99, 258, 3], rows="all"))
    assert np.abs(found[0] - found[1]).max() <= 1e-4


def test_tokenizer_chat_template_and_ends_travel_inside(exported, checkpoint, tmp_path):
    alone = tmp_path / "alone.pte"
    alone.write_bytes(exported("llama").read_bytes())
    inside, outside = load_model(alone, backend="executorch"), load_model(checkpoint("llama"))
    chat = [{"role": "user", "content": "Grüße, 世界"}]
    assert encode_chat(inside.tokenizer, chat) == encode_chat(outside.tokenizer, chat)
    assert inside.tokenizer.encode("a b") == outside.tokenizer.encode("a b")
    assert inside.eos_token_ids == outside.eos_token_ids
    assert inside.vocab_size == outside.vocab_size
    assert inside.max_positions == outside.max_positions
    assert inside.fingerprint() == outside.fingerprint()


def test_quantised_weights_are_another_model_to_the_store(loaded, checkpoint):
    fingerprint = load_model(checkpoint("llama")).fingerprint()
    found = loaded("llama", "8da4w").fingerprint()
    assert differences(found, fingerprint) == ["dtype"]


def logits_of(model: LoadedModel) -> np.ndarray:
    """In three chunks, on cells."""
    prompt = text(40)
    config = kv.make_config(model.params, 64, "float32")
    with kv.make_seq_session(model.backend, config) as session:
        runner = model.bind(session)
        got = [
            runner.forward(prompt[a:b], session.cache.begin_step([(0, b - a)]), range(b - a))
            for a, b in ((0, 17), (17, 18), (18, 40))
        ]
    return np.concatenate(got)


@pytest.mark.parametrize("scheme", ["8da4w", "8da8w"])
def test_quantised_programs_compute_what_torchao_computes_eagerly(loaded, checkpoint, scheme):
    eager: Any = load_model(checkpoint("llama"))
    exact = logits_of(eager)
    rewrite(eager.network)
    with quietly():
        quantise(eager.network, scheme)
        want = logits_of(eager)
    got = logits_of(loaded("llama", scheme))
    # A product at a rounding boundary may become the other 8-bit number, one step of some 1%.
    assert np.median(np.abs(got - want)) < 1e-5
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
    assert (got.argmax(axis=1) == want.argmax(axis=1)).all()
    assert np.abs(want - exact).max() > 0.1, "it was quantised at all"


def test_quantising_makes_the_file_several_times_smaller(exported):
    size = {scheme: exported("llama", scheme).stat().st_size for scheme in ("none", "8da4w")}
    assert size["8da4w"] < 0.45 * size["none"]


def test_an_export_reports_by_stage_and_says_what_xnnpack_took(checkpoint, tmp_path, monkeypatch):
    stages: list[str] = []
    shares: list[float] = []

    def progress(share: float, what: str) -> None:
        shares.append(share)
        stages.append(what)

    report = export_program(
        checkpoint("qwen3"),
        tmp_path / "named.pte",
        dtype="bfloat16",
        max_tokens_per_step=8,
        method="step",
        progress=progress,
    )
    assert shares == sorted(shares)
    assert stages[-1] == "ready"
    for stage in ("tracing the graph", "lowering to XNNPACK", "planning memory"):
        assert stage in stages
    assert report.n_op_calls == 1
    assert report.n_delegates > 1
    assert report.delegated["aten.linear.default"] >= 5  # means of norms: it takes no bfloat16
    assert sum(n for op, n in report.kept.items() if "linear" in op or "mm" in op) >= 8
    assert report.kept["kvcache.update_and_attend.default"] == 1
    assert report.size_bytes == report.path.stat().st_size
    model: Any = load_model(report.path, backend="executorch")
    assert (model.method, model.max_tokens_per_step, model.dtype) == ("step", 8, "bfloat16")
    with pytest.raises(ConfigError, match="exported in bfloat16"):
        load_model(report.path, backend="executorch", dtype="float32")
    with pytest.raises(ConfigError, match="CPU"):
        load_model(report.path, backend="executorch", device="meta")
    config = kv.make_config(model.params, 32, "float32")
    with kv.make_decode_session("executorch", config) as session:
        runner = model.bind(session)
        got = np.concatenate([runner.forward(text(8), range(8)), runner.forward([7], [8])])
    eager = load_model(checkpoint("qwen3"), dtype="bfloat16")
    with kv.make_decode_session("torch", config) as session:
        want = eager.bind(session).forward((*text(8), 7)[:8], range(8))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=0.05 * np.abs(want).max())


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"quantize": "4bit"}, "choose one of none, 8da4w, 8da8w"),
        ({"dtype": "int8"}, "choose one of float32"),
        ({"quantize": "8da4w", "dtype": "bfloat16"}, "leave dtype out"),
        ({"max_tokens_per_step": 1}, "at least 2"),
        ({"method": "a.b"}, "is no name"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(tmp_path, settings, what):
    with pytest.raises(ConfigError, match=what):
        export_program("no such model", tmp_path / "x.pte", **settings)


def test_an_export_that_fails_leaves_no_file(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="no folder"):
        export_program(checkpoint("qwen3"), tmp_path / "nowhere" / "x.pte")

    class Full:
        def write_to_file(self, file: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    target = Path(tmp_path / "x.pte")
    with pytest.raises(ModelError, match="No space left"):
        exporting._write(Full(), target)
    assert list(tmp_path.iterdir()) == []


def test_features_are_a_second_output_where_they_were_asked_for(
    checkpoint, exported, loaded, tmp_path
):
    path = tmp_path / "telling.pte"
    report = export_program(
        checkpoint("llama"), path, max_tokens_per_step=MAX_TOKENS, feature_layers=(0, 1, 2)
    )
    assert report.feature_layers == (0, 1, 2)
    model, prompt = load_model(path, backend="executorch"), text(20)
    found = []
    for each in (model, load_model(checkpoint("llama"))):
        with kv.make_seq_session(each.backend, kv.make_config(model.params, 64)) as session:
            runner = each.bind(session, feature_layers=(0, 1, 2))
            for part in (prompt[:13], prompt[13:]):
                positions = session.cache.begin_step([(0, len(part))])
                logits, features = runner.forward_with_features(part, positions, [2, 5])
            assert features.shape == (7, runner.n_features) and features.dtype == np.float32
            found += [(logits, features)]
            again = session.cache.begin_step([(1, 9)])
            assert runner.forward(prompt[:9], again).shape == (1, VOCAB_SIZE)
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-4)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)
    with kv.make_seq_session("executorch", kv.make_config(model.params, 64)) as session:
        with pytest.raises(ConfigError, match=r"\[0, 1, 2\]; export it again with --features 1,2"):
            model.bind(session, feature_layers=(1, 2))
        with pytest.raises(ConfigError, match="tells none"):
            loaded("llama").bind(session, feature_layers=(0, 1, 2))
