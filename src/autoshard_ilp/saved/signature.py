"""The structure of a step's arguments as plain data, so that a plan read from a file knows what to trace again.

Dictionaries with string keys, lists, tuples and None are kept exactly. Any other container (a named tuple, a dataclass,
a state of Flax) is a class of the user's program, which a file without code cannot hold: :func:`encode` then gives
None, and the caller has to bring the arguments along.

A leaf is written ``{"shape": [32, 64], "dtype": "float32"}``, with ``"weak": true`` for Python scalars; a container as
``{"dict": {...}}``, ``{"list": [...]}``, ``{"tuple": [...]}`` or ``null``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard_ilp.graph.step import Step


class _NotPlain(Exception):
    """A container that plain data cannot name."""


def encode(tree: Any) -> dict[str, Any] | None:
    """A pytree of arrays or ``jax.ShapeDtypeStruct`` as plain data; None where it holds other containers."""
    try:
        return {"tree": _encode(tree)}
    except _NotPlain:
        return None


def decode(data: Mapping[str, Any]) -> Any:
    """The pytree of ``jax.ShapeDtypeStruct`` that :func:`encode` described.

    Raises:
        KeyError, TypeError, ValueError: damaged data.
    """
    return _decode(data["tree"])


def check(data: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError where :func:`decode` could not read ``data``; JAX is not needed."""
    todo = [data["tree"]]
    while todo:
        part = todo.pop()
        if part is None:
            continue
        kind = next((k for k in ("dict", "list", "tuple") if k in part), None)
        if kind is not None:
            if not isinstance(part[kind], dict if kind == "dict" else list):
                raise TypeError(f"a {kind} is written {part[kind]!r}")
            todo.extend(part[kind].values() if kind == "dict" else part[kind])
        elif not isinstance(part["shape"], list) or not all(type(n) is int and n >= 0 for n in part["shape"]):
            raise ValueError(f"shape {part['shape']!r}")
        elif not isinstance(part["dtype"], str):
            raise TypeError(f"dtype {part['dtype']!r}")


def _encode(tree: Any) -> Any:
    import jax

    if tree is None:
        return None
    if type(tree) is dict:
        if not all(isinstance(key, str) for key in tree):
            raise _NotPlain
        return {"dict": {key: _encode(tree[key]) for key in tree}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_encode(part) for part in tree]}
    if not jax.tree_util.all_leaves([tree]) or not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
        raise _NotPlain
    leaf = {"shape": [int(n) for n in tree.shape], "dtype": str(tree.dtype)}
    return {**leaf, "weak": True} if getattr(tree, "weak_type", False) else leaf


def _decode(data: Any) -> Any:
    import jax

    if data is None:
        return None
    if "dict" in data:
        return {str(key): _decode(part) for key, part in data["dict"].items()}
    if "list" in data:
        return [_decode(part) for part in data["list"]]
    if "tuple" in data:
        return tuple(_decode(part) for part in data["tuple"])
    shape = tuple(int(n) for n in data["shape"])
    return jax.ShapeDtypeStruct(shape, _dtype(data["dtype"]), weak_type=bool(data.get("weak", False)))


def _dtype(name: str) -> Any:
    """The dtype of a name; those of typed random keys ("key<fry>") are made by their implementation."""
    import jax

    if not name.startswith("key<"):
        return jax.numpy.dtype(name)
    implementation = key_implementation(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


def key_implementation(name: str) -> str:
    """The implementation of a random key's dtype, such as "threefry2x32" of "key<fry>"; ValueError if unknown."""
    import jax

    for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
        if str(jax.eval_shape(lambda key=implementation: jax.random.key(0, impl=key)).dtype) == name:
            return implementation
    raise ValueError(f"unknown random key {name!r}")


def signature_of(step: Step) -> dict[str, Any]:
    """What a plan keeps of its step in order to trace it again, as plain data.

    Returns:
        "args": structure of a function's arguments, or of a Keras model's batch (None where it holds classes of its
        own); "donated": positions, for a function; "versions": of what traced it; "one_copy": whether equal casts
        of a variable are one (:mod:`autoshard_ilp.graph.equal`).
    """
    keeps: dict[str, Any] = {"versions": versions(step.traced is not None), "one_copy": step.one_copy}
    if step.traced is not None:
        return {**keeps, "args": encode(tuple(step.args[1]))}
    return {**keeps, "args": encode(tuple(step.args)), "donated": list(step.donated)}


def versions(with_keras: bool) -> dict[str, str]:
    """Of what traces a step here."""
    from importlib import metadata

    names = ("jax", "keras") if with_keras else ("jax",)
    return {name: metadata.version(name) for name in names}
