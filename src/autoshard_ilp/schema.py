"""JSON Schemas of the files that users write or keep; they lie in ``autoshard_ilp/schemas``."""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parent / "schemas"


@cache
def schema(name: str) -> dict[str, Any]:
    """The JSON Schema "plan" or "sweep" (draft 2020-12)."""
    return dict(json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8")))


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(schema(name))


def problem(data: Any, name: str) -> str | None:
    """The first thing that is wrong with some data, to the end of a sentence; None when it follows the schema."""
    errors = sorted(_validator(name).iter_errors(data), key=lambda e: (len(e.absolute_path), str(e.absolute_path)))
    words = _in_words(errors[0], schema(name)) if errors else None
    return words if words is None or words.endswith((".", "?")) else f"{words}."


def _in_words(error: Any, whole: dict[str, Any]) -> str:
    where = ".".join(str(p) for p in error.absolute_path) or "the file"
    received = _short(error.instance)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = sorted(error.schema.get("properties", {}))
        unknown = [key for key in error.instance if key not in known]
        if known and unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            return f"{where} has the unknown key {unknown[0]!r}. {hint}"
    if error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        return f"{where} lacks {missing[0]!r}"
    if error.validator == "minItems" or (error.validator == "minProperties"):
        return f"{where} is empty"
    if error.validator == "enum":
        return f"{where} is one of {', '.join(map(repr, error.validator_value))}, not {received}"
    if error.validator == "type":
        return f"{where} is of type {error.validator_value}, not {received}"
    if error.validator == "oneOf":
        return f"{where} has none of the forms that it may have: {received}"
    if error.validator == "pattern":
        return f"{where} does not match {error.validator_value!r}: {received}"
    return f"{where}: {error.message}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
