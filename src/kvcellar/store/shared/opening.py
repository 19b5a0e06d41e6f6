"""Opens the place that a URL names; the library that speaks with it is imported then."""

from __future__ import annotations

from kvcellar.errors import ConfigError
from kvcellar.installed import pip_command
from kvcellar.store.shared.places import SharedPlace
from kvcellar.store.shared.urls import OBJECT_SCHEMES, VALKEY_SCHEMES, checked_scheme, shown_url


def open_place(url: str, *, timeout_s: float) -> SharedPlace:
    """Open the place that a URL names; nothing is asked of it yet.

    Args:
        url: ``s3://bucket/prefix`` and the like, ``file:///mnt/share/kvcellar`` or a path, or
            ``valkey://host:6379/0``.
        timeout_s: how long one request may take.

    Raises:
        ConfigError: it names none, or the library that speaks with it is not installed.
    """
    scheme = checked_scheme(url)
    try:
        if scheme in VALKEY_SCHEMES:
            from kvcellar.store.shared.valkeys import ValkeyPlace

            return ValkeyPlace(url, timeout_s=timeout_s)
        if scheme in ("", "file"):
            from kvcellar.store.shared.folders import FolderPlace

            return FolderPlace(url)
        if scheme in OBJECT_SCHEMES:
            from kvcellar.store.shared.objects import ObjectPlace

            return ObjectPlace(url, timeout_s=timeout_s)
    except ImportError as error:
        raise ConfigError(
            f"a shared tier of {scheme}:// needs a library that is not installed "
            f"({error.name}); install it with: {pip_command('shared')}"
        ) from error
    raise ConfigError(
        f"{shown_url(url)!r} is no place that can be shared; give s3://bucket/prefix, "
        f"gs://bucket/prefix, az://container/prefix, file:///folder or valkey://host:port/0"
    )
