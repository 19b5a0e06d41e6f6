"""Ways to multiply few rows: the quickest is chosen where a model is prepared, and kept."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch.cpu.modules.rotations import Rotation  # noqa: E402
from kvcellar.backends.torch.gpu.weights import layers, linears, multiply, ways  # noqa: E402
from kvcellar.backends.torch.gpu.weights.matrices import floats, packed  # noqa: E402
from kvcellar.backends.torch.gpu.weights.ways import PLAIN, SIZES, TILES, TORCH, KeptMeter, Way  # noqa: E402
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.engine import (  # noqa: E402
    Engine,
    EngineConfig,
    FinishEvent,
    Request,
    SamplingParams,
    first_use,
)
from kvcellar.models import load_model  # noqa: E402
from tests.backends.gpu.interpreter import device, hasten  # noqa: E402
from tests.card import stand_in  # noqa: E402

ALL = [PLAIN, *SIZES, Way(TILES), Way(TORCH)]
THREE = [PLAIN, Way(TILES), Way(TORCH)]

SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}

HAS_ALL = "KVCELLAR_ALL_CASES" in os.environ
"""True for a model whose products go each way: otherwise there is one of each kind."""


class Clock:
    """A timer that a test tells what each way takes, by its kind or, as the quickest, itself."""

    def __init__(self, quickest: Way | None = None, **times: float) -> None:
        self.quickest, self.times, self.n_asked = quickest, times, 0

    def __call__(self, call: Any) -> float:
        self.n_asked += 1
        way = call.args[0]
        return 0.1 if way == self.quickest else self.times[way.by]


def product(way: Way) -> Any:
    return torch.ones(2) * (1 + 0.001 * ALL.index(way))


def meter(path: Path, clock: Clock, card: str = "a card", made_with: str = "these") -> KeptMeter:
    return KeptMeter(path, card, made_with, clock)


def test_the_quickest_way_is_chosen_kept_and_found_without_measuring(tmp_path: Path) -> None:
    path, clock = tmp_path / "folder" / "file.json", Clock(programs=3.0, tiles=2.0, torch=1.0)
    first = meter(path, clock)
    assert [first.best("one", THREE, product), first.best("one", THREE, product)] == [
        Way(TORCH)
    ] * 2
    assert clock.n_asked == 3
    clock.times = {"programs": 1.0, "tiles": 1.0, "torch": 1.0}
    assert first.best("two", THREE, product) == PLAIN  # of equals the plain one
    first.save()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    again = meter(path, Clock())
    assert again.best("one", THREE, product) == Way(TORCH)
    assert again.best("two", THREE, product) == PLAIN
    assert again._timer.n_asked == 0  # type: ignore[attr-defined]


def test_a_way_that_fails_or_finds_something_else_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(way: Way) -> Any:
        if way == Way(TILES):
            raise RuntimeError("no kernel for this card")
        return torch.ones(2) * (3 if way == Way(TORCH) else 1)

    found = meter(tmp_path / "file", Clock(programs=9.0, tiles=1.0, torch=1.0))
    with caplog.at_level(logging.WARNING, "kvcellar.torch"):
        assert found.best("one", THREE, wrong) == PLAIN
    assert [record.message for record in caplog.records] == [
        "one by tiles is left out: no kernel for this card",
        "one by torch is left out: the result is another",
    ]


def test_nothing_is_kept_where_every_way_fails(tmp_path: Path) -> None:
    def fails(way: Way) -> Any:
        nonlocal n_tried
        n_tried += 1
        raise torch.OutOfMemoryError("no memory")

    n_tried, found = 0, meter(tmp_path / "file", Clock())
    for _ in range(2):
        assert found.best("one", THREE, fails) == PLAIN
    found.save()
    assert n_tried == 3 and not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"a card": 3}', '{"a card": {"made_with": "these", "ways": [1]}}',
             '{"a card": {"made_with": "these", "ways": {"one": "by hand"}}}',
             '{"a card": {"made_with": "these", "ways": {"one": ["tiles"]}}}', "\x00\xff"],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text, encoding="latin-1")
    clock = Clock(programs=3.0, tiles=1.0, torch=2.0)
    found = meter(path, clock)
    assert found.best("one", THREE, product) == Way(TILES) and clock.n_asked == 3
    found.save()
    assert json.loads(path.read_text())["a card"]["ways"]["one"] == "tiles"


def test_other_kernels_and_cards_are_measured_for_themselves(tmp_path: Path) -> None:
    path = tmp_path / "file"
    given = {"card": "another", "made_with": "these"}, {"card": "a card", "made_with": "those"}
    for i, one in enumerate([{}, *given]):
        clock = Clock(programs=3.0, tiles=1.0 + i, torch=2.0)
        found = meter(path, clock, **one)
        assert found.best("one", THREE, product).by == ("tiles" if i < 2 else "torch")
        assert clock.n_asked == 3
        found.save()
    assert meter(path, Clock(), **given[0]).best("one", THREE, product) == Way(TILES)
    assert meter(path, Clock(), **given[1]).best("one", THREE, product) == Way(TORCH)


def test_versions_and_sources_are_in_what_a_choice_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ways.SOURCES:
        (tmp_path / name).write_bytes((Path(ways.__file__).parent / name).read_bytes())
    own = ways._made_with()
    monkeypatch.setattr(ways, "__file__", str(tmp_path / "ways.py"))
    assert ways._made_with() == own and torch.__version__ in own
    (tmp_path / "products.py").write_text("changed")
    assert ways._made_with() != own


def test_a_card_s_clock_takes_the_median_of_calls_that_find_no_weights_in_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    class Event:
        made: ClassVar[list[Any]] = []

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.made.append(self)

        def record(self) -> None:
            told.append("event")

        def elapsed_time(self, end: Any) -> float:  # begins come first, then as many ends
            assert self.made.index(end) == self.made.index(self) + ways.ROUNDS
            return 100.0 if self is self.made[0] else float(self.made.index(self))

    class Stream:
        def synchronize(self) -> None:
            told.append("waited")

    class Cold:
        def zero_(self) -> None:
            told.append("cold")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append("ahead"))
    monkeypatch.setattr(torch, "empty", lambda *shape, **kinds: Cold())
    timer = ways.timer_of(torch.device("cuda", 0))
    assert timer is not None and ways.timer_of(torch.device("cpu")) is None
    assert timer(lambda: told.append("call")) == 8.0  # of 1 to 14, and 100
    each = ["cold", "event", "call", "event"] * ways.ROUNDS
    assert told == ["call"] * ways.WARM + ["ahead", *each, "waited"]


# Products ----------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hasten()
    monkeypatch.setattr(multiply, "OUTPUTS_AT_ONCE", 32)
    monkeypatch.setattr(multiply, "NUMBERS_AT_ONCE", 16 * 32)
    monkeypatch.setattr(multiply, "CHUNKS_AT_ONCE", 4)
    with np.errstate(all="ignore"):  # of a norm that is not there
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bits", [16, 8])
def test_every_way_finds_the_same_within_a_rounding(bits: int) -> None:
    here, generator = device(), torch.Generator().manual_seed(bits)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).half().to(here)

    n_q, n_k, dim = heads = 2, 1, 16
    n_out = (n_q + 2 * n_k) * dim
    weight = random(n_out, 128)
    matrix = floats(weight, here) if bits == 16 else packed(weight, bits, here)
    linear, norm = linears.CardLinear([matrix], random(n_out)), linears.CardNorm(random(128), 1e-5)
    rotation = Rotation(dim, False, "doubled", True, False)
    for n_rows in (1, 3):
        x, add, sides = (
            random(1, n_rows, 128),
            random(1, n_rows, n_out),
            (random(1, n_rows, dim),) * 2,
        )
        turn = multiply.HeadTurn(sides[0][0], sides[1][0], n_q + n_k, dim, False, 1)

        def after(joined: Any, sides: Any = sides) -> None:
            layers.turn(joined, rotation, sides, None, heads)

        products: list[Callable[[], Any]] = [
            lambda x=x: linear(x, norm=norm),
            lambda x=x, add=add: linear(x, add),
            lambda x=x: linear.gated(x, norm),
        ]
        if bits == 16:
            products.append(lambda x=x, turn=turn, after=after: linear.turned(x, norm, turn, after))
        for one in products:
            wanted, seen = None, set()
            for way in ALL if bits == 16 else ALL[:-1]:
                linear.ways.of = lambda asked, given, _, way=way, seen=seen: (
                    seen.update(given) or way
                )
                found = one()
                wanted = found if wanted is None else wanted
                apart = 2.0**-8 * float(wanted.abs().max())
                torch.testing.assert_close(found, wanted, rtol=0, atol=apart)
            every = set(ALL) if n_rows == 1 else set(THREE)
            assert seen == (every if bits == 16 else every - {Way(TORCH)})


@pytest.mark.usefixtures("small")
def test_numbers_of_32_bits_go_one_way() -> None:
    linear = linears.CardLinear([floats(torch.ones(4, 32), device())], None)
    linear.ways.of = lambda asked, given, _: seen.extend(given) or PLAIN
    seen: list[Way] = []
    linear(torch.ones(1, 32, device=device()))
    assert seen == [PLAIN]


# A model -----------------------------------------------------------------------------------------


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A CPU stands in for a card; the folder of what is compiled is a new one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    stand_in(monkeypatch)
    monkeypatch.setattr(first_use, "_settings", lambda n_rows: [])  # long, and no product
    write_tiny("llama", tmp_path / "model", **SHAPE)
    yield tmp_path / "model"


def answers(folder: Path, clock: Clock, *, is_prepared: bool = True) -> tuple[Any, Any, Any]:
    """Return what is answered, and the ways before that and behind it."""
    model: Any = load_model(folder, weights="bf16", dtype="bfloat16", is_unchecked=True)
    config = kv.make_config(model.params, 64)
    bounds = EngineConfig(max_num_batched_tokens=2, max_num_seqs=1)
    with pytest.MonkeyPatch.context() as patch, kv.make_seq_session("torch", config) as session:
        patch.setattr(ways, "timer_of", lambda device: clock)
        engine = Engine(model.bind(session), session.cache, config=bounds)
        if is_prepared:
            engine.prepare(lambda part, what: None)
        before, n_asked = ways.chosen_of(model.network), clock.n_asked
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.submit(Request([3, 4, 5], params))
        told: list[FinishEvent] = []
        while not engine.is_idle:
            told += [event for event in engine.step() if isinstance(event, FinishEvent)]
        assert [event.error for event in told] == [None] and clock.n_asked == n_asked
        after = ways.chosen_of(model.network)
        if not is_prepared:
            engine.prepare(lambda part, what: None)
            assert after.items() <= ways.chosen_of(model.network).items()
        return told[0].token_ids, before, after


@pytest.mark.slow
def test_an_engine_goes_the_quickest_way_from_its_preparing_on_and_says_the_same(
    card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "SIZES", SIZES[:1])
    times = {"programs": 2.0, "tiles": 2.0, "torch": 2.0}
    # What has run before it was measured goes on as it did.
    plain, nothing, own = answers(card, Clock(Way(TORCH), **times), is_prepared=False)
    assert nothing == {} and set(own.values()) == {PLAIN.name} and len(plain) == 3
    for way in (SIZES[0], Way(TORCH)) if not HAS_ALL else (SIZES[0], Way(TILES), Way(TORCH)):
        (Path(os.environ["TRITON_CACHE_DIR"]) / ways.FILE).unlink(missing_ok=True)
        clock = Clock(way, **times)
        found, before, after = answers(card, clock)
        assert found == plain and before == after
        by_rows = {n: {before[one] for one in before if one[0] == n} for n in "12"}
        assert by_rows == {"1": {way.name}, "2": {PLAIN.name if way.by == "programs" else way.name}}
    again = Clock()
    assert answers(card, again) == (found, before, after)
    assert again.n_asked == 0
