"""Every function takes no rows: a chunk of a prompt but the last wants no logits of the head."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeGuard

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import kvcellar as kv  # noqa: E402
from kvcellar.backends.host_rows import empty_rows  # noqa: E402
from kvcellar.backends.torch import gpu  # noqa: E402
from kvcellar.backends.torch.cache.state_pools import StatePools  # noqa: E402
from kvcellar.backends.torch.cpu.modules.rotations import Rotation  # noqa: E402
from kvcellar.backends.torch.gpu import choice  # noqa: E402
from kvcellar.backends.torch.gpu.attend import launch, lists, plans  # noqa: E402
from kvcellar.backends.torch.gpu.attend.following import Following  # noqa: E402
from kvcellar.backends.torch.gpu.attend.steps import GpuSteps  # noqa: E402
from kvcellar.backends.torch.gpu.record import recording  # noqa: E402
from kvcellar.backends.torch.gpu.record.capture import CudaGraphs  # noqa: E402
from kvcellar.backends.torch.gpu.record.graphs import StepGraphs  # noqa: E402
from kvcellar.backends.torch.gpu.sampler import sampling, settings  # noqa: E402
from kvcellar.backends.torch.gpu.sampler.logits import DeviceLogits  # noqa: E402
from kvcellar.backends.torch.gpu.transfer import rows, transfers  # noqa: E402
from kvcellar.backends.torch.gpu.transfer.side import SideStream  # noqa: E402
from kvcellar.backends.torch.gpu.transfer.transfers import transfers_on  # noqa: E402
from kvcellar.backends.torch.gpu.weights import layers, linears, matrices, multiply  # noqa: E402
from kvcellar.sight import Sight  # noqa: E402
from kvcellar.states import StateGroup, StateShape  # noqa: E402
from kvcellar.types import StepPlan  # noqa: E402
from tests.backends.gpu.interpreter import device, hasten  # noqa: E402

CARD = device()
N_IN, N_OUT = 64, 32
WHOLE = torch.empty((0,), dtype=torch.int64, device=CARD)


@pytest.fixture(autouse=True)
def interpreter() -> None:
    hasten()


def numbers(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=CARD)


CASES: dict[str, Callable[[], None]] = {}


def case(*of: Any) -> Callable[[Any], Any]:
    """Add a function to the cases, once for each of its arguments, or as it is."""

    def add(function: Any) -> Any:
        for one in of:
            CASES[f"{function.__name__}-{one}"] = partial(function, one)
        if not of:
            CASES[function.__name__] = function
        return function

    return add


@case(16, 8, 4)
def products(bits: int) -> None:
    weight = numbers(N_OUT, N_IN)
    matrix = (
        matrices.experts_on_card([weight.bfloat16()], 16, CARD)
        if bits == 16
        else matrices.packed(weight.cpu(), bits, CARD)
    )
    x, out = numbers(0, N_IN), numbers(0, 2 * N_OUT)[:, :N_OUT]
    assert multiply.multiply(matrix, x).shape == (0, N_OUT)
    assert multiply.multiply(matrix, x, numbers(N_OUT), numbers(0, N_OUT), out) is out
    assert multiply.multiply(matrix, x, is_gated=True).shape == (0, N_OUT // 2)
    norm = multiply.Norm(numbers(N_IN), 1e-5)
    assert multiply.multiply(matrix, x, norm=norm).shape == (0, N_OUT)
    assert multiply.take(matrix, WHOLE, torch.float32).shape == (0, N_IN)


@case(16, 8)
def experts(bits: int) -> None:
    up = matrices.experts_on_card(list(numbers(4, 2 * N_OUT, N_IN).bfloat16()), bits, CARD)
    down = matrices.experts_on_card(list(numbers(4, N_IN, N_OUT).bfloat16()), bits, CARD)
    order = multiply.sorted_rows(WHOLE, 4, numbers(0, N_IN))
    for sorted_rows in (None, order):
        got = multiply.multiply_chosen(up, numbers(0, N_IN), WHOLE, None, sorted_rows)
        assert got.shape == (0, 2 * N_OUT)
    mixture = linears.CardExperts((up, down), (None, None), linears.gate, None, is_silu=True)
    chosen = torch.empty((0, 2), dtype=torch.int64, device=CARD)
    assert mixture(numbers(0, N_IN), chosen, numbers(0, 2)).shape == (0, N_IN)


@case()
def layers_around_them() -> None:
    one = matrices.packed(numbers(N_OUT, N_IN).cpu(), 8, CARD)
    other = matrices.packed(numbers(N_OUT, N_IN).cpu(), 4, CARD)
    for parts in ([one], [one, one], [one, other]):
        linear = linears.CardLinear(parts, None)
        n_out = len(parts) * N_OUT
        norm = linears.CardNorm(numbers(N_IN), 1e-5)
        assert linear(numbers(1, 0, N_IN), norm=norm).shape == (1, 0, n_out)
        assert linear.gated(numbers(1, 0, N_IN), norm).shape == (1, 0, n_out // 2)
    assert norm(numbers(1, 0, 3, N_IN)).shape == (1, 0, 3, N_IN)
    assert linears.gate(numbers(0, 2 * N_OUT)).shape == (0, N_OUT)
    both = numbers(1, 0, 4 * 16)
    sides = numbers(1, 0, 16), numbers(1, 0, 16)
    down = linears.CardLinear([matrices.packed(numbers(N_IN, N_OUT).cpu(), 8, CARD)], None)
    for act in (None, torch.nn.SiLU()):
        mlp = layers.CardMlp(linears.CardLinear([one, one], None), down, act)
        assert mlp(numbers(1, 0, N_IN), numbers(1, 0, N_IN), norm).shape == (1, 0, N_IN)
    layers.turn(both, Rotation(16, False, "doubled", True, False), sides, None, (2, 1, 16))
    linear = linears.CardLinear([matrices.floats(numbers(4 * 16, N_IN), CARD)], None)
    turn = multiply.HeadTurn(sides[0][0], sides[1][0], 3, 16, False, 2)
    alone = linear.turned(numbers(1, 0, N_IN), norm, turn, pytest.fail)
    assert alone is not None and alone.shape == both.shape


@case()
def an_embedding() -> None:
    held = linears.CardLinear([matrices.packed(numbers(N_OUT, N_IN).cpu(), 8, CARD)], None)
    embedding = linears.CardEmbedding(held, torch.float32, numbers(1))
    assert embedding(WHOLE[None]).shape == (1, 0, N_IN)


@case()
def samples() -> None:
    logits = numbers(0, 9)
    likeliest = sampling.likeliest(logits, torch.zeros(0, dtype=torch.int32, device=CARD))
    assert likeliest.shape == (0, 2)
    assert sampling.scored(logits, WHOLE, 2).shape == (0, 3 + 2 * 2)
    assert sampling.sampled(logits, settings.sent([], 9, CARD), 2).shape == (0, 2)
    for found in (None, likeliest):
        kept = DeviceLogits(logits, found)
        assert kept.sample([]) == kept.score(0, np.empty(0, np.int64), 2) == []


@case()
def cells() -> None:
    params = kv.ModelCacheParams(1, groups=(kv.LayerGroup((0,), 2, 16, 16),))
    with kv.make_seq_session("torch", kv.make_config(params, 32)) as session:
        pools = session.cache.pools
        pools.place(CARD)
        (pool,) = pools.of_layer
        pool.ensure(8, CARD)
        placed = launch.pool_arguments(pool.placed())
        parts = [*pool.placed().k, *pool.placed().v]
        for part in parts:
            part.fill_(3)
        launch.move(placed, 4, WHOLE)
        moves, group = transfers_on(CARD), pools.groups[0]
        none = np.empty(0, np.int64)
        found = empty_rows(group, 0, pools.config.kv)
        assert moves.begin_read([pool], none, group, found) is None
        moves.write([pool], none, found, group, CARD)
        planes, buffer = rows.Planes(*transfers._parts([pool], found), CARD), WHOLE.byte()
        for chunk in planes.chunks(0, 64):
            for is_read in (True, False):
                planes.copy(chunk, WHOLE, buffer, is_read=is_read)
        assert all((part == 3).all() for part in parts)
        some = np.arange(2)
        arrival = moves.begin_read([pool], some, group, empty_rows(group, 2, pools.config.kv))
        moves.before_step(group.layers[0], no_tokens(), pool)
        arrival.wait()


@case()
def states() -> None:
    group = StateGroup(((StateShape("recurrent", (2, 3)),),))
    config = kv.make_config(kv.ModelCacheParams(1, 1, 16, state=group), 32, n_slots=4)
    pools, none = StatePools(group, config), np.empty(0, np.int64)
    pools.ensure(0, 4, CARD)
    (state,) = pools.of_layer[0]
    state.fill_(3)
    moves = transfers_on(CARD)
    found = moves.read_states(pools, none)
    assert [array.shape for layer in found for array in layer] == [(0, 2, 3)]
    moves.write_states(pools, none, found)
    assert (state == 3).all()


def no_tokens(n_cells: int = 8) -> StepPlan:
    return StepPlan(0, (), (), n_cells)


@case()
def plans_of_steps() -> None:
    tiling = plans.Tiling(2, 1, 16, 16, 16, 2, 2)
    assert lists.lists_of(no_tokens(), Sight()) == lists.idle_lists(0, 0) == []
    found = launch.compiled(no_tokens(), Sight(), tiling)
    assert np.array_equal(found.numbers, plans.pack(no_tokens(), [], tiling).numbers)
    following = Following()
    for _ in range(2):
        assert following.packed(no_tokens(), Sight(), tiling).form == found.form
    shape = recording.Shape(0, 0, 1, False, (), (found.form,))
    buffer = recording.joined(shape, *[np.empty(0, np.int64)] * 2, [], [found])
    recording.put_tokens(buffer, np.empty(0, np.int64))
    assert np.array_equal(buffer, found.numbers)
    assert set(launch.sections_of(found.form, torch.from_numpy(buffer))) == set(plans.SECTIONS)


@case()
def layers_of_steps() -> None:
    group = kv.LayerGroup((0,), 1, 16, 16)
    config = kv.make_config(kv.ModelCacheParams(1, groups=(group,)), 32)
    q, side = numbers(1, 2, 0, 16), numbers(1, 1, 0, 16)
    assert choice.takes(CARD, q) == choice.is_gpu(CARD)
    with kv.make_seq_session("torch", config) as session:
        session.cache.pools.place(CARD)
        (pool,) = session.cache.pools.of_layer
        pool.ensure(8, CARD)
        pool.placed().k[0].fill_(3)
        steps = GpuSteps()
        prepared = steps.prepare(0, 0, no_tokens(), group, pool, q)
        rest = side, side, 1.0, torch.float32, None, None
        assert steps.run(0, prepared, pool, q, *rest).shape == (1, 2, 0, 16)
        session.cache.on_gpu = steps
        planned = recording.PlannedForward(session.cache, [prepared], ())
        found = planned.update_and_attend(q, side, side, WHOLE, 0, 1.0, torch.float32)
        assert found.shape == (1, 2, 0, 16)
        planned.check()
        assert (pool.placed().k[0] == 3).all()


@case()
def copies() -> None:
    side = SideStream(CARD)
    with side.work():
        sent = side.sent(np.empty((0, 4), np.float32))
        assert sent.shape == (0, 4)
        done = side.mark()
    side.lend(done, [sent])
    side.lend(done, [])


@pytest.mark.parametrize("name", CASES)
def test_no_rows_are_taken(name: str) -> None:
    CASES[name]()


# Which functions there are ------------------------------------------------------------------------

OF_ROWS = re.compile(
    r"\b(Tensor|IntArray|Ints|Arrays|StepPlan|PackedPlan|PlanOnDevice|RowSampling|CellList)\b"
)
"""Types of arguments that may hold no rows."""

OTHERS = (
    # Of weights, which have rows whatever a step has.
    matrices.packed, matrices.floats, matrices.experts_on_card,
    # Of whole steps, which have a token: a cache begins no other.
    layers.CardAttention.forward, layers.CardAttention.attended, layers.CardLayer.forward,
    StepGraphs.run, StepGraphs.prepare, recording.PlannedForward.begin_states,
    # Of one row.
    settings.is_plain,
    # Needs CUDA.
    CudaGraphs.send,
)  # fmt: skip
"""Functions that are not tested here."""


def functions() -> Iterator[FunctionType]:
    """Public functions of the room with arguments of which there may be none."""
    for one in pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}."):
        module = importlib.import_module(one.name)
        public = [found for name, found in vars(module).items() if not name.startswith("_")]
        owners = [found for found in public if inspect.isclass(found)]
        for owner in (module, *owners):
            if getattr(owner, "_is_protocol", False):
                continue
            for name, found in vars(owner).items():
                if not name.startswith("_") and is_of_rows(found, module.__name__):
                    yield found


def is_of_rows(found: Any, module: str) -> TypeGuard[FunctionType]:
    if not isinstance(found, FunctionType) or found.__module__ != module:
        return False
    kinds = [str(kind) for name, kind in found.__annotations__.items() if name != "return"]
    return any(OF_ROWS.search(kind) for kind in kinds)


@contextmanager
def called() -> Iterator[set[CodeType]]:
    """Functions that are called with no rows."""
    seen: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and "/torch/gpu/" in code.co_filename and code not in seen:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(is_empty(frame.f_locals.get(name)) for name in names):
                seen.add(code)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def is_empty(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return 0 in value.shape
    if isinstance(value, StepPlan):
        return not value.n_tokens
    if isinstance(value, plans.PackedPlan):
        return is_empty(value.form)
    if isinstance(value, plans.PlanForm):
        return not value.sections[plans.SECTIONS.index("writes")]
    return isinstance(value, list | tuple) and (not value or any(map(is_empty, value)))


def test_no_function_is_left_out() -> None:
    with called() as seen:
        for run in CASES.values():
            run()
    left = [one for one in functions() if one.__code__ not in seen and one not in OTHERS]
    assert [one.__qualname__ for one in left] == []
    assert not {one.__code__ for one in OTHERS} & seen
