"""Fingerprints that are compared."""

from __future__ import annotations

from kvcellar.models.fingerprint import Fingerprint


def differences(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Name the parts in which two fingerprints differ."""
    names = one.parts.keys() | other.parts.keys()
    return sorted(name for name in names if one.parts.get(name) != other.parts.get(name))
