"""Pictures are encoded beside the steps of a card: in order, and while no graph is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch import loading  # noqa: E402
from kvcellar.backends.torch.gpu.record import capture  # noqa: E402
from kvcellar.backends.torch.gpu.record.graphs import StepGraphs  # noqa: E402
from kvcellar.backends.torch.gpu.transfer.side import SideStream  # noqa: E402
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.backends.torch.vision import reader as reading  # noqa: E402
from kvcellar.errors import DeviceMemoryError  # noqa: E402
from kvcellar.models import LoadedModel, load_model  # noqa: E402
from tests.backends.gpu.fake_device import FakeDevice  # noqa: E402
from tests.backends.gpu.ordered import OrderedCard  # noqa: E402
from tests.backends.gpu.test_graphs import both, prompt, small_tiles  # noqa: E402
from tests.models.picture_players import ONE, TWO, Own, Player  # noqa: E402
from tests.vision_checkpoints import make_vision_checkpoint  # noqa: E402

CPU = torch.device("cpu")
PATIENCE_S = 60.0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_tiles(monkeypatch):
        yield


@pytest.fixture(scope="module")
def own(tmp_path_factory: Any) -> Own:
    folder = make_vision_checkpoint(tmp_path_factory.mktemp("vision"), "qwen3_vl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_prove", lambda *_: None)  # others do
        model = load_model(folder, weights="none")
    assert model.pictures is not None, model.no_pictures
    return Own(model, None, None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> LoadedModel:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    folder = write_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1, **heads)
    return load_model(folder)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> OrderedCard:
    made = OrderedCard()
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: made.record_stream(tensor, stream)
    )
    return made


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """The thread of pictures."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def played(made: Own, pool: ThreadPoolExecutor | None) -> list[Any]:
    """Logits of two sequences that read the same pictures, one behind the other."""
    tokens, config = made.history("a IMG b IMG c", TWO), kv.make_config(made.model.params, 512)
    with kv.make_seq_session("torch", config) as session:
        play = Player(made, session)
        for picture in TWO:
            if pool is not None:
                play.encoded[picture.name] = pool.submit(made.reader.encode, picture).result()
        return [play.feed((seq, tokens, len(tokens), TWO))[0] for seq in (0, 1)]


def on_card(made: Own, card: OrderedCard, monkeypatch: Any, pool: ThreadPoolExecutor) -> list[Any]:
    """Logits as of ``played``; the vision part has a stream, and its weights came before."""
    monkeypatch.setattr(made.reader, "_side", SideStream(CPU, card))
    monkeypatch.setattr(made.reader, "_part", None)
    with card.stream(card.steps):
        made.reader.load()
        return played(made, pool)


def test_steps_read_rows_behind_the_event_of_their_encoding(
    own: Own, card: OrderedCard, beside: Any, monkeypatch: Any
) -> None:
    wanted = played(own, None)
    found = on_card(own, card, monkeypatch, beside)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not card.faults
    assert card.crossed["steps", "side"] >= 4  # two pictures in two sequences
    assert card.crossed["side", "steps"]  # weights
    assert len(card.waited) == 2 and threading.current_thread() not in card.waited


@pytest.mark.parametrize(
    ("taken_out", "fault"),
    [
        ("make_wait", "in steps reads what side may not be"),
        ("wait", "in side reads what steps may not be"),
        ("lend", "in steps reads memory that may be freed"),
    ],
)
def test_each_wait_that_is_taken_out_is_noticed(
    taken_out: str, fault: str, own: Own, card: OrderedCard, beside: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(SideStream, taken_out, lambda *_: None)
    on_card(own, card, monkeypatch, beside)
    assert any(fault in one for one in card.faults)


class Held:
    """A vision part that is held up in the middle of a picture."""

    def __init__(self, reader: Any, monkeypatch: Any) -> None:
        self.is_within, self.may_go = threading.Event(), threading.Event()
        run = reading.run

        def held(*given: Any) -> Any:
            self.is_within.set()
            assert self.may_go.wait(PATIENCE_S)
            return run(*given)

        monkeypatch.setattr(reading, "run", held)


def test_no_graph_is_recorded_while_a_picture_is_encoded_and_no_step_waits(
    own: Own, card: OrderedCard, beside: Any, monkeypatch: Any, llama: LoadedModel, small: None
) -> None:
    reader = own.reader
    monkeypatch.setattr(reader, "_side", SideStream(CPU, card))
    reader.load()
    held = Held(reader, monkeypatch)
    with both(llama) as pair:
        pair.step(prompt(20))
        pair.decode(1)
        encoding: Future[Any] = beside.submit(reader.encode, ONE[0])
        assert held.is_within.wait(PATIENCE_S)
        pair.decode(1, 3)
        assert (pair.device.n_captured, pair.graphs.is_off) == (0, False)
        held.may_go.set()
        encoding.result(PATIENCE_S)
        pair.decode(1, 2)
        assert (pair.device.n_captured, pair.device.n_played) == (1, 2)


def test_no_picture_is_encoded_while_a_graph_is_recorded(
    own: Own, card: OrderedCard, beside: Any, monkeypatch: Any, llama: LoadedModel, small: None
) -> None:
    reader = own.reader
    monkeypatch.setattr(reader, "_side", SideStream(CPU, card))
    reader.load()
    encodings: list[Future[Any]] = []

    class Device(FakeDevice):
        def capture(self, call: Any) -> Any:
            card.is_recording = True
            encodings.append(beside.submit(reader.encode, ONE[0]))
            with pytest.raises(TimeoutError):
                encodings[0].result(0.3)
            card.is_recording = False
            return super().capture(call)

    with both(llama) as pair:
        pair.device = Device()
        pair.graphs = pair.ours.runner.graphs = StepGraphs(pair.graphs._network, pair.device)
        pair.step(prompt(20))
        pair.decode(1, 3)
        assert pair.device.n_captured == 1
    assert len(encodings[0].result(PATIENCE_S).rows) and not card.faults


def test_a_picture_for_which_there_is_no_memory_ends_alone(
    own: Own, card: OrderedCard, monkeypatch: Any
) -> None:
    reader = own.reader
    monkeypatch.setattr(reader, "_side", SideStream(CPU, card))
    reader.load()

    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(reading, "run", short)
        with pytest.raises(DeviceMemoryError, match=r"a picture found no memory .* a smaller pic"):
            reader.encode(ONE[0])
    assert len(reader.encode(ONE[0]).rows)


def test_graphs_come_before_what_runs_beside_them(monkeypatch: Any) -> None:
    priorities: dict[str, int] = {}
    with monkeypatch.context() as patch:

        def graphs(device: Any, priority: int = 0) -> None:
            priorities["graphs"] = priority

        patch.setattr(torch.cuda, "Stream", graphs)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        capture.CudaGraphs(torch.device("cuda"))

    class Module:
        @staticmethod
        def Stream(device: Any, priority: int = 0) -> None:  # noqa: N802
            priorities["side"] = priority

    SideStream(CPU, Module)
    assert priorities["graphs"] < priorities["side"]  # the lower number comes first
