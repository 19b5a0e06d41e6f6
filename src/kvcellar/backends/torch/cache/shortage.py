"""Work for which a device has no memory: it ends, and what it held is free again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kvcellar.errors import DeviceMemoryError

R = TypeVar("R")


def within_memory(
    call: Callable[[], R],
    device: torch.device,
    let_go: Callable[[], None] = lambda: None,
    what: str = "a forward",
    instead: str = "bring fewer tokens in a step",
) -> R:
    """Return what a call returns; where a device's memory runs out, free what can be freed.

    Args:
        call: works on the device.
        device: whose memory torch keeps for reuse; it is given back then.
        let_go: frees what is kept for speed alone.
        what: the call, for messages,
        instead: and what may be asked of it that takes less memory.

    Raises:
        DeviceMemoryError: there was no memory for it.
    """
    try:
        return call()
    except torch.OutOfMemoryError as error:
        said = str(error).partition(". ")[0]
    # Out of the handler nobody refers to the call's frames, nor to the tensors in them.
    let_go()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    raise DeviceMemoryError(
        f"{what} found no memory on {device} ({said}); {instead}, or have "
        f"the cache leave more room: a lower --memory, or a smaller capacity"
    )
