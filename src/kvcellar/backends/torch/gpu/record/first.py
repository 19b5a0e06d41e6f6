"""Steps that are run on a card before the first request."""

from __future__ import annotations

from kvcellar.backends.torch.gpu.attend.plans import rounded_up
from kvcellar.backends.torch.gpu.record.graphs import MOST_TOKENS
from kvcellar.models.kept_logits import FirstStep

_PROMPT = 5
"""Tokens of the prompts behind which sequences go on."""

_TIMES = 3
"""How often a step comes until it is a graph: launched, recorded, and played once."""


def first_steps(most_tokens: int, most_rows: int) -> list[FirstStep]:
    """Return a step of each kind that the kernels of a card are compiled, or recorded, for.

    Tiles have powers of two of rows, and Triton compiles anew for numbers that 16 divides.

    Args:
        most_tokens: of one forward.
        most_rows: sequences that run at a time.
    """
    sizes = [1 << i for i in range(most_tokens.bit_length()) if 1 << i < most_tokens]
    lengths = {n for size in (*sizes, most_tokens) for n in (size, size - size // 4 - 1) if n > 0}
    prompts = [FirstStep(n, True) for n in sorted(lengths)]
    prompts += [FirstStep(n, False) for n in sorted(lengths)[-2:]]
    most = min(rounded_up(most_rows), MOST_TOKENS)
    counts = [1 << i for i in range(most.bit_length())]
    return prompts + [FirstStep(_PROMPT, True, n, _TIMES) for n in counts if n <= most_rows]
