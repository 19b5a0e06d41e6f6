"""Checks of pictures: a wrapper's twin behind our caches, against the wrapper's own forward.

The vision part is transformers' own and runs as it is. What is ours is where its rows go, what
turns them and who sees whom; so the twin is given random rows in place of a vision part's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcellar.backends.host_memory import give_back
from kvcellar.backends.torch.bind.binding import bind_network
from kvcellar.backends.torch.bind.pictures import read_pictures
from kvcellar.backends.torch.cpu.hold import hold_mixers
from kvcellar.backends.torch.learn.checking import MOST_SLACK, SLACK
from kvcellar.backends.torch.learn.probe import learn_facts
from kvcellar.backends.torch.learn.shrink.checkpoints import (
    randomise,
    raw_of,
    start,
    started_network,
    twin_raw,
)
from kvcellar.backends.torch.load.networks import WrappedText, empty_networks, unforeseen
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.cache_config import make_config
from kvcellar.errors import KVCellarError, ModelError
from kvcellar.models.check import CAPACITY, TOLERANCE, gap_of, torch_versions, unit_of
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.configs import whole_config
from kvcellar.models.picture_facts import ALL, WINDOWS, PictureFacts, PictureVerdict
from kvcellar.models.runner import FloatArray
from kvcellar.models.seeing import EncodedPicture, SeenPicture, seeing
from kvcellar.models.text.tokenizer import quiet
from kvcellar.pictures.tokens import PlacedPicture
from kvcellar.registry import make_seq_session
from kvcellar.types import IntArray

_IMAGE = 260
"""Id of a twin's placeholder; other special tokens follow it."""

_GRIDS = ((3, 4), (4, 3), (2, 6))
"""Rows and columns of the pictures: as many tokens each, and more than a twin's window."""

_N_ROWS = 12

_SPREAD = 0.3
"""How far numbers of rows are from zero, as a twin's embeddings are."""

_TELLING = 100 * TOLERANCE
"""Least that other rows must move a logit behind them."""

_SEEDS = 3
"""Twins that are tried where one differs by so little that it may be rounding: in recurrent layers
a row that is near to nothing before it is made one of length one can amplify that by any factor."""

_MOST_SAID = 400
"""Letters of a reason."""


@dataclass(frozen=True, slots=True)
class _History:
    """A text with pictures.

    Attributes:
        ids: ``[n]``.
        pictures: where they stand.
        rows: of each, ``[n_rows, hidden_size]``.
        deep: of each, for the first layers.
    """

    ids: IntArray
    pictures: tuple[PlacedPicture, ...]
    rows: tuple[Tensor, ...]
    deep: tuple[tuple[Tensor, ...], ...]

    def seen(self, stop: int) -> list[SeenPicture]:
        """Return the pictures that begin before a position, as a runner takes them."""
        return [
            SeenPicture(placed, EncodedPicture(rows, deep, 0))
            for placed, rows, deep in zip(self.pictures, self.rows, self.deep, strict=True)
            if placed.start < stop
        ]


@dataclass(slots=True)
class _Twin:
    """A wrapper's twin, twice.

    Attributes:
        whole: the wrapper without its towers, with eager attention.
        theirs: its text, in the wrapper.
        ours: the same text on the op.
        facts: of the text.
        pictures: how it places pictures.
    """

    whole: Any
    theirs: Any
    ours: Any
    facts: ModelFacts
    pictures: PictureFacts


def check_pictures(raw: Mapping[str, Any], tolerance: float = TOLERANCE) -> PictureVerdict:
    """Compare pictures of a model behind our caches with its own code, on its twin.

    Args:
        raw: its ``config.json``.
        tolerance: most that a logit may differ: as of its text.
    """
    reason, facts, allowed = "", None, tolerance
    differences: dict[str, float] = {}
    try:
        with quiet(lambda part: None):
            for seed in range(_SEEDS):
                twin = _twin(raw, seed)
                facts, differences = _compare(twin, tolerance)
                allowed = _allowed(twin, differences, tolerance)
                worst = max(differences.values())
                if worst <= allowed or worst > _TELLING:
                    break
    except Exception as error:  # whatever transformers' own code does not like
        if not isinstance(error, KVCellarError):
            error = unforeseen(raw.get("model_type"), "a few pictures were compared", error)
        reason = " ".join(str(error).split())[:_MOST_SAID]
    give_back()
    return PictureVerdict(facts, differences, allowed, reason, torch_versions())


def _twin(raw: Mapping[str, Any], seed: int) -> _Twin:
    """Make the twin of a wrapper, with random weights of a seed.

    Raises:
        ModelError: there is none.
    """
    try:
        small = _with_low_ids(twin_raw(raw))
        facts = learn_facts(small)
    except ModelError:  # some sizes belong to heads, and are nowhere in the config
        small = _with_low_ids(twin_raw(raw, keeps_dims=True))
        facts = learn_facts(small)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        whole, theirs = empty_networks(small, attention="eager")
        start(whole)
    randomise(whole.eval(), seed)
    ours = started_network(small)
    ours.load_state_dict(theirs.state_dict())
    bind_network(ours, facts)
    hold_mixers(ours)
    vision = getattr(whole.config, "vision_config", None)
    n_deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    n_deep = min(n_deep, facts.n_layers)
    read_pictures(ours, n_deep)
    return _Twin(whole, theirs, ours, facts, PictureFacts(n_deep=n_deep))


def _with_low_ids(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wrapper's config whose special tokens are in a twin's vocabulary."""
    config = whole_config(raw)
    names = [name for name in config.to_dict() if name.endswith(("_token_id", "_token_index"))]
    aliases = {value: key for key, value in config.attribute_map.items()}
    names = [name for name in names if getattr(config, name) is not None]
    others = [name for name in names if not name.startswith("image_token")]
    for number, name in enumerate(others, _IMAGE + 1):
        setattr(config, aliases.get(name, name), number)
    config.image_token_id = _IMAGE
    return {**raw_of(config), **{key: raw[key] for key in ("architectures",) if key in raw}}


def _arguments(whole: Any) -> set[str]:
    """Return the names that a wrapper's forward takes, or that of the model in it."""
    inner = getattr(whole, "model", whole)
    return {*inspect.signature(whole.forward).parameters} | {
        *inspect.signature(inner.forward).parameters
    }


def _histories(twin: _Twin) -> tuple[_History, _History, _History]:
    """Return a history with two pictures between text, one that begins with one, and one without.

    The last one has the text of the first.
    """
    between = _history(twin, (9, 5, 30), (0, 1))
    first = _history(twin, (1, 2, 3, 12), (2, 0, 1))
    return between, first, _history(twin, (40,), ())


def _history(twin: _Twin, texts: Sequence[int], grids: Sequence[int]) -> _History:
    """Return a history of texts of these lengths with pictures of these grids between them."""
    random = np.random.default_rng(len(texts))
    parts: list[IntArray] = []
    placed: list[PlacedPicture] = []
    for n, grid in zip(texts, [*grids, None], strict=True):
        parts.append(random.integers(0, 250, n))
        if grid is not None:
            begin = sum(map(len, parts))
            places = np.arange(begin, begin + _N_ROWS)
            placed.append(PlacedPicture(f"{grid:021x}", places, _GRIDS[grid]))
            parts.append(np.full(_N_ROWS, _IMAGE))
    width = int(twin.ours.config.hidden_size)
    generator = torch.Generator().manual_seed(len(texts))

    def rows() -> Tensor:
        return _SPREAD * torch.randn(_N_ROWS, width, generator=generator)

    of_each = tuple(rows() for _ in placed)
    deep = tuple(tuple(rows() for _ in range(twin.pictures.n_deep)) for _ in placed)
    return _History(np.concatenate(parts), tuple(placed), of_each, deep)


def _own_logits(twin: _Twin, history: _History) -> FloatArray:
    """Return a history's logits ``[n, vocab_size]`` by the wrapper's own forward."""
    kinds = torch.from_numpy((history.ids == _IMAGE).astype(np.int64))[None]
    vision = getattr(twin.whole.config, "vision_config", None)
    merge = int(getattr(vision, "spatial_merge_size", 1))
    sizes = [(1, h * merge, w * merge) for h, w in (one.grid for one in history.pictures)]
    given: dict[str, Any] = {"token_type_ids": kinds, "mm_token_type_ids": kinds}
    if sizes:
        given["image_grid_thw"] = torch.tensor(sizes)
    taken = _arguments(twin.whole)
    given = {name: value for name, value in given.items() if name in taken}
    forms: list[Any] = [list(history.rows)]
    if history.rows:
        forms.append(torch.stack(history.rows))
    deep = [list(layer) for layer in zip(*history.deep, strict=True)]
    error: Exception | None = None
    for form in forms:
        said = SimpleNamespace(pooler_output=form, deepstack_features=deep, last_hidden_state=form)
        images = {"mm_encoder_outputs": {"image": said}} if history.rows else {}
        try:
            return _logits(twin, torch.from_numpy(history.ids)[None], {**given, **images})
        except (AttributeError, TypeError) as what:  # it takes rows in another form
            error = what
    assert error is not None, "it ended with one"
    raise error


def _logits(twin: _Twin, ids: Tensor, given: Mapping[str, Any]) -> FloatArray:
    """Return logits by a wrapper's forward, from its states on by what runs its text.

    Some wrappers leave out what their language model's own class does to logits.
    """
    theirs = twin.theirs
    said: list[Any] = []
    with torch.inference_mode():
        hook = theirs.base_model.register_forward_hook(lambda *call: said.append(call[2]))
        try:
            found = twin.whole(input_ids=ids, use_cache=False, **given)
        finally:
            hook.remove()
        if theirs is not twin.whole and not isinstance(theirs, WrappedText):
            hook = theirs.base_model.register_forward_hook(lambda *call: said[0])
            try:
                found = theirs(input_ids=ids, use_cache=False)
            finally:
                hook.remove()
    logits: FloatArray = found.logits[0].float().numpy()
    return logits


def _compare(twin: _Twin, tolerance: float) -> tuple[PictureFacts, dict[str, float]]:
    """Find how a model places pictures; return it with the differences of all ways of tokens.

    Where no way of placing them gives its logits, the nearest one's are returned.

    Raises:
        ModelError: pictures hardly change what it says.
    """
    histories = _histories(twin)
    want = [_own_logits(twin, history) for history in histories]
    unit = max(map(unit_of, want))
    two = histories[0]
    _check_telling(twin, two, want[0], unit)
    gaps: dict[PictureFacts, float] = {}
    for guess in _guesses(twin):
        twin.pictures = guess
        gaps[guess] = next(gap for _, gap in _plays(twin, histories, want, unit))
        if gaps[guess] <= tolerance:
            break
    twin.pictures = min(gaps, key=lambda guess: gaps[guess])
    if not gaps[twin.pictures] <= MOST_SLACK:
        return twin.pictures, {"prefill": gaps[twin.pictures]}
    found: dict[str, float] = {}
    for part, gap in _plays(twin, histories, want, unit):
        found[part] = max(found.get(part, 0.0), gap if np.isfinite(gap) else float("inf"))
    return twin.pictures, found


def _guesses(twin: _Twin) -> Iterator[PictureFacts]:
    """Yield ways in which a model may place pictures, the likeliest ones first."""
    has_windows = any(not group.is_full for group in twin.facts.params.groups)
    is_told = "image_grid_thw" in _arguments(twin.whole)
    for has_grid in (True, False) if is_told and _takes_parts(twin) else (False,):
        for both_ways in ("", ALL, *([WINDOWS] if has_windows else [])):
            yield replace(twin.pictures, has_grid=has_grid, both_ways=both_ways)


def _takes_parts(twin: _Twin) -> bool:
    """Return true if a network's layers are turned by positions of three parts."""
    at = torch.arange(3).expand(3, 1, 3)
    ids = torch.zeros((1, 3), dtype=torch.long)
    try:
        with torch.inference_mode():
            found = twin.theirs(input_ids=ids, position_ids=at, use_cache=False).logits
    except Exception:  # they have another shape than it knows
        return False
    return bool(found.shape[0] == 1)


def _allowed(twin: _Twin, differences: Mapping[str, float], tolerance: float) -> float:
    """Return how much a logit may differ: more where float32 itself is further from float64.

    The wrapper is made float64, so this comes last.
    """
    found = max(differences.values())
    if not tolerance < found <= MOST_SLACK:
        return tolerance
    two, first, _ = _histories(twin)
    rounded = [_own_logits(twin, history) for history in (two, first)]
    try:
        twin.whole.double().set_experts_implementation("eager")  # torch's groups have no float64
        exact = [_own_logits(twin, history) for history in (two, first)]
    except Exception:  # not every model's code runs in it
        return tolerance
    noise = max(gap_of(a, b, unit_of(a)) for a, b in zip(rounded, exact, strict=True))
    return max(tolerance, min(SLACK * noise, MOST_SLACK))


def _check_telling(twin: _Twin, history: _History, want: FloatArray, unit: float) -> None:
    """Make sure that logits would tell if a picture's rows were not read.

    Raises:
        ModelError: they hardly would.
    """
    other = replace(history, rows=tuple(one.flip(0) for one in history.rows))
    behind = history.pictures[0].stop
    moved = gap_of(_own_logits(twin, other)[behind:], want[behind:], unit)
    if not moved >= _TELLING:
        raise ModelError(
            f"the model's own logits say too little of a picture: another one moves them by "
            f"{moved:.1e}, and it must be {_TELLING:.0e} for a check to mean anything"
        )


class _Player:
    """A session of many sequences and a runner on it, fed with histories."""

    def __init__(self, twin: _Twin, session: Any) -> None:
        """Start with an empty cache."""
        length = twin.facts.rope.length_for(CAPACITY)
        self.cache = session.cache
        self._runner = TorchRunner(
            twin.ours,
            None,
            twin.facts.params,
            twin.facts.vocab_size,
            session,
            rope_length=length,
            rope_border=twin.facts.rope.border_in(length),
            pictures=twin.pictures,
        )
        self.at: dict[int, int] = {}

    def feed(self, *stretches: tuple[int, _History, int]) -> list[FloatArray]:
        """Run the next tokens of some sequences, up to a position each; return their logits."""
        counts = {seq: stop - self.at.get(seq, 0) for seq, _, stop in stretches}
        seen = [(history.seen(stop), counts[seq]) for seq, history, stop in stretches]
        ids = np.concatenate([h.ids[self.at.get(s, 0) : stop] for s, h, stop in stretches])
        positions = self.cache.begin_step(list(counts.items()))
        with seeing(self._runner, seen):
            logits = self._runner.forward(ids, positions, rows=range(len(ids)))
        self.at |= {seq: stop for seq, _, stop in stretches}
        return np.split(logits, np.cumsum(list(counts.values()))[:-1])

    def cut(self, seq: int, history: _History, length: int) -> None:
        """Cut a sequence back, out of pictures that must be whole."""
        at = self.cache.seq_rm(seq, length)
        while self._runner.is_whole and (within := _within(history, at)) is not None:
            at = self.cache.seq_rm(seq, within.start)
        self.at[seq] = at


def _plays(
    twin: _Twin, histories: Sequence[_History], want: Sequence[FloatArray], unit: float
) -> Iterator[tuple[str, float]]:
    """Yield (way in which tokens came, how far logits were off), of the whole text first."""
    two, first, text = histories
    n = len(two.ids)
    behind = two.pictures[1].stop
    cuts = [4, *_inside(twin, two), behind, behind + 3, n]
    config = make_config(twin.facts.params, CAPACITY)
    with make_seq_session("torch", config) as session:
        player = _Player(twin, session)

        def gap(part: FloatArray, of: int, at: int) -> float:
            return gap_of(part, want[of][at : at + len(part)], unit)

        yield "prefill", gap(player.feed((0, two, n))[0], 0, 0)
        for stop in cuts:
            at = player.at.get(1, 0)
            yield "chunks", gap(player.feed((1, two, stop))[0], 0, at)
        player.cache.seq_rm(1, 0)
        player.feed((2, two, behind))
        player.cache.seq_cp(2, 3)
        player.at[3] = behind
        for stop in range(behind + 1, behind + 6):
            yield "decode", gap(player.feed((2, two, stop))[0], 0, stop - 1)
        yield "fork", gap(player.feed((3, two, n))[0], 0, behind)
        for length in (behind + 2, two.pictures[1].start, two.pictures[0].start - 1):
            player.cut(0, two, length)
            at = player.at[0]
            yield "rewind", gap(player.feed((0, two, n))[0], 0, at)
        for seq in (0, 2, 3):
            player.cache.seq_rm(seq, 0)
        player.at.clear()
        stretches = [(0, text, 20), (1, two, behind), (2, first, first.pictures[2].stop)]
        ends = [len(one.ids) for one in (text, two, first)]
        for of, found in enumerate(player.feed(*stretches)):
            yield "batch", gap(found, (2, 0, 1)[of], 0)
        for step in range(1, 4):
            now = [(seq, history, stop + step) for seq, history, stop in stretches]
            for of, found in enumerate(player.feed(*now)):
                yield "batch", gap(found, (2, 0, 1)[of], now[of][2] - 1)
        assert all(now[i][2] <= ends[i] for i in range(3))


def _within(history: _History, length: int) -> PlacedPicture | None:
    """Return the picture in whose middle a length is, if there is one."""
    return next((one for one in history.pictures if one.start < length < one.stop), None)


def _inside(twin: _Twin, history: _History) -> list[int]:
    """Return positions at which a text is cut: within its pictures where that may be."""
    a, b = history.pictures
    return [a.stop, b.start] if twin.pictures.is_whole else [a.start + 5, a.stop - 1, b.start + 1]
