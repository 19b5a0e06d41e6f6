"""A model without a tensor: its logits are a hash of the history that the cache shows it.

The caches are the bookkeeping alone, with one token instead of K and V in each cell. A wrong cell,
a wrong mask or a wrong position anywhere changes the history and with it every later token. A
recurrent layer has a running hash, and its last tokens, for a state: a wrong slot, or one that was
moved on by tokens that do not count, changes every later token too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvcellar.bookkeeping import OneSequence, Sequences, TreeSequences
from kvcellar.cache_config import make_config
from kvcellar.engine.speculate import Draft, DraftRequest
from kvcellar.history import History
from kvcellar.registry import CacheSession
from kvcellar.states import NO_SLOT, StateGroup, StateShape
from kvcellar.types import AttendKind, AttendSpec, LayerGroup, ModelCacheParams

WINDOW = 5
PARAMS = ModelCacheParams(
    n_layers=2,
    n_kv_heads=1,
    head_dim=4,
    groups=(LayerGroup((0,), 1, 4, 4), LayerGroup((1,), 1, 4, 4, window=WINDOW)),
)
"""One layer sees all of the history and one a window of it."""

CHUNK_PARAMS = ModelCacheParams(
    n_layers=3,
    groups=(LayerGroup((0,), 1, 4, 4), LayerGroup((1,), 2, 4, 4, chunk=6)),
    shared=((2, 1),),
)
"""One layer sees all of the history, and two the same chunk of it."""

FULL_PARAMS = ModelCacheParams(n_layers=2, n_kv_heads=1, head_dim=4)
"""All layers see all of the history."""

STATES = StateGroup(
    (
        (StateShape("convolution", (1, 3)), StateShape("recurrent", (2,))),
        (StateShape("recurrent", (2,)),),
    )
)
STATE_PARAMS = ModelCacheParams(n_layers=1, groups=(LayerGroup((0,), 1, 4, 4),), state=STATES)
"""One layer sees all of the history, and two are recurrent."""

MIXED_PARAMS = ModelCacheParams(n_layers=2, groups=PARAMS.groups, state=STATES)
"""One layer sees all of the history, one a window of it, and two are recurrent."""


class _Tokens:
    """What a backend adds to the bookkeeping: here, one token per cell and layer group."""

    size_bytes = 0

    def __init__(self, config: Any) -> None:
        n_cells = 4 * config.capacity + 64
        self.stored = [np.full(n_cells, -1) for _ in config.params.groups]
        layers = () if config.params.state is None else config.params.state.layers
        self.states = [
            [np.full((config.n_slots, *s.shape), np.nan, np.float32) for s in states]
            for states in layers
        ]

    def read_states(self, slots: Any) -> list[list[np.ndarray]]:
        return [[state[slots] for state in states] for states in self.states]

    def write_states(self, slots: Any, states: Any) -> None:
        for layer, new in zip(self.states, states, strict=True):
            for state, numbers in zip(layer, new, strict=True):
                state[slots] = numbers

    def move_cells(self, group: int, base: int, src_cells: Any) -> None:
        self.stored[group][base : base + len(src_cells)] = self.stored[group][src_cells].copy()


class ContiguousCells(OneSequence):
    def __init__(self, config: Any) -> None:
        tokens = _Tokens(config)
        super().__init__(config, tokens)
        self.stored, self.tokens = tokens.stored, tokens


class SeqCells(Sequences):
    def __init__(self, config: Any) -> None:
        tokens = _Tokens(config)
        super().__init__(config, tokens)
        self.stored, self.tokens = tokens.stored, tokens


class TreeCells(TreeSequences):
    def __init__(self, config: Any, block_size: int = 1) -> None:
        tokens = _Tokens(config)
        super().__init__(config, tokens, block_size=block_size)
        self.stored, self.tokens = tokens.stored, tokens


class PagedCells(TreeCells):
    def __init__(self, config: Any) -> None:
        super().__init__(config, config.block_size)


KINDS: dict[str, Callable[[Any], Any]] = {
    "contiguous": ContiguousCells,
    "seq": SeqCells,
    "tree": TreeCells,
    "paged": PagedCells,
}


def make_cache(
    kind: str, capacity: int = 256, params: ModelCacheParams = PARAMS, **settings: Any
) -> Any:
    return KINDS[kind](make_config(params, capacity, min_chunk=16, **settings))


def make_session(kind: str, capacity: int = 256) -> CacheSession[Any]:
    return CacheSession(make_cache(kind, capacity), backend="fake")


def logits_of(history: Sequence[int], vocab_size: int, params: ModelCacheParams) -> np.ndarray:
    """The oracle: the logits after ``history``, from the tokens alone."""
    seen = [tuple(history[_first_seen(group, len(history) - 1) :]) for group in params.groups]
    if params.state is not None:
        states = NO_STATES
        for token in history:
            states = moved_on(states, int(token))
        seen += [states]
    return _hashed(seen, vocab_size)


NO_STATES = ((0,) * 3, (0, 0), (0, 0))
"""States before the first token: of a convolution the last tokens, of the others (hash, length)."""


def moved_on(states: Any, token: int) -> Any:
    """What the states are after one more token; all numbers are exact in float32."""
    last, (a, n), (b, _) = states
    a, b = (a * 31 + token + 1) % 16_000_057, (b * 17 + a % 1009 + last[0] + 5) % 16_000_033
    return ((*last[1:], token + 1), (a, n + 1), (b, n + 1))


def _first_seen(group: LayerGroup, position: int) -> int:
    if group.chunk is not None:
        return position // group.chunk * group.chunk
    return 0 if group.window is None else max(0, position - group.window + 1)


def _hashed(seen: Sequence[tuple[Any, ...]], vocab_size: int) -> np.ndarray:
    plain = [tuple(t if isinstance(t, tuple) else int(t) for t in tokens) for tokens in seen]
    seed = zlib.crc32(repr(plain).encode())
    return np.random.default_rng(seed).normal(0, 2, vocab_size).astype(np.float32)


def wanted(
    request_id: int, tokens: Iterable[int], limit: int, n_nodes: int = 0, min_reach: float = 0.0
) -> DraftRequest:
    """What a drafter is asked for a sequence of these tokens."""
    return DraftRequest(request_id, History(tokens), limit, n_nodes, min_reach)


class HashRunner:
    """A :class:`kvcellar.models.Runner` over one of the caches above."""

    def __init__(self, cache: Any, vocab_size: int) -> None:
        self.cache = cache
        self.params = cache.config.params
        self.vocab_size = vocab_size
        self.max_tokens_per_step = None
        self.forwards: list[list[int]] = []
        self.bias: dict[int, float] = {}
        self.fail_after: int | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(map(len, self.forwards))

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> np.ndarray:
        cache = self.cache
        if not cache.is_step_open:
            cache.end_step()  # the step before is no longer to be cancelled
        if self.fail_after is not None and len(self.forwards) >= self.fail_after:
            cache.cancel_step()
            raise RuntimeError("the machine is on fire")
        self.forwards.append(list(token_ids))
        histories: list[list[tuple[int, ...]]] = []
        for layer in range(cache.steps.n_layers):
            group = cache.steps.group_of(layer)
            plan = cache.steps.plan(layer, len(token_ids), positions)
            cells = cache.stored[group]
            if cache.steps.stores(layer):
                cells[plan.write_cells] = token_ids
            per_query: list[tuple[int, ...]] = []
            for read in plan.reads:
                per_query += _seen_by_queries(cells, read)
            histories.append(per_query)
            cache.steps.wrote(layer)
        wanted = [len(token_ids) - 1] if rows is None else list(rows)
        by_group = [histories[group.layers[0]] for group in self.params.groups]
        if self.params.state is not None:
            by_group.append(self._run_states(token_ids, positions))
        logits = np.empty((len(wanted), self.vocab_size), dtype=np.float32)
        for i, row in enumerate(wanted):
            logits[i] = self.logits_behind([seen[row] for seen in by_group])
        for token_id, extra in self.bias.items():
            logits[:, token_id] += extra
        return logits

    def logits_behind(self, seen: Sequence[tuple[Any, ...]]) -> np.ndarray:
        """The logits behind what each layer group shows, ``[vocab]``."""
        return _hashed(seen, self.vocab_size)

    def _run_states(self, token_ids: Sequence[int], positions: Sequence[int]) -> list[Any]:
        """Move the states on; return them behind every token."""
        steps, tokens = self.cache.steps, self.cache.tokens
        plans = [steps.plan_states(layer, len(token_ids), positions) for layer in range(2)]
        behind: list[Any] = [None] * len(token_ids)
        for q_start, n_tokens, src, dst in plans[0].advances:
            states = NO_STATES
            if src != NO_SLOT:
                (last, first), (second,) = tokens.read_states([src])
                states = tuple(tuple(map(int, x.ravel())) for x in (last, first, second))
            for q in range(q_start, q_start + n_tokens):
                states = behind[q] = moved_on(states, int(token_ids[q]))
            last, first, second = (np.array([x], np.float32) for x in states)
            tokens.write_states([dst], [[last[:, None], first], [second]])
        for layer in range(2):
            steps.wrote_states(layer)
        return behind


class TellingRunner(HashRunner):
    """Tells of every token: itself and its position."""

    n_features = 2

    def forward_with_features(
        self, token_ids: Sequence[int], positions: Sequence[int], rows: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        logits = self.forward(token_ids, positions, rows)
        return logits, np.stack((token_ids, positions), axis=1).astype(np.float32)


def _seen_by_queries(cells: np.ndarray, read: AttendSpec) -> list[tuple[int, ...]]:
    tokens = np.concatenate([cells[run.start : run.stop] for run in read.runs])
    seen = []
    for i in range(read.q_len):
        mask = np.ones(len(tokens), dtype=bool)
        if read.kind is AttendKind.CAUSAL:
            mask[len(tokens) - read.q_len + i + 1 :] = False
        elif read.kind is AttendKind.EXPLICIT:
            assert read.mask is not None
            mask[len(tokens) - read.mask.shape[1] :] = read.mask[i]
        seen.append(tuple(tokens[mask].tolist()))
    return seen


class GuessTrees:
    """A drafter that knows the model above: in most of its levels one of several guesses is right.

    With a seed it is the same for the same sequence, whatever else happens.
    """

    is_free = True

    def __init__(self, params: ModelCacheParams, vocab_size: int, seed: int = 0) -> None:
        self.params, self.vocab_size, self.seed = params, vocab_size, seed

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [self._tree(ask) for ask in asks]

    def ended(self, request_id: int) -> None:
        pass

    def _tree(self, ask: DraftRequest) -> Draft:
        rng = np.random.default_rng([self.seed, len(ask.tokens), ask.tokens[-1]])
        tokens: list[int] = []
        parents: list[int] = []
        level: list[tuple[int, list[int]]] = [(-1, [])]
        for _ in range(int(rng.integers(1, ask.limit + 1))):
            below: list[tuple[int, list[int]]] = []
            for parent, path in level:
                found = rng.choice(self.vocab_size, int(rng.integers(1, 4)), replace=False).tolist()
                right = logits_of([*ask.tokens, *path], self.vocab_size, self.params).argmax()
                if rng.random() < 0.8 and right not in found:
                    found[int(rng.integers(len(found)))] = int(right)
                for token in found:
                    if len(tokens) < max(ask.limit, ask.n_nodes):
                        below.append((len(tokens), [*path, token]))
                        tokens.append(token)
                        parents.append(parent)
            likely = [node for node, path in below if self._is_right(ask.tokens, path)]
            level = [b for b in below if b[0] in likely or rng.random() < 0.3]
        return Draft(tuple(tokens), "tree", tuple(parents))

    def _is_right(self, tokens: History, path: list[int]) -> bool:
        before = [*tokens, *path[:-1]]
        return bool(logits_of(before, self.vocab_size, self.params).argmax() == path[-1])


class ByteTokenizer:
    """One token per byte, then the end token, then one token per role."""

    END = 256
    ROLES = ("system", "user", "assistant")
    vocab_size = 260
    bos_token_id = None

    def __init__(self) -> None:
        self.chat_template: str | None = "bytes"
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        ids: list[int] = []
        for part in _split(text):
            ids += [self._specials()[part]] if part in self._specials() else part.encode()
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        names = {token_id: name for name, token_id in self._specials().items()}
        out, raw = "", b""
        for token_id in token_ids:
            if token_id < 256:
                raw += bytes([token_id])
            elif not skip_special_tokens:
                out += raw.decode(errors="replace") + names[token_id]
                raw = b""
        return out + raw.decode(errors="replace")

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"<{m['role']}>{m['content'].strip()}<end>\n" for m in conversation)
        return text + ("<assistant>" if add_generation_prompt else "")

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)} | self._specials()

    def _specials(self) -> dict[str, int]:
        return {"<end>": self.END} | {f"<{role}>": 257 + i for i, role in enumerate(self.ROLES)}


def _split(text: str) -> list[str]:
    import re

    return [part for part in re.split(r"(<end>|<system>|<user>|<assistant>)", text) if part]
