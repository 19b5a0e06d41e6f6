"""URLs of places that several machines reach: read in one way only, and shown without secrets."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qs, urlsplit

from kvcellar.errors import ConfigError

OBJECT_SCHEMES = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss")
VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")


def checked_scheme(url: str) -> str:
    """Return the scheme of a URL that can be read in one way only, with nothing to ignore in it.

    Raises:
        ConfigError: it cannot; what is said holds no secret.
    """
    if not url.strip():
        raise ConfigError("a shared place has an empty URL; give one, or leave it out")
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        is_valkey = scheme in VALKEY_SCHEMES
        if is_valkey and ("@" in parts.path + parts.query + parts.fragment or parts.port == 0):
            raise ValueError(url)
    except ValueError:
        raise ConfigError(
            f"{shown_url(url)!r} is no URL of a place: write / ? # @ [ ] in a user, a password or "
            f"a prefix as %2F %3F %23 %40 %5B %5D, and a port as a number up to 65535"
        ) from None
    wrong = _wrong_in_valkeys(parts) if is_valkey else ""
    if scheme in OBJECT_SCHEMES:
        wrong = _wrong_in_objects(scheme, parts)
    if wrong:
        raise ConfigError(f"{shown_url(url)!r} is no place that can be shared: {wrong}")
    return scheme


def _wrong_in_valkeys(parts: SplitResult) -> str:
    """Say what a server's URL has that would be ignored; nothing where that is nothing."""
    if not parts.hostname or not re.fullmatch(r"(/\d*)?", parts.path):
        return "a server is named as valkey://host:6379, its database by a number, as in /0"
    names = parse_qs(parts.query, keep_blank_values=True).keys() - {"prefix"}
    if names or parts.fragment:
        return f"there is no option {min(names, default='#')!r}; ?prefix=name is all there is"
    return ""


def _wrong_in_objects(scheme: str, parts: SplitResult) -> str:
    """Say what an object store's URL has that would be ignored; nothing where that is nothing."""
    if scheme == "file" and parts.netloc not in ("", "localhost"):
        return "a folder's URL has three slashes, such as file:///mnt/share/kvcellar"
    if parts.query or parts.fragment:
        return "it has no options; write ? and # in a path as %3F and %23"
    if not scheme.startswith("abfs") and "@" in parts.netloc:
        return "credentials come from the environment, see docs/shared-tier.md"
    return ""


def shown_url(url: str) -> str:
    """Return a URL without its user, password and query, however wrongly these are written."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        is_path = scheme == "file" or url.startswith(("/", "~", "."))
        return url if is_path else url.rpartition("@")[2]
    secret, _, after = rest.rpartition("@")
    is_container = scheme.startswith("abfs") and ":" not in secret
    if not is_container and (":" in secret or "/" not in secret or scheme in VALKEY_SCHEMES):
        rest = after
    return scheme + mark + re.split("[?#]", rest)[0]
