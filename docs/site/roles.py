"""Docstrings name other objects in the notation of Sphinx, :class:`~package.module.Name`; the site shows ``Name``."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`(~?)([^`]+)`")


class Roles(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for every object."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = ROLE.sub(_code, obj.docstring.value.replace("``", "`"))


def _code(found: re.Match[str]) -> str:
    path = found[2]
    return f"`{path.rpartition('.')[2] if found[1] else path}`"
