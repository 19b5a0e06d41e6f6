"""What is no whole number, text or flag is refused by an error of ours, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.checks import flag, number, seen, text, whole, wholes
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams, branch, generate
from kvcellar.errors import ConfigError, KVCellarError
from kvcellar.registry import CacheRegistry
from tests.engine.fakes import FULL_PARAMS, PARAMS, ByteTokenizer, HashRunner, make_cache


class Thing:
    def __repr__(self) -> str:
        return "<a thing>"


NAN, THING = float("nan"), Thing()
NO_WHOLE = [
    1.5,
    1.0,
    float("nan"),
    float("inf"),
    "0",
    b"0",
    True,
    False,
    None,
    [],
    {},
    THING,
    1j,
]
HUGE = [2**70, -(2**70)]
NO_WHOLES: list[Any] = [1.5, 7, "01", b"01", None, {0: 1}, THING, [1.5], ["0"], [None], [True]]
NO_WHOLES += [
    [[0]],
    np.array([0.0]),
    np.array([True]),
    np.array(3),
    [np.float32(1)],
    [float("nan")],
]
NO_NUMBER = ["1", None, True, [], float("nan"), float("inf"), 10**400]

MODEL = kv.ModelCacheParams(2, 1, 4)
KINDS = ["contiguous", "seq", "tree", "paged"]


def name_of(value: Any) -> str:
    return seen(value)[:30]


def filled(kind: str) -> Any:
    """A cache with a history, and a tree where it has trees."""
    cache = make_cache(kind, 64, FULL_PARAMS)
    runner = HashRunner(cache, 260)
    if kind == "contiguous":
        runner.forward(range(5), range(5))
    else:
        runner.forward(range(6), cache.begin_step([(0, 4), (1, 2)]))
    cache.end_step()
    return cache


def state_of(cache: Any) -> Any:
    if isinstance(cache, kv.SeqCache):
        tables = {s: [t.tolist() for t in cache.seq_table(s)] for s in cache.seq_ids()}
        return tables, cache.n_free, cache.is_step_open, cache.usage()
    return cache.length, cache.is_step_open, cache.usage()


def refuses(cache: Any, call: Callable[[], Any]) -> None:
    before = state_of(cache)
    with pytest.raises(KVCellarError) as caught:
        call()
    assert str(caught.value) and len(str(caught.value)) < 400
    assert state_of(cache) == before
    if isinstance(cache, kv.SeqCache):
        assert cache.begin_step([(5, 1)]) == [0]  # and it goes on as if nothing had been asked
    cache.cancel_step()


SEQ_VERBS: dict[str, Callable[[Any, Any], Any]] = {
    "begin_step id": lambda cache, bad: cache.begin_step([(0, 1), (bad, 1)]),
    "begin_step n": lambda cache, bad: cache.begin_step([(0, bad)]),
    "can_begin_step": lambda cache, bad: cache.can_begin_step([(bad, 1)]),
    "seq_len": lambda cache, bad: cache.seq_len(bad),
    "has_seq": lambda cache, bad: cache.has_seq(bad),
    "seq_cp src": lambda cache, bad: cache.seq_cp(bad, 7),
    "seq_cp dst": lambda cache, bad: cache.seq_cp(0, bad),
    "seq_cp p0": lambda cache, bad: cache.seq_cp(0, 7, bad),
    "seq_rm": lambda cache, bad: cache.seq_rm(bad),
    "seq_rm p0": lambda cache, bad: cache.seq_rm(0, bad),
    "seq_keep": lambda cache, bad: cache.seq_keep(bad),
    "seq_table": lambda cache, bad: cache.seq_table(bad),
    "seq_usage": lambda cache, bad: cache.seq_usage(bad),
    "seq_map": lambda cache, bad: cache.seq_map(bad, cache.seq_table(0)),
    "expect": lambda cache, bad: cache.expect(bad, 5),
    "expect n": lambda cache, bad: cache.expect(0, bad),
    "can_extend": lambda cache, bad: cache.can_extend(bad),
    "can_resume": lambda cache, bad: cache.can_resume(0, bad),
    "keep_point": lambda cache, bad: cache.keep_point(bad, 1),
    "keep_point length": lambda cache, bad: cache.keep_point(0, bad),
    "drop_point": lambda cache, bad: cache.drop_point(bad, 1),
    "drop_point length": lambda cache, bad: cache.drop_point(0, bad),
    "resumable_from": lambda cache, bad: cache.resumable_from(bad),
}


@pytest.mark.parametrize("bad", NO_WHOLE, ids=name_of)
@pytest.mark.parametrize("verb", SEQ_VERBS)
@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_a_verb_refuses_what_is_no_whole_number(kind, verb, bad):
    cache = filled(kind)
    refuses(cache, lambda: SEQ_VERBS[verb](cache, bad))


@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_a_table_is_not_made_longer_than_cells_can_be_counted(kind):
    cache = filled(kind)
    refuses(cache, lambda: cache.seq_table(0, 2**70))


@pytest.mark.parametrize("bad", NO_WHOLES, ids=name_of)
@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_a_step_refuses_what_are_no_stretches(kind, bad):
    cache = filled(kind)
    for verb in (cache.begin_step, cache.can_begin_step):
        refuses(cache, lambda verb=verb: verb(bad))
        refuses(cache, lambda verb=verb: verb([(0, 1), bad]))


@pytest.mark.parametrize("bad", [(0,), (0, 1, 2), (0, 0), (0, -1), 0])
@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_a_stretch_is_a_sequence_and_at_least_one_token(kind, bad):
    cache = filled(kind)
    refuses(cache, lambda: cache.begin_step([(0, 1), bad]))


@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_a_stretch_longer_than_cells_can_be_counted_is_refused(kind):
    cache = filled(kind)
    refuses(cache, lambda: cache.begin_step([(0, 2**70)]))


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_a_step_that_is_refused_leaves_the_step_before_it_as_it_was(kind, is_finished):
    cache = filled(kind)
    runner = HashRunner(cache, 260)
    positions = cache.begin_step([(0, 2)])
    if is_finished:
        runner.forward(range(2), positions)
    before = state_of(cache)
    for bad in ([1.5], None, "0"):
        with pytest.raises(KVCellarError):
            cache.begin_step(bad)
        assert state_of(cache) == before
    if not is_finished:
        runner.forward(range(2), positions)
    assert cache.begin_step([(0, 1)]) == [6]


@pytest.mark.parametrize("bad", [-1, -(2**70)])
@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_an_id_below_0_is_refused(kind, bad):
    cache = filled(kind)
    for verb in ("begin_step id", "seq_cp dst", "seq_map", "seq_rm", "seq_len", "expect"):
        refuses(cache, lambda verb=verb: SEQ_VERBS[verb](cache, bad))


@pytest.mark.parametrize(
    "bad",
    [None, 5, "x", [], [[0], [0], [0]], [[0.5], [0.5]], [[10**6], [0]], [[-2], [0]], [[0, 1], [0]]],
    ids=name_of,
)
@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
@pytest.mark.parametrize("verb", ["seq_map", "seq_claim"])
def test_a_sequence_does_not_start_on_what_are_no_cells(kind, verb, bad):
    cache = make_cache(kind, 64, PARAMS)
    refuses(cache, lambda: getattr(cache, verb)(3, bad))


@pytest.mark.parametrize("bad", [*NO_WHOLE, *HUGE], ids=name_of)
def test_a_rewind_refuses_what_is_no_length(bad):
    cache = filled("contiguous")
    refuses(cache, lambda: cache.rewind(bad))
    if bad not in HUGE:
        refuses(cache, lambda: cache.can_extend(bad))
        refuses(cache, lambda: cache.drop_point(bad))


@pytest.mark.parametrize("bad", [*NO_WHOLES, [2**70], [-5]], ids=name_of)
def test_a_tree_refuses_what_are_no_nodes(bad):
    cache = filled("tree")
    refuses(cache, lambda: cache.propose(bad, 0))
    cache.propose([-1, -1], 0)
    before = cache.n_nodes(0)
    with pytest.raises(KVCellarError):
        cache.commit(bad, 0)
    assert cache.n_nodes(0) == before
    for verb in (cache.has_tree, cache.n_nodes):
        with pytest.raises(KVCellarError):
            verb(1.5)


def test_whole_numbers_of_numpy_and_torch_are_taken():
    torch = pytest.importorskip("torch")
    cache = make_cache("tree", 64, FULL_PARAMS)
    for pair in (np.array([0, 2]), (np.int32(0), 2), range(0, 3, 2), torch.tensor([0, 2])):
        positions = cache.begin_step([pair])
        assert positions == [0, 1] and all(type(p) is int for p in positions)
        cache.cancel_step()
    assert cache.propose(np.array([-1, 0]), np.int64(3)) == [0, 1]
    config = kv.make_config(MODEL, np.int64(64))
    assert type(config.capacity) is int
    assert Request(np.array([1, 2])).prompt_ids == [1, 2]


# Settings -----------------------------------------------------------------------------------------


CONFIG_FIELDS = ["capacity", "min_chunk", "window_slack", "block_size"]


@pytest.mark.parametrize("bad", [*NO_WHOLE, *HUGE, -1], ids=name_of)
@pytest.mark.parametrize("field", CONFIG_FIELDS)
def test_a_cache_is_not_configured_with_what_is_no_count(field, bad):
    with pytest.raises(ConfigError, match=field):
        kv.make_config(MODEL, **{"capacity": 64, field: bad})


@pytest.mark.parametrize("bad", [None, 5, [], THING], ids=name_of)
@pytest.mark.parametrize("field", ["params", "kv_dtype", "layout", "budget"])
def test_a_cache_is_not_configured_with_another_kind_of_thing(field, bad):
    if field in ("budget", "kv_dtype") and bad is None:
        return
    with pytest.raises(ConfigError, match=field):
        kv.make_config(**{"params": MODEL, "capacity": 64, field: bad})


@pytest.mark.parametrize("bad", [*NO_WHOLE[:9], -1, 0, 2**70], ids=name_of)
@pytest.mark.parametrize("field", ["n_layers", "n_kv_heads", "head_dim", "v_head_dim"])
def test_a_model_is_not_described_with_what_is_no_count(field, bad):
    facts: dict[str, Any] = {"n_layers": 2, "n_kv_heads": 1, "head_dim": 4, "v_head_dim": 4}
    if field == "v_head_dim" and type(bad) is int and not bad:
        return  # as long as a K row
    with pytest.raises(ConfigError, match=field):
        kv.ModelCacheParams(**{**facts, field: bad})
    if field != "n_layers":
        with pytest.raises(ConfigError):
            replace(FULL_PARAMS.groups[0], **{field: bad})


@pytest.mark.parametrize("bad", [None, 5, [], {}, "nowhere", True], ids=name_of)
@pytest.mark.parametrize(
    "make",
    [kv.make_decode_session, kv.make_seq_session, kv.make_tree_session, kv.make_paged_session],
)
def test_a_session_is_not_made_of_another_kind_of_thing(make, bad):
    config = kv.make_config(MODEL, 64)
    with pytest.raises(KVCellarError):
        make(bad, config)
    with pytest.raises(KVCellarError, match="config"):
        make("reference", bad)


@pytest.mark.parametrize("bad", [None, 5, [], {}], ids=name_of)
def test_a_cache_key_is_a_text(bad):
    registry = CacheRegistry()
    for call in (lambda: registry.install(bad, make_cache("seq")), lambda: registry.get(bad)):
        with pytest.raises(KVCellarError, match="cache_key"):
            call()


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"]
NUMBERS += ["presence_penalty"]
OPTIONAL = ["seed", "max_tokens", "logprobs"]


@pytest.mark.parametrize("bad", NO_NUMBER, ids=name_of)
@pytest.mark.parametrize("field", NUMBERS)
def test_sampling_refuses_what_is_no_number(field, bad):
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: bad})
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias={1: bad})


@pytest.mark.parametrize("bad", NO_WHOLE, ids=name_of)
@pytest.mark.parametrize("field", ["top_k", "min_tokens", *OPTIONAL])
def test_sampling_refuses_what_is_no_count(field, bad):
    if bad is None and field in OPTIONAL:
        return
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: bad})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("stop", bad) for bad in (None, 5, [5], [""], [None])),
        *(("stop_token_ids", bad) for bad in (None, 5, ["a"], [1.5], "12")),
        *(("logit_bias", bad) for bad in (None, 5, [1], {"a": 1}, {1.5: 1}, {True: 1})),
        *(("ignore_eos", bad) for bad in (None, 1, "yes")),
        *(("guide", bad) for bad in (5, "x")),
    ],
    ids=str,
)
def test_sampling_refuses_another_kind_of_thing(field, bad):
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: bad})


@pytest.mark.parametrize("bad", [*NO_WHOLES, [2**70], [-1], []], ids=name_of)
def test_no_prompt_of_anything_but_tokens_is_queued_or_computed(bad):
    cache = make_cache("seq", 64, FULL_PARAMS)
    runner = HashRunner(cache, 260)
    engine = Engine(runner, cache, ByteTokenizer())
    with pytest.raises(KVCellarError, match=r"prompt|token"):
        engine.submit(Request(bad))
    with pytest.raises(KVCellarError, match=r"prompt|token"):
        next(generate(runner, cache, ByteTokenizer(), bad))
    assert engine.is_idle and not runner.forwards and not cache.seq_ids()


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("params", bad) for bad in (None, {}, 5)),
        *(("priority", bad) for bad in (None, 1.5, "high", True)),
        *(("deadline_s", bad) for bad in ("soon", float("nan"), True, -1)),
    ],
    ids=str,
)
def test_a_request_refuses_another_kind_of_thing(field, bad):
    with pytest.raises(ConfigError, match=field):
        Request((1,), **{field: bad})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("max_num_batched_tokens", bad) for bad in (None, 0, 1.5, "5", True)),
        *(("max_num_seqs", bad) for bad in (None, 0, 1.5, "5", True)),
        *(("max_prefill_beside", bad) for bad in (0, 1.5, "5", True)),
        *(("block_size", bad) for bad in (0, 1.5, "5", True)),
        *(("max_drafted", bad) for bad in (None, 0, 1.5, True)),
        *(("delay_factor", bad) for bad in (None, "1", float("nan"), True)),
        *(("policy", bad) for bad in (None, 5)),
        *(("index", bad) for bad in (None, 5)),
        *(("verify_all_drafts", bad) for bad in (None, 1)),
    ],
    ids=str,
)
def test_an_engine_is_not_configured_with_another_kind_of_thing(field, bad):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: bad})


@pytest.mark.parametrize("bad", [None, 0, 1.5, "2", True], ids=name_of)
def test_branches_and_chunks_are_counts(bad):
    cache = make_cache("seq", 64, FULL_PARAMS)
    runner = HashRunner(cache, 260)
    with pytest.raises(ConfigError, match="n_branches"):
        branch(runner, cache, ByteTokenizer(), [1], SamplingParams(max_tokens=2), bad)
    with pytest.raises(ConfigError, match="prefill_chunk"):
        generate(runner, cache, ByteTokenizer(), [1], prefill_chunk=bad)


def test_an_error_says_what_was_given_in_a_few_characters_whatever_it_is():
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    for value in (Rude(), "x" * 10**6, 10**5000, list(range(10**5)), -(10**5000)):
        for check in (whole, wholes, number, flag, text):
            if check is text and isinstance(value, str):
                continue
            if check is whole and isinstance(value, int):
                continue
            if check is wholes and isinstance(value, list):
                continue
            with pytest.raises(ConfigError) as caught:
                check(value, "it")
            assert len(str(caught.value)) < 150
