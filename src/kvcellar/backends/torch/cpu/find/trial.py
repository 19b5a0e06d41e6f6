"""A network run once for what its modules do, whatever its weights: every call is kept.

The copy that runs has the network's own modules and sizes. Its linear layers are stand-ins that mix
a few inputs into each output, so that a run costs next to nothing; all other weights are random.
Attention is recorded, and its results are random. Two modules that turn the same inputs into the
same outputs here compute the same: no number is zero, one, or small enough to hide a difference.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.bind.positions import Positions
from kvcellar.backends.torch.cpu.modules.mixtures import is_mixture
from kvcellar.registry import use_cache

IDS = (3, 1, 7, 5)
"""Tokens of a trial."""

POSITIONS = ((0, 5, 70_001, 300_002), (0, 5, 11, 13))
"""Where they are; what depends on a position must show. The second is for short tables."""

LONG_PAST = 300_000
"""Tokens that a cache of transformers says that it has, where a module asks one."""

_MOST_NUMBERS = 1 << 22
"""Most numbers of a module's own parameters for which random ones are made up."""

_MOST_TERMS = 16

_ROWS = 64
"""Rows of an embedding at most."""

_OTHERS = 1 / 20
"""Results that may be other ones in bfloat16: a sum taken in another order rounds otherwise."""


class LinearStandIn(nn.Module):
    """A linear layer's stand-in: each output is some of the inputs, times something."""

    def __init__(self, n_in: int, n_out: int, has_bias: bool, make: RandomTensors) -> None:
        """Make one of a layer's sizes; every input is read, where outputs are not too few."""
        super().__init__()
        self.in_features, self.out_features = n_in, n_out
        self.weight = nn.Parameter(torch.empty(0, dtype=make.dtype), requires_grad=False)
        outputs = torch.arange(n_out)
        n_terms = min(-(-n_in // n_out), _MOST_TERMS)
        self._inputs = [(outputs + term * n_out) % n_in for term in range(n_terms)]
        self._inputs.append(make.integers(n_in, n_out))
        self._factors = [make.factors(n_out) for _ in self._inputs]
        self.bias = make.numbers(n_out) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``[..., in_features] -> [..., out_features]``."""
        terms = zip(self._inputs, self._factors, strict=True)
        out = x.new_zeros((*x.shape[:-1], self.out_features))
        for inputs, factors in terms:
            out = out + x[..., inputs] * factors
        return out if self.bias is None else out + self.bias


class Mixes(nn.Module):
    """Stand-ins of linear layers whose outputs lie one behind the other."""

    def __init__(self, mixes: Sequence[nn.Module]) -> None:
        """Join some; they stay as they are."""
        super().__init__()
        self._mixes = list(mixes)

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``[..., in_features] -> [..., out_features]``."""
        return torch.cat([mix(x) for mix in self._mixes], -1)


class AnyExperts(nn.Module):
    """A stand-in of a mixture's experts, and of what has too many parameters of its own.

    It returns what it is given.
    """

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return x, somewhat smaller."""
        return x * 0.75


class RandomTensors:
    """Random numbers of one type, the same each time, that are neither zero nor one."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Begin anew."""
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(11)

    def numbers(self, *shape: int) -> Tensor:
        """Make parameters; of very many, some are the same."""
        n = 1
        for size in shape:
            n *= size
        if n > _MOST_NUMBERS and len(shape) == 2:
            line = torch.randn(shape[0] + shape[1], generator=self._generator, dtype=self.dtype)
            return line.as_strided(shape, (1, 1))
        there = torch.randn(shape, generator=self._generator) * 0.3
        return (there + there.sign() * 0.2).to(self.dtype)

    def factors(self, n: int) -> Tensor:
        """Make factors between 1/4 and 16, of either sign."""
        sizes = 2 ** (6 * torch.rand(n, generator=self._generator) - 2)
        signs = torch.rand(n, generator=self._generator).sub(0.5).sign()
        return (sizes * signs).to(self.dtype)

    def integers(self, stop: int, n: int) -> Tensor:
        """Make ``[n]`` integers below another."""
        return torch.randint(stop, (n,), generator=self._generator)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its arguments as they were before, and its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def first(self) -> Tensor | None:
        """Return the first tensor that it was given."""
        given = (*self.args, *self.kwargs.values())
        return next((one for one in given if isinstance(one, Tensor)), None)


@dataclass(frozen=True)
class Attended:
    """One call of the op: which module made it, with what, and its result."""

    module: str
    q: Tensor
    k: Tensor
    v: Tensor
    layer: int
    scale: float
    has_sinks: bool
    result: Tensor


@dataclass
class Recorder:
    """A cache, as the op sees one, that keeps what it is given and answers with random numbers."""

    seen: list[Attended] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    """Names of the modules that run, the innermost last."""

    def update_and_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Answer with numbers that depend on the layer alone."""
        generator = torch.Generator().manual_seed(layer_id)
        _, n_heads, n_tokens, _ = q.shape
        shape = (1, n_tokens, n_heads, v.shape[-1])  # lies as a cache's results do
        result = torch.randn(shape, generator=generator).to(out_dtype).transpose(1, 2)
        module = self.inside[-1] if self.inside else ""
        self.seen.append(
            Attended(
                module, q.clone(), k.clone(), v.clone(), layer_id, scale, sinks is not None, result
            )
        )
        return result


class LongPast:
    """A cache of transformers' kind that says that it holds many tokens and gives back none."""

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Return how many tokens there are."""
        return LONG_PAST

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return what is given."""
        return k, v


class Trial:
    """A network's copy and what it did.

    Attributes:
        network: the copy; its modules have the network's names.
        calls: by a module's name its calls, in their order.
        attended: calls of the op, in their order.
        result: what the network returned as logits, ``[1, T, n_vocab]``.
    """

    def __init__(self, network: Any, dtype: torch.dtype, is_linear: IsLinear) -> None:
        """Copy a network and run it.

        Args:
            network: of transformers, in evaluation mode; it stays as it is.
            dtype: of the copy's weights.
            is_linear: returns inputs, outputs and whether there is a bias for a module that is a
                linear layer, and None for others.

        Raises:
            Exception: whatever the network raises where it cannot be copied or run like this.
        """
        self.dtype = dtype
        self.network = _copied(network, RandomTensors(dtype), is_linear)
        self._modules = dict(self.network.named_modules())
        self._names = {id(module): name for name, module in self._modules.items()}
        self.calls: dict[str, list[ModuleCall]] = defaultdict(list)
        self.attended: list[Attended] = []
        for at, positions in enumerate(POSITIONS):
            try:
                self._run_recorded(positions)
                break
            except (IndexError, RuntimeError):
                if at + 1 == len(POSITIONS):
                    raise

    def _run_recorded(self, positions: Sequence[int]) -> None:
        recorder = Recorder()
        calls: dict[str, list[ModuleCall]] = defaultdict(list)
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.inside.append(self._names[id(module)])
            given.append((_kept(args), _kept(kwargs)))

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            calls[recorder.inside.pop()].append(ModuleCall(*given.pop(), _kept(result)))

        with ExitStack() as stack:
            for module in self.network.modules():
                hooks = (
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, with_kwargs=True),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            self.result = run(self.network, positions, recorder)
        self.positions = tuple(positions)
        self.calls, self.attended = calls, recorder.seen

    def within(self, name: str) -> list[Attended]:
        """Return the calls of the op that were made inside a module."""
        return [one for one in self.attended if f"{one.module}.".startswith(f"{name}.")]

    def module(self, name: str) -> nn.Module:
        """Return a module that ran, though another may be in its place by now."""
        found: nn.Module = self._modules[name]
        return found

    def agrees(self, name: str, candidate: Callable[..., Any]) -> bool:
        """Return true if a candidate does in all calls of a module what the module did."""
        recorder = Recorder()
        calls = self.calls[name]
        try:
            with recorded(recorder, self.positions):
                results = [candidate(*_kept(call.args), **_kept(call.kwargs)) for call in calls]
        except Exception:  # another signature, other shapes: whatever it is, it is not the same
            return False
        want = self.within(name)
        if len(recorder.seen) != len(want) or not calls:
            return False
        both = zip(recorder.seen, want, strict=True)
        return all(
            self.alike([a.q, a.k, a.v], [b.q, b.k, b.v])
            and (a.layer, a.scale, a.has_sinks) == (b.layer, b.scale, b.has_sinks)
            for a, b in both
        ) and self.alike(results, [call.result for call in calls])

    def alike(self, got: Any, want: Any) -> bool:
        """Return true if two results are the same but for rounding, and lie in the same shapes."""
        if isinstance(want, Tensor):
            return isinstance(got, Tensor) and _are_near(got, want, self.dtype)
        if isinstance(want, (tuple, list)):
            is_one = isinstance(got, (tuple, list)) and len(got) == len(want)
            return is_one and all(self.alike(a, b) for a, b in zip(got, want, strict=True))
        return bool(type(got) is type(want) and (want is None or got == want))


IsLinear = Callable[[nn.Module], tuple[int, int, bool] | None]


def run(network: Any, positions: Sequence[int], recorder: Recorder) -> Tensor:
    """Run a network on the trial's tokens and return its logits ``[1, T, n_vocab]``."""
    with recorded(recorder, positions):
        logits: Tensor = network(
            input_ids=torch.tensor([IDS]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=0,
        ).logits
    return logits


@contextmanager
def recorded(recorder: Recorder, positions: Sequence[int]) -> Iterator[None]:
    """Have attention recorded while a ``with`` lasts, and tell it where tokens are."""
    at = Positions(torch.tensor([positions]))
    with use_cache(recorder), torch.inference_mode(), at:  # type: ignore[arg-type]
        yield


def _copied(network: Any, make: RandomTensors, is_linear: IsLinear) -> nn.Module:
    """Copy a network with stand-ins in the place of its weights; buffers are shared."""
    memo: dict[int, Any] = {}
    for module in network.modules():
        found = is_linear(module)
        own = list(module.parameters(recurse=False))
        if found is not None:
            memo[id(module)] = LinearStandIn(*found, make).eval()
        elif is_mixture(module) or (
            any(p.dim() > 2 for p in own) and sum(p.numel() for p in own) > _MOST_NUMBERS
        ):
            memo[id(module)] = AnyExperts()
        elif isinstance(module, nn.Embedding):
            values = make.numbers(min(module.num_embeddings, _ROWS), module.embedding_dim)
            memo[id(module.weight)] = nn.Parameter(values, requires_grad=False)
    rest = (module for module in network.modules() if id(module) not in memo)
    for parameter in (one for module in rest for one in module.parameters(recurse=False)):
        if parameter.is_floating_point() and id(parameter) not in memo:
            values = make.numbers(*parameter.shape)
            memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for buffer in network.buffers():
        memo[id(buffer)] = buffer
    copied: nn.Module = copy.deepcopy(network, memo)
    for module in copied.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it may be behind the rows that are left
    return copied


def _kept(value: Any) -> Any:
    """Copy tensors, also those in tuples and dicts, since modules may write to what they have."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _kept(one) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_kept(one) for one in value)
    return value


def _are_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Compare within a few roundings of a number, or of a row's usual size.

    In a type of few bits nearly all have to be equal: numbers that are rounded elsewhere are not.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.is_floating_point():
        return torch.equal(got, want)
    n_other = int((got != want).sum())
    if dtype != torch.float32 and n_other > 1 + _OTHERS * want.numel():
        return False
    got, want = got.float(), want.float()
    most = 2e-5 if dtype == torch.float32 else 2**-6
    usual = want.square().mean(-1, keepdim=True).sqrt()
    return bool(((got - want).abs() <= most * (want.abs() + usual)).all())
