"""How programs meet caches: by cache_key, by the active session, from threads, in Python."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.backends.executorch import Program
from kvcellar.backends.executorch.program import LIST_KEYS
from kvcellar.errors import StepError
from kvcellar.metadata import write_kv_cache_metadata
from kvcellar.models import load_model
from kvcellar.registry import CacheRegistry, use_cache
from tests.backends.executorch.programs import quietly
from tests.models.players import assert_close, text

WAIT_S = 180


def inputs(tokens: Any, start: int, rows: Any = None) -> tuple[torch.Tensor, ...]:
    n = len(tokens)
    at = torch.arange(start, start + n)[None]
    return torch.tensor([list(tokens)]), at, torch.tensor(range(n) if rows is None else rows)


def session_for(program: Program, kind: Any = kv.make_decode_session, **policy: Any) -> Any:
    return kind("executorch", kv.make_config(program.params, 128, min_chunk=16, **policy))


@pytest.fixture
def program(exported):
    return Program(exported("llama"))


def test_every_list_of_the_cache_facts_is_read_as_a_list():
    groups = (
        kv.LayerGroup((0,), 1, 8, 16, chunk=4, is_latent=True),
        kv.LayerGroup((1,), 2, 8, 8, window=3),
    )
    facts = write_kv_cache_metadata({}, n_layers=3, groups=groups, shared=((2, 0),))
    assert {name for name, value in facts.items() if isinstance(value, list)} <= LIST_KEYS


def test_a_method_finds_its_session_by_cache_key_and_keeps_the_cache_alive(program, oracle):
    prompt = text(30, seed=1)
    with session_for(program) as session:
        method = program.load_method(cache_key=session.cache_key)
        (got,) = method(*inputs(prompt[:17], 0))
        cache = weakref.ref(session.cache)
    del session
    gc.collect()
    assert cache() is not None, "the method holds it"
    (rest,) = method(*inputs(prompt[17:], 17))
    both = torch.cat([got[0], rest[0]]).numpy()
    assert_close(both, oracle("llama").logits(prompt))
    del method
    gc.collect()
    assert cache() is None


def test_one_file_loaded_twice_runs_on_two_kinds_of_caches_in_turns(exported, oracle):
    target, draft = Program(exported("llama")), Program(exported("llama"))
    prompts = text(24, seed=2), text(24, seed=3)
    got: list[list[Any]] = [[], []]
    with (
        session_for(target, kv.make_tree_session) as a,
        session_for(draft, kv_dtype="float32") as b,
    ):
        methods = (
            target.load_method(cache_key=a.cache_key),
            draft.load_method(cache_key=b.cache_key),
        )
        start = 0
        for n in (5, 1, 1, 8, 1, 2, 6):
            for one, method in enumerate(methods):
                if one == 0:
                    a.cache.begin_step([(0, n)])
                (rows,) = method(*inputs(prompts[one][start : start + n], start))
                got[one].append(rows[0])
            start += n
    for one, prompt in enumerate(prompts):
        assert_close(torch.cat(got[one]).numpy(), oracle("llama").logits(prompt))


def test_two_methods_of_one_program_share_its_weights_and_keep_their_caches_apart(program, oracle):
    prompts = text(12, seed=4), text(12, seed=5)
    with session_for(program) as a, session_for(program) as b:
        methods = [program.load_method(cache_key=s.cache_key) for s in (a, b)]
        for at in range(12):
            rows = [
                m(*inputs(p[at : at + 1], at))[0] for m, p in zip(methods, prompts, strict=True)
            ]
        for row, prompt in zip(rows, prompts, strict=True):
            assert_close(row[0].numpy(), oracle("llama").logits(prompt)[-1:])


@pytest.mark.parametrize("is_shared", [False, True], ids=["a program each", "one program"])
def test_two_threads_run_at_a_time(exported, oracle, is_shared):
    path = exported("llama")
    one = Program(path)
    programs = [one, one if is_shared else Program(path)]
    prompts = text(40, seed=6), text(40, seed=7)
    got: list[Any] = [None, None]
    start = threading.Barrier(2)

    def run(index: int) -> None:
        with session_for(programs[index]) as session:
            method = programs[index].load_method(cache_key=session.cache_key)
            start.wait(WAIT_S)
            rows = [method(*inputs(prompts[index][:9], 0))[0][0]]
            rows += [method(*inputs(prompts[index][at : at + 1], at))[0][0] for at in range(9, 40)]
            got[index] = torch.cat(rows).numpy()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for rows, prompt in zip(got, prompts, strict=True):
        assert_close(rows, oracle("llama").logits(prompt))


class PythonCache:
    """A cache as anybody may write one: a list of K and V per layer, attended by torch.

    It waits at ``gate`` in its first layer, which needs other Python threads to run meanwhile.
    """

    takes_tensors = True
    is_step_open = False

    def __init__(self, config: Any, gate: threading.Event | None = None) -> None:
        self.config, self.gate = config, gate
        self.n_layers = config.params.n_layers
        self.rows: list[list[Any]] = [[] for _ in range(self.n_layers)]
        self.positions: list[int] = []
        self.reached = threading.Event()

    def end_step(self) -> None:
        pass

    def cancel_step(self) -> None:
        pass

    def update_and_attend(self, q, k, v, position, layer_id, scale, out_dtype, sinks=None):
        if self.gate is not None and layer_id == 0:
            self.reached.set()
            assert self.gate.wait(WAIT_S)
        if layer_id == 0:
            self.positions += position.reshape(-1).tolist()
        rows = self.rows[layer_id]
        rows += [(k[:, :, i].clone(), v[:, :, i].clone()) for i in range(k.shape[2])]
        keys, values = (torch.stack([row[i] for row in rows], dim=2) for i in (0, 1))
        n_all, n_new = keys.shape[2], q.shape[2]
        seen = torch.ones(n_new, n_all, dtype=torch.bool).tril(n_all - n_new)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out.to(out_dtype)


def test_a_cache_written_in_python_runs_through_dlpack(program, oracle):
    prompt = text(20, seed=8)
    cache = PythonCache(kv.make_config(program.params, 64))
    method = program.load_method(cache=cache)
    (first,) = method(*inputs(prompt[:13], 0))
    (rest,) = method(*inputs(prompt[13:], 13))
    assert cache.positions == list(range(20))
    assert_close(torch.cat([first[0], rest[0]]).numpy(), oracle("llama").logits(prompt))


def test_other_python_threads_run_while_a_program_does(program, exported):
    gate = threading.Event()
    cache = PythonCache(kv.make_config(program.params, 64), gate)
    method = program.load_method(cache=cache)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(method(*inputs(text(4), 0))))
    thread.start()
    assert cache.reached.wait(WAIT_S)
    other = Program(exported("llama"))
    with session_for(other) as session:  # a whole forward while the first is inside its own
        other.load_method(cache_key=session.cache_key)(*inputs(text(4), 0))
    gate.set()
    thread.join(WAIT_S)
    assert len(done) == 1


def test_what_a_cache_raises_comes_out_as_it_was_and_the_next_forward_runs(program, oracle):
    prompt = text(9, seed=9)

    class Picky(PythonCache):
        def update_and_attend(self, q, k, v, position, layer_id, *rest):
            if layer_id == 1 and q.shape[2] == 2:
                raise ZeroDivisionError("two are too few")
            return super().update_and_attend(q, k, v, position, layer_id, *rest)

    cache = Picky(kv.make_config(program.params, 64))
    method = program.load_method(cache=cache)
    with pytest.raises(ZeroDivisionError, match="two are too few"):
        method(*inputs(prompt[:2], 0))
    cache.rows = [[] for _ in cache.rows]
    (got,) = method(*inputs(prompt, 0))
    assert_close(got[0].numpy(), oracle("llama").logits(prompt))


def test_a_forward_that_fails_leaves_no_cell_claimed(program, oracle):
    prompt = text(12, seed=10)
    with session_for(program, kv.make_seq_session) as session:
        cache = session.cache
        method = program.load_method(cache_key=session.cache_key)
        cache.begin_step([(0, 6)])
        method(*inputs(prompt[:6], 0))
        before = cache.usage()
        cache.begin_step([(0, 2)])
        with pytest.raises(StepError):  # three tokens for a step of two
            method(*inputs(prompt[6:9], 6))
        cache.cancel_step()
        assert cache.usage() == before
        cache.begin_step([(0, 6)])
        (got,) = method(*inputs(prompt[6:], 6))
        assert_close(got[0].numpy(), oracle("llama").logits(prompt)[6:])


@pytest.mark.parametrize(
    "kv_dtype", ["float32", "int8", "int4:g32", "k8v4", "int8:rot", "int4:first4:last16"]
)
def test_storage_types_run_as_they_do_under_torch(loaded, checkpoint, kv_dtype):
    torch_model = load_model(checkpoint("qwen3"))
    model = loaded("qwen3")
    prompt = text(40, seed=11)
    rows = []
    for one in (torch_model, model):
        config = kv.make_config(one.params, 64, kv_dtype, min_chunk=16)
        with kv.make_seq_session(one.backend, config) as session:
            runner = one.bind(session)
            got = [
                runner.forward(prompt[at : at + n], session.cache.begin_step([(0, n)]), range(n))
                for at, n in ((0, 23), (23, 1), (24, 9), (33, 7))
            ]
            rows.append(np.concatenate(got))
    # The same bytes are stored but for a rounding that falls the other way here and there.
    np.testing.assert_allclose(
        rows[0], rows[1], rtol=0, atol=1e-4 if kv_dtype == "float32" else 0.05
    )


def official(path: Path) -> Any:
    """The method of a program, loaded by ExecuTorch's own Python runtime."""
    with quietly():
        from executorch.runtime import Runtime

    return Runtime.get().load_program(path).load_method("forward")


def test_the_official_runtime_meets_the_session_that_is_active(exported, oracle):
    theirs = official(exported("gemma2"))
    ours = Program(exported("gemma2"))
    prompt = text(33, seed=12)
    with session_for(ours) as a, session_for(ours, kv.make_seq_session) as b:
        got: list[list[Any]] = [[], []]
        for start, stop in ((0, 17), (17, 18), (18, 33)):
            for one, session in enumerate((a, b)):
                if one == 1:
                    session.cache.begin_step([(0, stop - start)])
                with use_cache(session.cache):
                    (rows,) = theirs.execute(inputs(prompt[start:stop], start))
                got[one].append(rows[0].clone())
    for rows in got:
        assert_close(torch.cat(rows).numpy(), oracle("gemma2").logits(prompt))


def test_without_an_active_session_the_official_runtime_raises_and_lives_on(exported, oracle):
    theirs = official(exported("llama"))
    with pytest.raises(RuntimeError):
        theirs.execute(inputs(text(3), 0))
    with session_for(Program(exported("llama"))) as session, use_cache(session.cache):
        (got,) = theirs.execute(inputs(text(9), 0))
    assert_close(got[0].numpy(), oracle("llama").logits(text(9)))


def test_sessions_leave_nothing_in_the_registry(program):
    before = CacheRegistry.instance().keys()
    with session_for(program) as session:
        program.load_method(cache_key=session.cache_key)(*inputs(text(3), 0))
    assert CacheRegistry.instance().keys() == before
