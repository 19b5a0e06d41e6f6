"""Settings and answers as commands and verbs hand them on: values that JSON has.

Apart from the verbs, so that a command that asks no agent imports none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvcellar.engine.loop.generating import Generation
from kvcellar.engine.sampler.sampling import DEFAULTABLE, SamplingParams
from kvcellar.sampler_settings import SAMPLER_SETTINGS

if TYPE_CHECKING:
    from kvcellar.server.commands.thoughts import ReadAnswer


def generation_object(
    result: Generation, read: ReadAnswer, params: SamplingParams
) -> dict[str, Any]:
    """Return an answer that is nobody's turn as ``--json`` prints it.

    Args:
        result: how it ended.
        read: the answer, thoughts apart.
        params: how it was sampled.
    """
    return {
        "text": read.text,
        "reasoning": read.reasoning,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish.reason,
        "finish_cause": result.finish.cause,
        "finish_detail": result.finish.detail,
        "usage": asdict(result.usage),
        "sampling": {name: getattr(params, name) for name in sorted(DEFAULTABLE)},
    }


def params_of(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return settings of sampling, of which a model's own take the place where none was named.

    Args:
        sampling: ``named`` are those that somebody has given, ``usual`` those that hold where
            neither he nor the model says anything.

    Raises:
        ConfigError: a value that cannot work.
    """
    named = {
        name: SAMPLER_SETTINGS[name].meant(value) if name in SAMPLER_SETTINGS else value
        for name, value in sampling["named"].items()
    }
    return SamplingParams(**{**sampling["usual"], **named}, unset=DEFAULTABLE - named.keys())
