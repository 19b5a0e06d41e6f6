"""Docstrings as the site shows them: a role of reStructuredText is code in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class RolesAsCode(griffe.Extension):
    """Turns ``:class:`Cellar``` into the name alone, as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object, if it has any."""
        if obj.docstring:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
