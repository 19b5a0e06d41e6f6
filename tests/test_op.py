"""The op: its schema, its place in a traced graph, and its life beside ExecuTorch's."""

import subprocess
import sys
import textwrap

import pytest
import torch

import kvcellar as kv
from kvcellar import op
from kvcellar.errors import StepError
from kvcellar.registry import use_cache

N_LAYERS, N_KV, N_HEADS, DIM, V_DIM = 2, 2, 4, 8, 6


def config() -> kv.CacheConfig:
    return kv.make_config(kv.ModelCacheParams(N_LAYERS, N_KV, DIM, V_DIM), capacity=32)


def qkv(n_tok: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_tok)
    return (
        torch.randn(1, N_HEADS, n_tok, DIM, generator=generator),
        torch.randn(1, N_KV, n_tok, DIM, generator=generator),
        torch.randn(1, N_KV, n_tok, V_DIM, generator=generator),
    )


def test_the_schema_is_the_one_that_executorch_registers():
    assert str(torch.ops.kvcache.update_and_attend.default._schema) == (
        "kvcache::update_and_attend(Tensor q, Tensor k, Tensor v, Tensor position, "
        "SymInt layer_id, float scale, ScalarType out_dtype) -> Tensor"
    )


@pytest.mark.parametrize("name", ["update_and_attend", "update_and_attend_sinks"])
def test_the_dispatched_op_and_the_out_variant_give_what_the_cache_gives(name):
    q, k, v = qkv(5)
    position = torch.arange(5)[:, None]
    sinks = (torch.randn(N_HEADS),) if name.endswith("sinks") else ()
    results = []
    for call in ("eager", "default", "out"):
        with kv.make_decode_session("torch", config()) as session, use_cache(session.cache):
            args = (q, k, v, position, 1, 0.3, torch.float32, *sinks)
            overloads = getattr(torch.ops.kvcache, name)
            if call == "eager":
                results.append(op.eager_update_and_attend(*args))
            elif call == "default":
                results.append(overloads(*args))
            else:
                out = torch.empty(0)
                assert overloads.out(*args, out=out) is out
                results.append(out)
    assert results[0].shape == (1, N_HEADS, 5, V_DIM)
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_sinks_take_weight_away_from_every_token():
    q, k, v = qkv(3)
    with kv.make_decode_session("torch", config()) as session, use_cache(session.cache):
        plain = op.eager_update_and_attend(q, k, v, torch.arange(3), 0, 0.3, torch.float32)
        huge = torch.full((N_HEADS,), 80.0)
        position = torch.arange(3)
        sunk = op.eager_update_and_attend(q, k, v, position, 1, 0.3, torch.float32, huge)
    assert sunk.abs().max() < 1e-6 < plain.abs().max()


def test_out_dtype_is_kept_whatever_is_stored():
    q, k, v = qkv(3)
    with kv.make_decode_session("torch", config()) as session, use_cache(session.cache):
        out = torch.ops.kvcache.update_and_attend(q, k, v, torch.arange(3), 0, 0.3, torch.float16)
    assert out.dtype == torch.float16


def test_without_an_active_cache_the_error_names_the_way_out():
    with pytest.raises(StepError, match=r"no cache is active in this thread.*use_cache"):
        torch.ops.kvcache.update_and_attend(*qkv(1), torch.arange(1), 0, 0.3, torch.float32)


class TwoLayers(torch.nn.Module):
    """What a model is to the op: per layer one call, nothing else of a cache."""

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for layer in range(N_LAYERS):
            q = x.repeat(1, N_HEADS // N_KV, 1, 1)
            x = (
                x
                + torch.ops.kvcache.update_and_attend(q, x, x, position, layer, 0.3, x.dtype)[
                    :, :N_KV
                ]
            )
        return x


def test_export_sees_one_node_per_layer_and_no_buffers_for_any_length():
    length = torch.export.Dim("length", min=1, max=64)
    program = torch.export.export(
        TwoLayers(),
        (torch.randn(1, N_KV, 4, DIM), torch.arange(4)),
        dynamic_shapes=({2: length}, {0: length}),
    )
    nodes = [n for n in program.graph.nodes if "update_and_attend" in str(n.target)]
    assert [n.args[4] for n in nodes] == list(range(N_LAYERS))
    assert not list(program.named_buffers())


def test_an_exported_program_runs_on_our_caches_step_after_step():
    length = torch.export.Dim("length", min=1, max=64)
    example = (torch.randn(1, N_KV, 4, DIM), torch.arange(4))
    program = torch.export.export(
        TwoLayers(), example, dynamic_shapes=({2: length}, {0: length})
    ).module()
    x = torch.randn(1, N_KV, 7, DIM)
    cfg = kv.make_config(kv.ModelCacheParams(N_LAYERS, N_KV, DIM), capacity=32)
    with kv.make_decode_session("torch", cfg) as session, use_cache(session.cache):
        whole = program(x, torch.arange(7))
    with kv.make_decode_session("torch", cfg) as session, use_cache(session.cache):
        steps = [program(x[:, :, a:b], torch.arange(a, b)) for a, b in ((0, 4), (4, 5), (5, 7))]
    torch.testing.assert_close(torch.cat(steps, dim=2), whole)


BESIDE_EXECUTORCH = """
import warnings; warnings.simplefilter("ignore")
import torch
{imports[0]}
names = lambda: torch.ops.kvcache.update_and_attend.default

class One(torch.nn.Module):
    def forward(self, x, position):
        return torch.ops.kvcache.update_and_attend(x, x, x, position, 0, 0.3, x.dtype)

def targets():
    program = torch.export.export(One(), (torch.randn(1, 2, 4, 8), torch.arange(4)))
    return [n.target for n in program.graph.nodes if "update_and_attend" in str(n.target)]

before, named = targets(), names()
{imports[1]}
assert before == targets() == [names()] and names() is named, (before, targets(), names())

import kvcellar as kv
from kvcellar.registry import use_cache
from executorch.extension.llm.cache import reference_cache, update_and_attend as theirs

torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
args = (q, k, v, torch.arange(5)[:, None], 0, 0.3, torch.float32)
config = kv.make_config(kv.ModelCacheParams(1, 2, 8), 64)

def with_ours(call):
    with kv.make_decode_session("torch", config) as session, use_cache(session.cache):
        return call(*args), session.cache.length

def with_theirs(call):
    cache = reference_cache.ContiguousReferenceCache(reference_cache.CacheConfig(1, 2, 8, 64))
    theirs.REGISTRY.install("x", cache)
    with theirs.REGISTRY.active("x"):
        return call(*args), cache.used(0)

results = [
    run(call)
    for run in (with_ours, with_theirs)
    for call in (torch.ops.kvcache.update_and_attend, theirs.update_and_attend)
]
for out, length in results:
    assert length == 5
    torch.testing.assert_close(out, results[0][0])
assert torch.ops.kvcache.update_and_attend.out
try:
    torch.ops.kvcache.update_and_attend(*args)
except kv.KVCellarError as error:
    assert "no cache is active" in str(error)
else:
    raise AssertionError("ran without a cache")
print("both work")
"""


@pytest.mark.parametrize(
    "imports",
    [
        ("import kvcellar.op", "import executorch.extension.llm.cache.update_and_attend"),
        ("import executorch.extension.llm.cache.update_and_attend", "import kvcellar.op"),
    ],
    ids=["ours first", "theirs first"],
)
@pytest.mark.slow
def test_both_packages_share_the_op_in_either_import_order(imports):
    code = textwrap.dedent(BESIDE_EXECUTORCH).format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip().endswith("both work"), done.stderr[-3000:]
