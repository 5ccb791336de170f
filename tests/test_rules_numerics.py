"""Rules against the numbers: each primitive run whole, and in the parts that its rule allows.

Two independent checks. In :func:`in_parts` every device runs the primitive on its own part (``jax.shard_map``), and
partial results are combined as the rule says; the parts must make up the whole. In :func:`compile_sharded` the
compiler gets the operands and results sharded as the rule says, and must need no collective that the rule does not
announce.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard_ilp.rules import Dims, Kind, Rule, rule_for, run_locally, runs_locally
from rule_cases import CASES, ELEMENTWISE, Call, Case, find_call

pytestmark = pytest.mark.usefixtures("quick_code")

MESH = {"x": 2, "y": 2}


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(MESH))


def shardable(rule: Rule, *kinds: Kind) -> list[str]:
    """Factors that may be sharded in two: of these kinds, even, and major-most wherever they occur."""
    dims = [d for side in (*rule.operands, *rule.results) for d in side]
    return [
        name
        for name, factor in rule.factors.items()
        if factor.kind in kinds and factor.size % 2 == 0 and all(name not in d or d[0] == name for d in dims)
    ]


def spec(dims: Dims, axis_of: Mapping[str, str]) -> P:
    return P(*(axis_of.get(d[0]) if d else None for d in dims))


# ---------------------------------------------------------------------------------------------------------------------
# Every device on its own part
# ---------------------------------------------------------------------------------------------------------------------


def in_parts(call: Call, rule: Rule, axis_of: Mapping[str, str]) -> Callable[..., list[Any]]:
    """The primitive on each device's part, and partial results combined; takes and gives whole arrays."""
    if runs_locally(call.view):
        axes_of = {factor: (axis,) for factor, axis in axis_of.items()}
        return lambda *operands: run_locally(call.primitive.bind, call.view, rule, operands, mesh(), axes_of)
    reductions = [(axis_of[f], rule.factors[f].combine) for f in axis_of if rule.factors[f].kind is Kind.REDUCTION]

    def local(*operands: Any) -> list[Any]:
        out_shapes = [local_shape(s, dims, axis_of) for s, dims in zip(call.view.out_shapes, rule.results, strict=True)]
        adapt = ADAPT.get(call.view.primitive, lambda call, rule, axis_of, operands, out_shapes: (operands, {}))
        operands, changed = adapt(call, rule, axis_of, list(operands), out_shapes)
        results = call.primitive.bind(*operands, **{**call.params, **changed})
        results = list(results) if call.primitive.multiple_results else [results]
        if call.view.primitive == "iota":
            results = [counted_from_here(results[0], call, rule, axis_of)]
        for axis, combine in reductions:
            results = [COMBINE[combine](r, axis) for r in results]
        return results

    in_specs = tuple(spec(dims, axis_of) for dims in rule.operands)
    out_specs = [spec(dims, axis_of) for dims in rule.results]
    return jax.shard_map(local, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def local_shape(shape: tuple[int, ...], dims: Dims, axis_of: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(n // MESH[axis_of[d[0]]] if d and d[0] in axis_of else n for n, d in zip(shape, dims, strict=True))


COMBINE = {
    "add": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
    "mul": lambda x, axis: jnp.prod(lax.all_gather(x, axis), 0),
    "and": lambda x, axis: lax.pmin(x.astype(int), axis).astype(bool),
    "or": lambda x, axis: lax.pmax(x.astype(int), axis).astype(bool),
}


def counted_from_here(x: Any, call: Call, rule: Rule, axis_of: Mapping[str, str]) -> Any:
    dimension = call.params["dimension"]
    (factor,) = rule.results[0][dimension]
    return x + lax.axis_index(axis_of[factor]) * x.shape[dimension] if factor in axis_of else x


def adapt_gather(call: Call, rule: Rule, axis_of: Any, operands: list[Any], out_shapes: Any) -> Any:
    """Windows over a whole dimension follow its part; an index outside of this device's part fetches zero."""
    whole = call.view.in_shapes[0]
    numbers = call.params["dimension_numbers"]
    sizes = tuple(
        p if n == w and w > 1 and d not in numbers.operand_batching_dims else n
        for d, (n, w, p) in enumerate(zip(call.params["slice_sizes"], whole, operands[0].shape, strict=True))
    )
    operands[1] = shifted_indices(operands[1], numbers.start_index_map, operands[0].shape, rule, axis_of, sizes)
    return operands, {"slice_sizes": sizes, "mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}


def adapt_scatter(call: Call, rule: Rule, axis_of: Any, operands: list[Any], out_shapes: Any) -> Any:
    """Indices outside of this device's part are dropped; of several partial results one starts from the operand."""
    numbers = call.params["dimension_numbers"]
    windows = [1 if d in numbers.inserted_window_dims else n for d, n in enumerate(operands[0].shape)]
    operands[1] = shifted_indices(
        operands[1], numbers.scatter_dims_to_operand_dims, operands[0].shape, rule, axis_of, windows
    )
    identity = {"scatter-add": 0.0, "scatter-mul": 1.0, "scatter-max": -np.inf, "scatter-min": np.inf}
    for factor, axis in axis_of.items():
        if rule.factors[factor].kind is Kind.REDUCTION:
            first = lax.axis_index(axis) == 0
            operands[0] = jnp.where(first, operands[0], identity[call.view.primitive])
    return operands, {"mode": lax.GatherScatterMode.FILL_OR_DROP}


def shifted_indices(indices: Any, index_map: Any, local_operand: Any, rule: Rule, axis_of: Any, windows: Any) -> Any:
    for position, d in enumerate(index_map):
        dim = rule.operands[0][d]
        if dim and dim[0] in axis_of and windows[d] == 1:
            start = lax.axis_index(axis_of[dim[0]]) * local_operand[d]
            at = indices[..., position] - start
            indices = indices.at[..., position].set(jnp.where(at < 0, local_operand[d], at))
    return indices


def adapt_slice(call: Call, rule: Rule, axis_of: Any, operands: list[Any], out_shapes: Any) -> Any:
    whole, target = call.view.in_shapes[0], call.view.out_shapes[0]
    limits = zip(whole, target, operands[0].shape, call.params["limit_indices"], strict=True)
    return operands, {"limit_indices": tuple(p if n == m else limit for n, m, p, limit in limits)}


def to_local(parameter: str) -> Any:
    """The parameter is the result's shape."""
    return lambda call, rule, axis_of, operands, out_shapes: (operands, {parameter: out_shapes[0]})


ADAPT: dict[str, Any] = {
    "gather": adapt_gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"), adapt_scatter),
    "slice": adapt_slice,
    "reshape": to_local("new_sizes"),
    "broadcast_in_dim": to_local("shape"),
    "iota": to_local("shape"),
    "dynamic_slice": to_local("slice_sizes"),
    "tile": lambda call, rule, axis_of, operands, out_shapes: (
        operands,
        {"reps": tuple(n // m for n, m in zip(out_shapes[0], operands[0].shape, strict=True))},
    ),
}
# Their numbers depend on the index in the whole result: only the compiler can run them in parts.
NOT_IN_PARTS = {"random_bits", "random_split"}
# XLA's translation to StableHLO does not know it in a compiled function.
NOT_COMPILED = {"mulhi"}
# Elementwise like the others, but long loops that take seconds to compile.
SLOW = {"igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta", "polygamma", "zeta"}


def whole_results(call: Call) -> list[Any]:
    results = call.primitive.bind(*call.operands, **call.params)
    return list(results) if call.primitive.multiple_results else [results]


def as_numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        np.testing.assert_allclose(as_numbers(f), as_numbers(e), rtol=2e-5, atol=2e-5)


def assignments(rule: Rule, *kinds: Kind) -> list[dict[str, str]]:
    """Each shardable factor sharded once, two at a time."""
    names = shardable(rule, *kinds)
    return [dict(zip(names[i : i + 2], MESH, strict=False)) for i in range(0, len(names), 2)]


def groups(excluded: set[str]) -> list[Any]:
    """Elementwise cases all in one program, which compiles faster; every other case in one of its own."""
    cases = [c for c in CASES if c.primitive not in excluded]
    plain = [c for c in cases if c in ELEMENTWISE]
    alone = [c for c in cases if c not in ELEMENTWISE and assignments(rule_for(c.call().view), *SHARDED_KINDS)]
    return [pytest.param(plain, id="elementwise"), *(pytest.param([c], id=str(c)) for c in alone)]


SHARDED_KINDS = (Kind.PASS, Kind.REDUCTION)


@pytest.mark.parametrize("cases", groups(NOT_COMPILED | NOT_IN_PARTS | SLOW))
def test_parts_make_up_the_whole(cases: list[Case]) -> None:
    calls = [case.call() for case in cases]
    rules = [rule_for(call.view) for call in calls]
    runs = [(c, r, axis_of) for c, r in zip(calls, rules, strict=True) for axis_of in assignments(r, *SHARDED_KINDS)]
    assert runs
    program = jax.jit(lambda operands: [in_parts(*run)(*o) for run, o in zip(runs, operands, strict=True)])
    found = program([call.operands for call, _, _ in runs])
    for results, (call, _, _) in zip(found, runs, strict=True):
        assert_same(results, whole_results(call))


# ---------------------------------------------------------------------------------------------------------------------
# What the compiler makes of it
# ---------------------------------------------------------------------------------------------------------------------

COLLECTIVE = re.compile(r"= \S+ (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


def compile_sharded(call: Call, rule: Rule, axis_of: Mapping[str, str]) -> Any:
    """The primitive alone, compiled with its operands and results sharded as the rule says.

    Where the compiler is known to fall short, the primitive runs device by device, as in a plan.
    """

    def shardings(sides: tuple[Dims, ...]) -> list[NamedSharding]:
        return [NamedSharding(mesh(), spec(dims, axis_of)) for dims in sides]

    def run(*operands: Any) -> list[Any]:
        if runs_locally(call.view):
            return in_parts(call, rule, axis_of)(*operands)
        results = call.primitive.bind(*operands, **call.params)
        return list(results) if call.primitive.multiple_results else [results]

    jitted = jax.jit(run, in_shardings=tuple(shardings(rule.operands)), out_shardings=shardings(rule.results))
    return jitted.lower(*call.operands).compile()


def check_compiled(call: Call, kinds: tuple[Kind, ...], allowed: set[str]) -> None:
    rule = rule_for(call.view)
    for axis_of in assignments(rule, *kinds):
        compiled = compile_sharded(call, rule, axis_of)
        operands = jax.device_put(call.operands, compiled.input_shardings[0])
        assert_same(compiled(*operands), whole_results(call))
        collectives = set(COLLECTIVE.findall(compiled.as_text()))
        assert collectives <= allowed, f"{axis_of}: {collectives}"


def sharded_cases(*kinds: Kind) -> list[Case]:
    return [c for c in CASES if c not in ELEMENTWISE and assignments(rule_for(c.call().view), *kinds)]


@pytest.mark.parametrize("case", sharded_cases(Kind.PASS), ids=str)
def test_passing_factors_need_no_collective(case: Case) -> None:
    check_compiled(case.call(), (Kind.PASS,), set())


@pytest.mark.parametrize("case", sharded_cases(Kind.REDUCTION), ids=str)
def test_reduction_factors_need_an_all_reduce_only(case: Case) -> None:
    check_compiled(case.call(), (Kind.REDUCTION,), {"all-reduce"})


@pytest.mark.parametrize("case", sharded_cases(Kind.PERMUTATION), ids=str)
def test_permutation_factors_need_neighbours_only(case: Case) -> None:
    check_compiled(case.call(), (Kind.PERMUTATION,), {"collective-permute"})


# ---------------------------------------------------------------------------------------------------------------------
# Any shape
# ---------------------------------------------------------------------------------------------------------------------

sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def dot_generals(draw: st.DrawFn) -> Call:
    batch, contract = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, max_size=2))
    free_l, free_r = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, max_size=2))

    def side(free: list[int]) -> tuple[str, list[int], list[int]]:
        roles = draw(st.permutations(range(len(batch) + len(contract) + len(free))))
        dims = [*batch, *contract, *free]
        shape = " ".join(str(dims[r]) for r in roles)
        return (
            shape,
            [roles.index(i) for i in range(len(batch))],
            [roles.index(len(batch) + i) for i in range(len(contract))],
        )

    (left, batch_l, contract_l), (right, batch_r, contract_r) = side(free_l), side(free_r)
    numbers = ((contract_l, contract_r), (batch_l, batch_r))
    return find_call(lambda x, y: lax.dot_general(x, y, numbers), (left, right), "dot_general")


@st.composite
def reshapes(draw: st.DrawFn) -> Call:
    primes = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=5))

    def shape() -> list[int]:
        dims = [1] * draw(st.integers(1, 4))
        for p in draw(st.permutations(primes)):
            dims[draw(st.integers(0, len(dims) - 1))] *= p
        return dims

    source, target = shape(), shape()
    return find_call(
        lambda x: lax.reshape_p.bind(x, new_sizes=tuple(target), dimensions=None, sharding=None),
        (" ".join(map(str, source)),),
        "reshape",
    )


@st.composite
def convolutions(draw: st.DrawFn) -> Call:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    name = draw(st.sampled_from(["feature_group_count", "batch_group_count"]))
    batch = draw(sizes) * (groups if name == "batch_group_count" else 1)
    per_group, out, kernel = draw(sizes), draw(sizes) * groups, draw(st.integers(1, 3))
    features = per_group * (groups if name == "feature_group_count" else 1)
    stride, padding = draw(st.integers(1, 2)), draw(st.sampled_from(["SAME", "VALID"]))
    numbers = draw(st.sampled_from([("NHC", "HIO", "NHC"), ("NCH", "OIH", "NCH"), ("CHN", "IHO", "NHC")]))
    lhs = {"N": batch, "H": draw(st.sampled_from([4, 8])), "C": features}
    rhs = {"H": kernel, "I": per_group, "O": out}

    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (stride,), padding, dimension_numbers=numbers, **{name: groups})

    arguments = (" ".join(str(lhs[c]) for c in numbers[0]), " ".join(str(rhs[c]) for c in numbers[1]))
    return find_call(run, arguments, "conv_general_dilated")


@st.composite
def lookups(draw: st.DrawFn) -> Call:
    """A gather along one axis, or its gradient, a scatter-add."""
    shape = draw(st.lists(sizes, min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    rows = draw(st.lists(sizes, max_size=2))
    indices = np.arange(np.prod(rows, dtype=int)).reshape(rows) * 5 % shape[axis]

    def take(x: Any) -> Any:
        return jnp.take(x, jnp.asarray(indices, jnp.int32), axis=axis)

    text = " ".join(map(str, shape))
    if draw(st.booleans()):
        return find_call(take, (text,), "gather")
    return find_call(jax.grad(lambda x: (take(x) ** 2).sum()), (text,), "scatter-add")


@settings(deadline=None, max_examples=24, derandomize=True)
@given(st.data(), st.one_of(dot_generals(), reshapes(), convolutions(), lookups()))
def test_parts_make_up_the_whole_for_any_shape(data: st.DataObject, call: Call) -> None:
    rule = rule_for(call.view)
    assert rule.known
    names = data.draw(st.permutations(shardable(rule, *SHARDED_KINDS)))
    axis_of = dict(zip(names[:2], MESH, strict=False))
    if axis_of:
        assert_same(jax.jit(in_parts(call, rule, axis_of))(*call.operands), whole_results(call))
