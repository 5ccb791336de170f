"""One case per primitive and variant: a function to trace, its arguments, and the rule it must print.

Arguments are made from text: ``"4 6"`` is a float32 array of that shape, ``"i 4 6"`` int32, ``"u ..."`` uint32,
``"b ..."`` bool, ``"c ..."`` complex64; anything else is taken as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autoshard_ilp.rules import OpView


@dataclass(frozen=True, eq=False)
class Case:
    primitive: str
    expected: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: float | None = None
    occurrence: int = 0  # which equation of that primitive, in the order in which they run

    def call(self) -> Call:
        return _call(self)

    def __str__(self) -> str:
        return f"{self.primitive}: {self.expected}"


@cache
def _call(case: Case) -> Call:
    return find_call(case.function, case.arguments, case.primitive, case.occurrence)


@dataclass(frozen=True)
class Call:
    """One equation with the values of its operands."""

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Any, ...]
    view: OpView


DTYPES = {"i": np.int32, "u": np.uint32, "b": np.bool_, "c": np.complex64}


def make(text: Any, rng: np.random.Generator) -> Any:
    """An argument from its description; values are in (0, 1), integers below 4."""
    if not isinstance(text, str):
        return text
    words = text.split()
    dtype = DTYPES[words.pop(0)] if words and words[0] in DTYPES else np.float32
    shape = tuple(int(w) for w in words)
    if dtype in (np.int32, np.uint32):
        return jnp.asarray(rng.integers(0, 4, shape), dtype)
    return jnp.asarray(rng.random(shape) > 0.5 if dtype is np.bool_ else rng.uniform(0.05, 0.95, shape), dtype)


def find_call(function: Callable[..., Any], arguments: tuple[Any, ...], primitive: str, occurrence: int = 0) -> Call:
    """Trace a function, run it equation by equation, and return an equation of that primitive."""
    rng = np.random.default_rng(0)
    values = [make(a, rng) for a in arguments]
    closed = jax.make_jaxpr(function)(*values)
    calls: list[Call] = []
    with contextlib.suppress(_Found):
        _run(closed.jaxpr, closed.consts, values, primitive, occurrence, calls)
    assert len(calls) > occurrence, f"{len(calls)} {primitive} in {closed}"
    return calls[occurrence]


class _Found(Exception):
    """Nothing more needs to run."""


def _run(jaxpr: Any, consts: Any, arguments: Any, primitive: str, occurrence: int, calls: list[Call]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(v: Any) -> Any:
        return v.val if hasattr(v, "val") else env[v]

    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        if eqn.primitive.name == primitive:
            calls.append(Call(eqn.primitive, eqn.params, operands, view_of(eqn)))
            if len(calls) > occurrence:
                raise _Found
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if eqn.primitive.name in ("jit", "custom_jvp_call", "closed_call"):
            results = _run(inner.jaxpr, inner.consts, operands, primitive, occurrence, calls)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def view_of(eqn: Any) -> OpView:
    """What a rule sees of a jaxpr equation."""
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    shapes = tuple(a.shape for a in ins), tuple(a.shape for a in outs)
    dtypes = tuple(str(a.dtype) for a in ins), tuple(str(a.dtype) for a in outs)
    return OpView(eqn.primitive.name, *shapes, *dtypes, eqn.params)


def _reduce_general(x: Any) -> Any:
    return lax.reduce(x, np.float32(0), lambda a, b: a * b + 1, (1,))


def _along(function: Any) -> Callable[..., Any]:
    return lambda x: function(x, axis=1)


def _conv(**options: Any) -> Callable[..., Any]:
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")} | options
    return lambda x, w: lax.conv_general_dilated(x, w, **options)


def _conv_gradient(**options: Any) -> Callable[..., Any]:
    """The gradient with respect to the input: the second convolution that runs."""

    def gradient(x: Any, w: Any) -> Any:
        out, pull = jax.vjp(lambda x: _conv(**options)(x, w), x)
        return pull(jnp.ones_like(out))

    return gradient


def _pool(kind: str, window: tuple[int, ...], strides: tuple[int, ...], padding: Any = "VALID") -> Callable[..., Any]:
    start, function = {"max": (-np.inf, lax.max), "min": (np.inf, lax.min), "sum": (0.0, lax.add)}[kind]
    return lambda x: lax.reduce_window(x, np.float32(start), function, window, strides, padding)


def _take(axis: int, **options: Any) -> Callable[..., Any]:
    return lambda x, i: jnp.take(x, i, axis=axis, **options)


def _ragged(x: Any, w: Any) -> Any:
    return lax.ragged_dot(x, w, jnp.array([1, 2, 3], jnp.int32))


ROWS = np.array([[1, 3, 0], [2, 2, 5]], np.int32)  # indices into 6 rows
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 4)

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
UNARY = "abs acos asin atan asinh atanh cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh bessel_i0e bessel_i1e stop_gradient"  # noqa: E501
BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub igamma igammac zeta"
INTEGER = "bitwise_and:and bitwise_or:or bitwise_xor:xor shift_left:shift_left mulhi:mulhi shift_right_arithmetic:shift_right_arithmetic shift_right_logical:shift_right_logical"  # noqa: E501

ELEMENTWISE = [
    *(Case(name, "(a b) -> (a b)", getattr(lax, name), ("4 6",)) for name in UNARY.split()),
    *(
        Case(name, rule, partial(getattr(lax, f"{name}_p").bind, **extra), shapes)
        for name, rule, shapes, extra in (  # JAX 0.12
            ("log2", "(a b) -> (a b)", ("4 6",), {"accuracy": None}),
            ("one_minus_square", "(a b) -> (a b)", ("4 6",), {}),
            ("polynomial", "(a b, a b, 1 b) -> (a b)", ("4 6", "4 6", "1 6"), {}),
        )
        if hasattr(lax, f"{name}_p")
    ),
    *(Case(name, "(a b, a b) -> (a b)", getattr(lax, name), ("4 6", "4 6")) for name in BINARY.split()),
    *(
        Case(pair.split(":")[1], "(a b, a b) -> (a b)", getattr(lax, pair.split(":")[0]), ("u 4 6", "u 4 6"))
        for pair in INTEGER.split()
        if hasattr(lax, pair.split(":")[0])
    ),
    Case("acosh", "(a) -> (a)", lambda x: lax.acosh(x), (np.arange(1, 9, dtype=np.float32),)),
    Case("add", "(a b, ) -> (a b)", lambda x: x + 1.0, ("4 6",)),
    Case("add", "(, a b) -> (a b)", lambda x, y: lax.add_p.bind(x, y), ("", "4 6")),
    Case("add", "(a b, 1 b) -> (a b)", lambda x, y: lax.add_p.bind(x, y), ("4 6", "1 6")),
    Case("add", "(a 1, 1 b) -> (a b)", lambda x, y: lax.add_p.bind(x, y), ("4 1", "1 6")),
    Case("add", "(1 a, 1 a) -> (1 a)", lax.add, ("1 6", "1 6")),
    Case("add", "(, ) -> ()", lax.add, ("", "")),
    Case("integer_pow", "(a b) -> (a b)", lambda x: x**3, ("4 6",)),
    Case("not", "(a b) -> (a b)", lax.bitwise_not, ("b 4 6",)),
    Case("population_count", "(a b) -> (a b)", lax.population_count, ("u 4 6",)),
    Case("clz", "(a b) -> (a b)", lax.clz, ("u 4 6",)),
    Case("real", "(a b) -> (a b)", lax.real, ("c 4 6",)),
    Case("imag", "(a b) -> (a b)", lax.imag, ("c 4 6",)),
    Case("conj", "(a b) -> (a b)", lax.conj, ("c 4 6",)),
    Case("complex", "(a b, a b) -> (a b)", lax.complex, ("4 6", "4 6")),
    Case("polygamma", "(a b, a b) -> (a b)", lax.polygamma, (np.full((4, 6), 2, np.float32), "4 6")),
    Case("regularized_incomplete_beta", "(a b, a b, a b) -> (a b)", lax.betainc, ("4 6", "4 6", "4 6")),
    Case("igamma_grad_a", "(a b, a b) -> (a b)", lax.igamma_grad_a, ("4 6", "4 6")),
    Case("convert_element_type", "(a b) -> (a b)", lambda x: x.astype(jnp.bfloat16), ("4 6",)),
    Case("reduce_precision", "(a b) -> (a b)", lambda x: lax.reduce_precision(x, 8, 7), ("4 6",)),
    Case("copy", "(a b) -> (a b)", lambda x: lax.copy_p.bind(x), ("4 6",)),
    Case("name", "(a b) -> (a b)", lambda x: checkpoint_name(x, "h"), ("4 6",)),
    Case("clamp", "(a b, a b, a b) -> (a b)", lax.clamp, ("4 6", "4 6", "4 6")),
    Case("clamp", "(, a b, ) -> (a b)", lambda x: lax.clamp(np.float32(0), x, np.float32(1)), ("4 6",)),
    Case("select_n", "(a b, a b, a b) -> (a b)", lax.select_n, ("b 4 6", "4 6", "4 6")),
    Case("select_n", "(, a b, a b) -> (a b)", lax.select_n, ("b", "4 6", "4 6")),
    Case("add_any", "(a b, a b) -> (a b)", jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.tanh(x))), ("4 6",)),
    Case("optimization_barrier", "(a b, c) -> (a b, c)", lambda x, y: lax.optimization_barrier((x, y)), ("4 6", "8")),
    Case("bitcast_convert_type", "(a b) -> (a b)", lambda x: lax.bitcast_convert_type(x, jnp.int32), ("4 6",)),
    Case(
        "bitcast_convert_type",
        "(a b) -> (a b c) replicate={c}",
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        ("4 6",),
    ),
    Case(
        "bitcast_convert_type",
        "(a b c) -> (a b) replicate={c}",
        lambda x: lax.bitcast_convert_type(x, jnp.uint32),
        (np.ones((4, 6, 2), np.uint16),),
    ),
]

REDUCE = [
    Case("reduce_sum", "(a b c) -> (b) reduction={a,c}", lambda x: x.sum((0, 2)), ("4 6 2",)),
    Case("reduce_sum", "(a b) -> () reduction={a,b}", jnp.sum, ("4 6",)),
    Case("reduce_sum", "(a 1) -> (a)", lambda x: x.sum(1), ("4 1",)),
    Case("reduce_max", "(a b) -> (a) reduction={b:max}", lambda x: x.max(1), ("4 6",)),
    Case("reduce_min", "(a b) -> (a) reduction={b:min}", lambda x: x.min(1), ("4 6",)),
    Case("reduce_prod", "(a b) -> (a) reduction={b:mul}", lambda x: x.prod(1), ("4 6",)),
    Case("reduce_and", "(a b) -> (a) reduction={b:and}", lambda x: x.all(1), ("b 4 6",)),
    Case("reduce_or", "(a b) -> (a) reduction={b:or}", lambda x: x.any(1), ("b 4 6",)),
    Case("reduce_or", "(a b) -> (a) replicate={b}", lambda x: lax.reduce_or_p.bind(x, axes=(1,)), ("i 4 6",)),
    Case("reduce_xor", "(a b) -> (a) replicate={b}", lambda x: lax.reduce_xor_p.bind(x, axes=(1,)), ("i 4 6",)),
    Case("reduce", "(a b, ) -> (a) replicate={b}", _reduce_general, ("4 6",)),
    Case("argmax", "(a b) -> (a) replicate={b}", lambda x: jnp.argmax(x, 1), ("4 6",)),
    Case("argmin", "(a b) -> (b) replicate={a}", lambda x: jnp.argmin(x, 0), ("4 6",)),
    *(Case(name, "(a b) -> (a b) replicate={b}", _along(getattr(lax, name)), ("4 6",)) for name in CUMULATIVE),
]

SHAPE = [
    Case("reshape", "(a b c) -> ((a b) c)", lambda x: x.reshape(8, 6), ("2 4 6",)),
    Case("reshape", "(a (b c)) -> (a b c)", lambda x: x.reshape(4, 2, 3), ("4 6",)),
    Case("reshape", "(a 1 b) -> (1 a b)", lambda x: x.reshape(1, 4, 6), ("4 1 6",)),
    Case("reshape", "(a (b c)) -> ((a b) c)", lambda x: x.reshape(8, 3), ("4 6",)),
    Case("reshape", "((a b) d f) -> ((a c) e f) replicate={b,c,d,e}", lambda x: x.reshape(8, 3, 2), ("6 4 2",)),
    Case("reshape", "(a) -> (1 a 1)", lambda x: x.reshape(1, 6, 1), ("6",)),
    Case("reshape", "() -> (1)", lambda x: x.reshape(1), ("",)),
    Case("reshape", "(1 1) -> ()", lambda x: x.reshape(()), ("1 1",)),
    Case("reshape", "(a b) -> (c) replicate={a,b,c}", lambda x: x.reshape(0), (np.ones((0, 4), np.float32),)),
    Case("squeeze", "(a 1 b) -> (a b)", lambda x: x.squeeze(1), ("4 1 6",)),
    Case("broadcast_in_dim", "(a b) -> (a 1 b)", lambda x: lax.expand_dims(x, (1,)), ("4 6",)),
    Case("transpose", "(a b c) -> (c a b)", lambda x: x.transpose(2, 0, 1), ("4 6 2",)),
    Case("broadcast_in_dim", "(b) -> (a b)", lambda x: jnp.broadcast_to(x, (4, 6)), ("6",)),
    Case("broadcast_in_dim", "(1 b) -> (a b)", lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), ("1 6",)),
    Case("broadcast_in_dim", "() -> (a b)", lambda x: jnp.full((4, 6), x), ("",)),
    Case("iota", "() -> (a b)", lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), ()),
    Case("tile", "(a b) -> (a (r b))", lambda x: jnp.tile(x, (1, 2)), ("4 6",)),
    Case("tile", "(1 a) -> (r a)", lambda x: jnp.tile(x, (4, 1)), ("1 6",)),
    Case(
        "concatenate", "(a b, a c) -> (a d) replicate={b,c,d}", lambda x, y: jnp.concatenate([x, y], 1), ("4 6", "4 2")
    ),
    Case("split", "(b a) -> (c a, d a) replicate={b,c,d}", lambda x: jnp.split(x, [2], 0), ("6 4",)),
    Case("stack", "(a b, a b) -> (a c b) replicate={c}", lambda x, y: jnp.stack([x, y], 1), ("4 6", "4 6")),
    Case("unstack", "(b a) -> (a, a) replicate={b}", lambda x: jnp.unstack(x), ("2 6",)),
    Case("rev", "(a b) -> (a b) replicate={b}", lambda x: x[:, ::-1], ("4 6",)),
    Case("pad", "(a b, ) -> (a c) replicate={b,c}", lambda x: jnp.pad(x, ((0, 0), (1, 2))), ("4 6",)),
    Case("pad", "(a b, ) -> (a c) replicate={b,c}", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, 1, 0))), ("4 6",)),
    Case("slice", "(a b) -> (a c) replicate={b,c}", lambda x: lax.slice(x, (0, 1), (4, 5)), ("4 6",)),
    Case("slice", "(a b) -> (a c) replicate={b,c}", lambda x: lax.slice(x, (0, 0), (4, 6), (1, 2)), ("4 6",)),
]

LINEAR = [
    Case("dot_general", "(m k, k n) -> (m n) reduction={k}", jnp.dot, ("4 6", "6 8"), 2 * 4 * 6 * 8),
    Case("dot_general", "(b m k, b k n) -> (b m n) reduction={k}", jnp.matmul, ("2 4 6", "2 6 8"), 2 * 2 * 4 * 6 * 8),
    Case(
        "dot_general",
        "(m m2 k, k n n2) -> (m m2 n n2) reduction={k}",
        lambda x, y: jnp.tensordot(x, y, 1),
        ("2 4 6", "6 8 2"),
    ),
    Case("dot_general", "(b b2 m k, b b2 k n) -> (b b2 m n) reduction={k}", jnp.matmul, ("2 4 2 6", "2 4 6 8")),
    Case(
        "dot_general",
        "(b m k k2, k b n k2) -> (b m n) reduction={k,k2}",
        lambda x, y: lax.dot_general(x, y, (((2, 3), (0, 3)), ((0,), (1,)))),
        ("2 4 6 2", "6 2 8 2"),
    ),
    Case("dot_general", "(k, k) -> () reduction={k}", jnp.dot, ("6", "6"), 12.0),
    Case("dot_general", "(m, n) -> (m n)", lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))), ("4", "6")),
    Case("dot_general", "(m k, k n) -> (m n) reduction={k}", jnp.dot, ("c 4 6", "c 6 8"), 4 * 2 * 4 * 6 * 8),
    Case(
        "ragged_dot_general",
        "(m k, g k n, g) -> (m n) reduction={k} replicate={g,m}",
        _ragged,
        ("6 4", "3 4 8"),
        2 * 6 * 4 * 8,
    ),
    Case(
        "ragged_dot_general",
        "(k m, k n, g) -> (g m n) replicate={g,k}",
        lambda x, w: jax.grad(lambda w: _ragged(x, w).sum())(w),
        ("6 4", "3 4 8"),
        occurrence=1,
    ),
    Case(
        "cholesky",
        "(a b c) -> (a d e) replicate={b,c,d,e}",
        lambda x: lax.linalg.cholesky(x + 4 * jnp.eye(2), symmetrize_input=False),
        ("4 2 2",),
    ),
    Case(
        "triangular_solve",
        "(a b c, a d e) -> (a d e) replicate={b,c,d}",
        lambda x, y: lax.linalg.triangular_solve(x + jnp.eye(2), y, left_side=True),
        ("4 2 2", "4 2 6"),
    ),
    Case(
        "triangular_solve",
        "(a b, c d) -> (c d) replicate={a,b,d}",
        lambda x, y: lax.linalg.triangular_solve(x + jnp.eye(2), y, left_side=False),
        ("2 2", "4 2"),
    ),
    Case(
        "qr",
        "(a b c) -> (a d e, a f g) replicate={b,c,d,e,f,g}",
        lambda x: lax.linalg.qr(x, full_matrices=False),
        ("4 3 2",),
    ),
    Case(
        "eigh",
        "(a b c) -> (a d e, a f) replicate={b,c,d,e,f}",
        lambda x: lax.linalg.eigh(x, symmetrize_input=False),
        ("4 2 2",),
    ),
    Case(
        "svd",
        "(a b c) -> (a d, a e f, a g h) replicate={b,c,d,e,f,g,h}",
        lambda x: lax.linalg.svd(x, full_matrices=False),
        ("4 2 2",),
    ),
    Case("lu", "(a b c) -> (a d e, a f, a g) replicate={b,c,d,e,f,g}", lax.linalg.lu, ("4 2 2",)),
    Case("fft", "(a b) -> (a c) replicate={b,c}", jnp.fft.rfft, ("4 6",)),
    Case("fft", "(a b c) -> (a d e) replicate={b,c,d,e}", jnp.fft.fft2, ("c 4 2 6",)),
]

INDEXING = [
    Case("gather", "(a b, c d 1) -> (c d b) reduction={a}", _take(0), ("6 4", np.tile(ROWS, (1, 2)))),
    Case("gather", "(a b, c d 1) -> (c d b) reduction={a}", _take(0, mode="clip"), ("6 4", np.tile(ROWS, (1, 2)))),
    Case("gather", "(a b, c d 1) -> (a c d) reduction={b}", _take(1), ("4 6", np.tile(ROWS, (1, 2)))),
    Case("gather", "(a b, c d 1) -> (c d b) replicate={a}", _take(0), ("b 6 4", np.tile(ROWS, (1, 2)))),
    Case(
        "gather",
        "(a b, a c 1) -> (a c) reduction={b}",
        lambda x, i: jnp.take_along_axis(x, i, 1),
        ("2 6", np.array([[1, 5, 0, 2], [3, 3, 4, 0]], np.int32)),
    ),
    Case(
        "gather",
        "(a b c, d e) -> (d c) reduction={a,b} replicate={e}",
        lambda x, i: x[i, i],
        ("4 4 6", np.array([1, 3, 0, 2], np.int32)),
    ),
    Case(
        "gather",
        "(a b, c e) -> (c d b) replicate={a,d,e}",
        lambda x, i: jax.vmap(lambda j: lax.dynamic_slice(x, (j, 0), (3, 4)))(i),
        ("6 4", np.array([1, 3, 0, 2], np.int32)),
    ),
    Case(
        "scatter-add",
        "(a b, c 1, c b) -> (a b) reduction={c} even={c}",
        lambda x, i, u: x.at[i].add(u),
        ("6 4", "i 8", "8 4"),
    ),
    Case(
        "scatter-add",
        "(a b, c d 1, c d b) -> (a b) reduction={c,d} even={c,d}",
        lambda x: jax.grad(lambda x: (jnp.take(x, np.tile(ROWS, (1, 2)), axis=0) ** 2).sum())(x),
        ("6 4",),
    ),
    Case(
        "scatter-add",
        "(a b, a c 1, a c) -> (a b) reduction={c} even={c}",
        lambda x: jax.grad(lambda x: jnp.take_along_axis(x, np.array([[1, 5], [3, 3]], np.int32), 1).sum())(x),
        ("2 6",),
    ),
    Case(
        "scatter-mul",
        "(a b, c 1, c b) -> (a b) reduction={c:mul} even={c}",
        lambda x, i, u: x.at[i].multiply(u),
        ("6 4", "i 8", "8 4"),
    ),
    Case(
        "scatter-max",
        "(a b, c 1, c b) -> (a b) reduction={c:max} even={c}",
        lambda x, i, u: x.at[i].max(u),
        ("6 4", "i 8", "8 4"),
    ),
    Case(
        "scatter-min",
        "(a b, c 1, c b) -> (a b) reduction={c:min} even={c}",
        lambda x, i, u: x.at[i].min(u),
        ("6 4", "i 8", "8 4"),
    ),
    Case(
        "scatter",
        "(a b, c 1, c b) -> (a b) replicate={c}",
        lambda x, i, u: x.at[i].set(u),
        ("6 4", np.array([5, 0, 3], np.int32), "3 4"),
    ),
    Case(
        "scatter-add",
        "(a b c, d e, d c) -> (a b c) reduction={d} replicate={e} even={d}",
        lambda x, i, u: x.at[i, i].add(u),
        ("4 4 6", "i 8", "8 6"),
    ),
    Case(
        "scatter-add",
        "(a b, 1, c b) -> (a b) replicate={a,c} even={b}",
        lambda x, u: lax.scatter_add(x, np.array([2], np.int32), u, lax.ScatterDimensionNumbers((0, 1), (), (0,))),
        ("6 4", "3 4"),
    ),
    Case(
        "dynamic_slice", "(a b, , ) -> (a c) replicate={b,c}", lambda x: lax.dynamic_slice(x, (0, 1), (4, 3)), ("4 6",)
    ),
    Case(
        "dynamic_update_slice",
        "(a b, a c, , ) -> (a b) replicate={b,c}",
        lambda x, u: lax.dynamic_update_slice(x, u, (0, 1)),
        ("4 6", "4 3"),
    ),
    Case("sort", "(a b) -> (a b) replicate={b}", jnp.sort, ("4 6",)),
    Case("sort", "(a b, a b) -> (a b, a b) replicate={b}", lambda x, y: lax.sort((x, y), num_keys=1), ("4 6", "4 6")),
    Case("top_k", "(a b) -> (a k, a k) replicate={b,k}", lambda x: lax.top_k(x, 2), ("4 6",)),
    Case("approx_top_k", "(a b) -> (a k, a k) replicate={b,k}", lambda x: lax.approx_max_k(x, 2), ("4 6",)),
]

WINDOWS = [
    Case(
        "conv_general_dilated",
        "(b x x2 c, w w2 c o) -> (b x x2 o) reduction={c} permutation={x,x2} replicate={w,w2}",
        _conv(),
        ("2 8 8 4", "3 3 4 6"),
        2 * 2 * 6 * 4 * 22 * 22,
    ),
    Case(
        "conv_general_dilated",
        "(b x x2 c, 1 1 c o) -> (b x x2 o) reduction={c}",
        _conv(),
        ("2 8 8 4", "1 1 4 6"),
        2 * 2 * 64 * 4 * 6,
    ),
    Case(
        "conv_general_dilated",
        "(b (x s) (x2 s2) c, w w2 c o) -> (b x x2 o) reduction={c} replicate={s,w,s2,w2}",
        _conv(window_strides=(4, 4), padding="VALID"),
        ("2 8 8 4", "4 4 4 6"),
        2 * 2 * 4 * 6 * 16 * 4,
    ),
    Case(
        "conv_general_dilated",
        "(b (x s) (x2 s2) c, w w2 c o) -> (b x x2 o) reduction={c} permutation={x,x2} replicate={s,w,s2,w2}",
        _conv(window_strides=(2, 2)),
        ("2 8 8 4", "3 3 4 6"),
    ),
    Case(
        "conv_general_dilated",
        "(b x x2 c, w w2 o c) -> (b (x s) (x2 s2) o) reduction={c} permutation={x,x2} replicate={s,w,s2,w2}",
        _conv_gradient(window_strides=(2, 2)),
        ("2 8 8 4", "3 3 4 6"),
        occurrence=1,
    ),
    Case(
        "conv_general_dilated",
        "(b x x2 (g c), w w2 c (g o)) -> (b x x2 (g o)) reduction={c} replicate={x,w,x2,w2}",
        _conv(feature_group_count=2),
        ("2 8 8 4", "3 3 2 6"),
    ),
    Case(
        "conv_general_dilated",
        "(b x x2 g, w w2 1 (g o)) -> (b x x2 (g o)) replicate={x,w,x2,w2}",
        _conv(feature_group_count=4),
        ("2 8 8 4", "3 3 1 8"),
    ),
    Case(
        "conv_general_dilated",
        "((g b) x c, w c (g o)) -> (b x (g o)) reduction={c} replicate={x,w}",
        _conv(window_strides=(1,), dimension_numbers=("NHC", "HIO", "NHC"), batch_group_count=2),
        ("4 8 4", "3 4 6"),
    ),
    Case(
        "conv_general_dilated",
        "(b c x, o c w) -> (b o y) reduction={c} replicate={x,y,w}",
        _conv(window_strides=(1,), dimension_numbers=("NCH", "OIH", "NCH"), padding="VALID", rhs_dilation=(2,)),
        ("2 4 9", "6 4 3"),
        2 * 2 * 6 * 4 * 3 * 5,
    ),
    Case(
        "conv_general_dilated",
        "(c x b, c x o) -> (b o 1) reduction={c,x}",
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("CHN", "IHO", "NCH")),
        ("4 8 2", "4 8 6"),
    ),
    Case("reduce_window_max", "(x (x2 s)) -> (x x2) replicate={s}", _pool("max", (1, 2), (1, 2)), ("4 8",)),
    Case("reduce_window_max", "(x x2) -> (x x2) permutation={x2}", _pool("max", (1, 3), (1, 1), "SAME"), ("4 8",)),
    Case(
        "reduce_window_min",
        "(x (x2 s)) -> (x x2) permutation={x2} replicate={s}",
        _pool("min", (1, 3), (1, 2), "SAME"),
        ("4 8",),
    ),
    Case("reduce_window_sum", "(x x2) -> (x 1) replicate={x2}", _pool("sum", (1, 8), (1, 1)), ("4 8",)),
    Case("reduce_window_sum", "(x x2) -> (x y) replicate={x2,y}", _pool("sum", (1, 3), (1, 1)), ("4 8",)),
    Case(
        "reduce_window",
        "(x (x2 s), ) -> (x x2) replicate={s}",
        lambda x: lax.reduce_window(x, np.float32(0), lambda a, b: a * b + 1, (1, 2), (1, 2), "VALID"),
        ("4 8",),
    ),
    Case(
        "select_and_scatter_add",
        "(x x2, x (x2 s)) -> (x (x2 s)) replicate={s}",
        jax.grad(lambda x: (_pool("max", (1, 2), (1, 2))(x) ** 2).sum()),
        ("4 8",),
    ),
    Case(
        "select_and_gather_add",
        "(x (x2 s), x (x2 s)) -> (x x2) replicate={s}",
        lambda x, t: jax.jvp(_pool("max", (1, 2), (1, 2)), (x,), (t,))[1],
        ("4 8", "4 8"),
    ),
]

RANDOM = [
    Case("random_bits", "() -> (a b)", lambda k: jax.random.bits(k, (4, 6)), (KEY,)),
    Case("random_split", "() -> (a)", lambda k: jax.random.split(k, 4), (KEY,)),
    Case("random_fold_in", "(, ) -> ()", lambda k: jax.random.fold_in(k, 3), (KEY,)),
    Case("random_wrap", "(a b) -> (a) replicate={b}", jax.random.wrap_key_data, ("u 4 2",)),
    Case("random_unwrap", "(a) -> (a b) replicate={b}", jax.random.key_data, (KEYS,)),
    Case("random_seed", "() -> ()", jax.random.key, (np.int32(3),)),
    Case("random_gamma", "(, a) -> (b) replicate={a,b}", lambda k: jax.random.gamma(k, 2.0, (4,)), (KEY,)),
    Case("random_clone", "(a) -> (a)", jax.random.clone, (KEYS,)),
    Case("rng_uniform", "(, ) -> (a) replicate={a}", lambda x: lax.rng_uniform(np.float32(0), x, (4,)), ("",)),
    Case(
        "rng_bit_generator", "(a) -> (b, c d) replicate={a,b,c,d}", lambda k: lax.rng_bit_generator(k, (4, 6)), ("u 4",)
    ),
]

CASES = [*ELEMENTWISE, *REDUCE, *SHAPE, *LINEAR, *INDEXING, *WINDOWS, *RANDOM]
