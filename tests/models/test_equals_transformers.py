"""Whatever the cache and however tokens come: the tokens and logits of transformers alone."""

from __future__ import annotations

import pytest

from tests.backends.adapters import needs_mlx
from tests.models.players import MAKE_SESSION, Player, assert_close, text
from tests.models.tiny_checkpoints import FAMILIES, WINDOW

every_family = pytest.mark.parametrize("family", FAMILIES)
every_cache = pytest.mark.parametrize("kind", MAKE_SESSION)
caches_of_many = pytest.mark.parametrize("kind", ["seq", "tree"])

pytestmark = [
    every_family,
    pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=needs_mlx)]),
]


@pytest.fixture
def play(loaded, family, kind, backend):
    """Open a session of this kind for this family."""
    return lambda **policy: Player(loaded(family, backend), kind, **policy)


@every_cache
def test_one_prefill_gives_the_logits_of_every_token(play, oracle, family):
    prompt = text(45)
    with play() as player:
        assert_close(player.feed(prompt, rows="all"), oracle(family).logits(prompt))


@every_cache
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(play, oracle, family):
    prompt = text(60)
    want = oracle(family).logits(prompt)
    with play() as player:
        start = 0
        for size in (9, 1, 14, 2, 1, 33):
            got = player.feed(prompt[start : start + size], rows="all")
            assert_close(got, want[start : start + size])
            start += size


@every_cache
def test_32_decode_steps_choose_the_same_tokens(play, oracle, family):
    prompt = text(11)
    want_tokens, want = oracle(family).greedy(prompt, 32)
    with play() as player:
        tokens, got = player.greedy(player.feed(prompt), 32)
    assert tokens == want_tokens
    assert_close(got, want)


@caches_of_many
def test_three_sequences_in_flat_batches_do_not_see_each_other(play, oracle, family):
    prompts = [text(5, seed=1), text(21, seed=2), text(12, seed=3)]
    wants = [oracle(family).greedy(prompt, 14) for prompt in prompts]
    tokens: list[list[int]] = [[], [], []]
    with play() as player:
        # 0 and 1 token by token in turns, then the rest of 1 in one piece, then 2 in two.
        mixed = [(s, prompts[s][i]) for i in range(5) for s in (0, 1)]
        got = player.batch(mixed, rows=[8])
        assert_close(got, oracle(family).logits(prompts[0])[-1:])
        tokens[0].append(int(got[0].argmax()))
        batch = [(1, t) for t in prompts[1][5:]] + [(2, t) for t in prompts[2][:7]]
        got = player.batch([(0, tokens[0][-1]), *batch], rows=[0, 16])
        tokens[0].append(int(got[0].argmax()))
        tokens[1].append(int(got[1].argmax()))
        batch = [(2, t) for t in prompts[2][7:]]
        got = player.batch([*batch, (1, tokens[1][-1]), (0, tokens[0][-1])], rows=[4, 5, 6])
        for seq_id, row in zip((2, 1, 0), got, strict=True):
            tokens[seq_id].append(int(row.argmax()))
        order = [1, 2, 0]
        while min(map(len, tokens)) < 14:
            order = order[1:] + order[:1]
            got = player.batch([(s, tokens[s][-1]) for s in order], rows="all")
            for seq_id, row in zip(order, got, strict=True):
                at = len(tokens[seq_id])
                if at < 14:
                    assert_close(row, wants[seq_id][1][at])
                tokens[seq_id].append(int(row.argmax()))
    for got_tokens, (want_tokens, _) in zip(tokens, wants, strict=True):
        assert got_tokens[:14] == want_tokens


@caches_of_many
def test_a_fork_shares_its_trunk_and_then_goes_its_own_way(play, oracle, family):
    trunk = text(26, seed=4)
    left, right = text(9, seed=5), text(9, seed=6)
    with play() as player:
        player.feed(trunk)
        player.cache.seq_cp(0, 1)
        for start in (0, 4):
            stop = start + 4 if not start else 9
            got = player.batch(
                [(0, t) for t in left[start:stop]] + [(1, t) for t in right[start:stop]],
                rows="all",
            )
            n = stop - start
            at = slice(26 + start, 26 + stop)
            assert_close(got[:n], oracle(family).logits(trunk + left)[at])
            assert_close(got[n:], oracle(family).logits(trunk + right)[at])
        player.cache.seq_rm(0)
        tokens, _ = player.greedy(got[-1:], 5, seq_id=1)
        assert tokens == oracle(family).greedy(trunk + right, 5)[0]


@every_cache
def test_after_a_rollback_the_same_text_comes_again_and_another_can(play, oracle, family):
    prompt = text(19, seed=7)
    want_tokens, want = oracle(family).greedy(prompt, 16)
    with play() as player:
        first, _ = player.greedy(player.feed(prompt), 16)
        player.cut(19 + 4)
        again, got = player.greedy(player.feed(first[4:5]), 11)
        assert first == want_tokens
        assert again == want_tokens[5:]
        assert_close(got, want[5:])
        player.cut(17)
        other = text(6, seed=8)
        got = player.feed(other, rows="all")
        assert_close(got, oracle(family).logits(prompt[:17] + other)[17:])


@every_cache
def test_a_window_that_has_wrapped_still_sees_what_it_should(play, oracle, family):
    prompt = text(50, seed=9)
    want_tokens, want = oracle(family).greedy(prompt, 40)
    with play(window_slack=2, min_chunk=4) as player:
        first = player.feed(prompt[:30], rows="all")
        assert_close(first, oracle(family).logits(prompt)[:30])
        tokens, got = player.greedy(player.feed(prompt[30:]), 40)
        assert tokens == want_tokens
        assert_close(got, want)
        for group in player.cache.usage().groups:
            assert group.window in (None, WINDOW)
            assert (group.live < 89) == (group.window is not None), "the window has moved on"


TREE = [-1, -1, 0, 0, 1, 2, 2]
"""::

    0 -- 2 -- 5
    |    `--- 6
    `--- 3
    1 -- 4
"""


@pytest.mark.parametrize("kind", ["tree"])
@pytest.mark.parametrize("length", [3, 31], ids=["short", "past the window"])
def test_a_tree_is_verified_and_its_chain_committed_as_if_decoded(play, oracle, family, length):
    prompt = text(length, seed=10)
    nodes = text(len(TREE) + 2, seed=11)
    with play(window_slack=2, min_chunk=4) as player:
        cache = player.cache
        player.feed(prompt)
        cache.propose(TREE)
        got = player.feed(nodes[:7], rows="all")
        for node, row in enumerate(got):
            assert_close(row, oracle(family).logits(prompt + chain(nodes, node))[-1])
        cache.propose([5, 7])  # a second frontier: 7 hangs off 5, 8 off 7
        got = player.feed(nodes[7:], rows="all")
        history = prompt + tuple(nodes[i] for i in (0, 2, 5, 7, 8))
        assert_close(got, oracle(family).logits(history)[-2:])
        cache.commit([0, 2, 5, 7])
        tokens, rows = player.greedy(player.feed([nodes[8]]), 6)
        want_tokens, want = oracle(family).greedy(history, 6)
        assert tokens == want_tokens
        assert_close(rows, want)


@pytest.mark.parametrize("kind", ["tree"])
def test_two_trees_and_a_plain_sequence_go_through_one_forward(play, oracle, family):
    prompts = [text(13, seed=s) for s in (12, 13, 14)]
    nodes = text(6, seed=15)
    with play() as player:
        cache = player.cache
        for seq_id, prompt in enumerate(prompts):
            player.feed(prompt, seq_id)
        cache.propose([-1, -1, 1], 0)
        cache.propose([-1, 0], 2)
        flat = [(0, nodes[0]), (0, nodes[1]), (0, nodes[2]), (1, nodes[3])]
        got = player.batch([*flat, (2, nodes[4]), (2, nodes[5])], rows="all")
        histories = [
            prompts[0] + nodes[:1],
            prompts[0] + nodes[1:2],
            prompts[0] + nodes[1:3],
            prompts[1] + nodes[3:4],
            prompts[2] + nodes[4:5],
            prompts[2] + nodes[4:6],
        ]
        for row, history in zip(got, histories, strict=True):
            assert_close(row, oracle(family).logits(history)[-1])
        cache.commit([1, 2], 0)
        cache.commit([], 2)
        for seq_id, history in ((0, histories[2]), (1, histories[3]), (2, prompts[2])):
            got = player.feed([99], seq_id)
            assert_close(got, oracle(family).logits((*history, 99))[-1:])


def chain(nodes: tuple[int, ...], node: int) -> tuple[int, ...]:
    """The tokens from the root of ``TREE`` down to a node."""
    path = []
    while node >= 0:
        path.append(nodes[node])
        node = TREE[node]
    return tuple(reversed(path))
