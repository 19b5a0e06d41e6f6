"""Operations around linear layers: rows, decoder layers, whole models, EAGLE-3 heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.kernel import levels

if TYPE_CHECKING or levels.is_available():
    from kvcellar.kernel._native import (
        ApartNorms,
        Decoder,
        DecoderLayer,
        Eagle3Weights,
        LinearLayer,
        Norm,
        OwnInputs,
        gate,
        norm,
        rotate,
    )

__all__ = [
    "ApartNorms",
    "Decoder",
    "DecoderLayer",
    "Eagle3Weights",
    "LinearLayer",
    "Norm",
    "OwnInputs",
    "gate",
    "norm",
    "rotate",
]
