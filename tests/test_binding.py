"""Plans that come back from a file, calls with wrong arguments, and loops that say how often they run."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.calling import PlannedJit
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.saved import signature
from profiles_for_tests import toy

MESH = {"data": 2, "model": 4}


def optimize_fn(fn: Any, args: Any, **options: Any) -> autoshard.Plan:
    return autoshard.optimize_fn(fn, args, MESH, **{"hardware": toy(1e8), "progress": False, **options})


# -- functions come back from a file


def step(params: Any, batch: Any, rate: Any) -> Any:
    x, y = batch
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), {"loss": loss}


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(64, 128)) / 8, "down": rng.normal(size=(128, 16)) / 8}
    batch = rng.normal(size=(32, 64)), rng.normal(size=(32, 16))
    return (*jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch)), 0.1)


@pytest.fixture(scope="module")
def planned() -> autoshard.Plan:
    return optimize_fn(step, arguments())


@pytest.fixture
def file(planned: autoshard.Plan, tmp_path: Any) -> Any:
    planned.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_function_plan_runs_again_from_its_file(planned: autoshard.Plan, file: Any) -> None:
    assert any(any(spec) for path, spec in planned.specs.items() if path.startswith("args/0"))
    found = autoshard.load(file, step)
    assert found.fingerprint == autoshard.load(file).fingerprint == planned.fingerprint
    assert found.executable.donated == planned.executable.donated == (0,)
    want, got = planned.jit()(*arguments()), found.jit()(*arguments())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.array_equal(a, b) and a.sharding == b.sharding


def other_activation(params: Any, batch: Any, rate: Any) -> Any:
    x, y = batch
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.sin(x @ p["up"]) @ p["down"] - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), {"loss": loss}


def other_order(params: Any, batch: Any, rate: Any) -> Any:
    x, y = batch
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g * rate, params, grads), {"loss": loss}


def other_result(params: Any, batch: Any, rate: Any) -> Any:
    new, logs = step(params, batch, rate)
    return new, {"mean": logs["loss"]}


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (other_activation, "1 tanh"),
        (other_activation, "1 sin"),
        (other_order, "another order or on other values"),
        (other_result, "'outputs/1/mean'"),
        (lambda params, batch, rate: (params, {"loss": batch[0].sum().astype(jnp.float16)}), "dtype float16"),
        (lambda params, batch: params, "takes 2 positional arguments but 3 were given"),
        (3, "cannot be called"),
    ],
)
def test_another_function_is_refused(file: Any, fn: Any, said: str) -> None:
    with pytest.raises(autoshard.PlanMismatchError, match="made for") as caught:
        autoshard.load(file, fn)
    assert said in str(caught.value) and "Received" in str(caught.value)


def test_a_model_is_not_the_function_of_a_plan(file: Any) -> None:
    with pytest.raises(autoshard.PlanMismatchError, match="the Keras model"):
        autoshard.load(file, mlp())


def test_other_arguments_are_refused(file: Any) -> None:
    params, batch, rate = arguments()
    with pytest.raises(autoshard.PlanMismatchError, match=r"\(32, 64\).*\(16, 64\)"):
        autoshard.load(file, step, args=(params, (batch[0][:16], batch[1][:16]), rate))
    with pytest.raises(autoshard.PlanMismatchError, match="'args/0/a'"):
        autoshard.load(
            file,
            lambda p, *rest: step({"up": p["b"], "down": p["a"]}, *rest),
            args=({"a": params["down"], "b": params["up"]}, batch, rate),
        )
    with pytest.raises(autoshard.InputShapeError, match="batch_size"):
        autoshard.load(file, step, batch_size=3)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_arguments_that_are_classes_have_to_be_given(tmp_path: Any) -> None:
    def product(pair: Any) -> Any:
        return pair.left @ pair.right

    args = (Pair(jnp.ones((16, 64)), jnp.ones((64, 16))),)
    found = optimize_fn(product, args)
    found.save(tmp_path / "plan.json")
    with pytest.raises(autoshard.InputShapeError, match="Pass args="):
        autoshard.load(tmp_path / "plan.json", product)
    again = autoshard.load(tmp_path / "plan.json", product, args=args)
    np.testing.assert_array_equal(again.jit()(*args), np.full((16, 16), 64.0))


def leaf_specs() -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "bfloat16", "int4", "bool", "float8_e4m3fn"])
    weak = st.sampled_from(["float32", "int32"]).map(lambda d: jax.ShapeDtypeStruct((), d, weak_type=True))
    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    return st.builds(jax.ShapeDtypeStruct, shapes, dtypes) | weak | st.just(key)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.recursive(
        leaf_specs() | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_plain_arguments_survive_a_file(tree: Any) -> None:
    data = signature.encode(tree)
    assert data is not None
    found = signature.decode(json.loads(json.dumps(data)))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


@pytest.mark.parametrize("tree", [Pair(1.0, 2.0), {1: jnp.ones(2)}, [Pair(jnp.ones(1), None)], functools.partial(max)])
def test_other_containers_are_not_guessed(tree: Any) -> None:
    assert signature.encode(tree) is None


# -- models come back without saying their batch again


def mlp() -> keras.Model:
    model = keras.Sequential([layers.Dense(32, activation="relu", name="up"), layers.Dense(8, name="down")])
    model.compile(optimizer="adam", loss="mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(8, 16)).astype("float32"), rng.normal(size=(8, 8)).astype("float32")


@pytest.fixture(scope="module")
def model_plan() -> autoshard.Plan:
    x, y = data()
    return autoshard.optimize(mlp, MESH, hardware=toy(1e8), inputs=x, targets=y, progress=False)


def test_a_model_plan_remembers_its_batch(model_plan: autoshard.Plan, tmp_path: Any) -> None:
    model_plan.save(tmp_path / "plan.json")
    found = autoshard.load(tmp_path / "plan.json", mlp)  # a model whose inputs nothing else knows
    assert [leaf.shape for leaf in found.arguments] == [leaf.shape for leaf in model_plan.arguments]
    loss = [float(p.jit()(p.init_state(), data())[1]["loss"]) for p in (model_plan, found)]
    assert loss[0] == loss[1]


def test_another_model_is_told_apart(model_plan: autoshard.Plan, tmp_path: Any) -> None:
    def changed(optimizer: str = "adam", loss: str = "mse", activation: str = "relu") -> keras.Model:
        model = keras.Sequential([layers.Dense(32, activation=activation), layers.Dense(8)])
        model.compile(optimizer=optimizer, loss=loss)
        return model

    model_plan.save(tmp_path / "plan.json")
    stored = autoshard.load(tmp_path / "plan.json")
    for options, said in (
        ({"optimizer": "sgd"}, "'sgd' instead of 'adam'"),
        ({"loss": "mae"}, "1 abs"),
        ({"activation": "tanh"}, "1 tanh"),
    ):
        with pytest.raises(autoshard.PlanMismatchError) as caught:
            stored.bind(lambda options=options: changed(**options))
        assert said in str(caught.value), str(caught.value)


def test_versions_are_named_when_they_changed(model_plan: autoshard.Plan) -> None:
    kept = {**model_plan.signature, "versions": {"jax": "0.1", "keras": model_plan.signature["versions"]["keras"]}}
    old = dataclasses.replace(model_plan, signature=kept)
    with pytest.raises(autoshard.PlanMismatchError, match=r"made with jax 0\.1 \(now "):
        old.bind(lambda: keras.Sequential([keras.Input((16,)), layers.Dense(8)]), mode="predict")


def test_the_fingerprint_is_of_what_runs(model_plan: autoshard.Plan, planned: autoshard.Plan) -> None:
    x, y = data()
    again = autoshard.optimize(mlp, MESH, hardware=toy(1e8), inputs=x, targets=y, progress=False)
    assert again.fingerprint == model_plan.fingerprint and len(again.fingerprint) == 64
    pinned = autoshard.optimize(
        mlp, MESH, hardware=toy(1e8), inputs=x, targets=y, progress=False, pins={"up/kernel": P()}
    )
    others = {model_plan.fingerprint, planned.fingerprint, pinned.fingerprint}
    others.add(dataclasses.replace(model_plan, remat_policy="full").fingerprint)
    assert len(others) == 4
    renamed = dataclasses.replace(
        model_plan, arguments=tuple(dataclasses.replace(a, path=f"x{a.path}") for a in model_plan.arguments)
    )
    assert renamed.fingerprint == model_plan.fingerprint


# -- calls with wrong arguments


@pytest.fixture(scope="module")
def ready(model_plan: autoshard.Plan) -> Any:
    """The compiled step and a state, which no failing call may consume."""
    return model_plan.jit(), model_plan.init_state()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, b: (s,), "2 positional arguments"),
        (lambda s, b: (s, b, b), "2 positional arguments"),
        (lambda s, b: (s, b[:1]), "structure"),
        (lambda s, b: (s, (*b, b[0])), "structure"),
        (lambda s, b: (s[:3], b), "structure"),
        (lambda s, b: (s, {"x": b[0], "y": b[1]}), "structure"),
        (lambda s, b: (s, (b[0][:4], b[1][:4])), "(4, 16) instead of (8, 16)"),
        (lambda s, b: (s, (b[0].astype(complex), b[1])), "complex64 instead of float32"),
        (lambda s, b: (s, (b[0], "y")), "of type str"),
        (lambda s, b: (jax.tree.map(lambda v: v.astype("bfloat16"), s), b), "bfloat16 instead of"),
        (lambda s, b: (jax.device_put(s, jax.sharding.NamedSharding(other_mesh(), P())), b), "laid out as planned"),
    ],
)
def test_a_wrong_call_is_explained(ready: Any, change: Any, said: str) -> None:
    call, state = ready
    with pytest.raises(autoshard.PlanMismatchError) as caught:
        call(*change(state, data()))
    assert said in str(caught.value) and "Received" in str(caught.value)
    assert not any(value.is_deleted() for value in jax.tree.leaves(state))


def other_mesh() -> Any:
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def test_a_wrong_call_of_the_bare_step_or_of_lower_is_explained(model_plan: autoshard.Plan, ready: Any) -> None:
    (_, state), (x, y) = ready, data()
    for function in (model_plan.step, jax.jit(model_plan.step), model_plan.jit().lower):
        with pytest.raises(autoshard.PlanMismatchError, match="structure"):
            function(state, (x,))
        with pytest.raises(autoshard.PlanMismatchError, match="instead of"):
            function(state, (x, y[:4]))
    with pytest.raises(autoshard.PlanMismatchError, match="keywords"):
        model_plan.jit()(state, batch=(x, y))
    assert model_plan.jit().lower(*model_plan.abstract_args()).compile().as_text()


def test_inputs_of_a_smaller_kind_are_converted_and_a_donated_state_is_named(ready: Any) -> None:
    call, state = ready
    x, y = (np.round(v * 3) for v in data())
    want = call(jax.tree.map(jnp.copy, state), (x, y))[1]["loss"]
    got = call(state, (x.astype("int64"), y.astype("bfloat16")))[1]["loss"]
    assert float(got) == float(want)
    with pytest.raises(autoshard.PlanMismatchError, match=r"up/kernel.*took over"):
        call(state, (x, y))


def test_an_error_of_the_computation_stays_its_own(model_plan: autoshard.Plan) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("from inside")

    with pytest.raises(ValueError, match="from inside") as caught:
        PlannedJit(fails, lambda args: None)(1)
    assert not isinstance(caught.value, autoshard.AutoshardError)


# -- loops that say how often they run


def trips(fn: Any, *args: Any, **options: Any) -> list[tuple[int, str]]:
    closed = jax.make_jaxpr(fn)(*args)
    n_args, n_out = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    graph = build_graph(
        closed,
        argument_paths=[f"a{i}" for i in range(n_args)],
        result_paths=[f"r{i}" for i in range(n_out)],
        **options,
    )
    return [(r.trip_count, r.params["counted"]) for r in graph.regions if r.kind == "while"]


X = jax.ShapeDtypeStruct((4, 4), "float32")
COMPARISONS = {"<": lax.lt, "<=": lax.le, ">": lax.gt, ">=": lax.ge, "!=": lax.ne}


def counted(init: int, step: int, limit: int, kind: str, by_carry: bool = False) -> Any:
    def fn(x: Any) -> Any:
        if by_carry:  # the limit is handed through by the loop
            start = (jnp.int32(init), jnp.int32(limit), x)
            return lax.while_loop(
                lambda c: COMPARISONS[kind](c[0], c[1]), lambda c: (c[0] + jnp.int32(step), c[1], c[2] @ c[2]), start
            )
        return lax.while_loop(
            lambda c: COMPARISONS[kind](c[0], jnp.int32(limit)), lambda c: (c[0] + step, c[1] @ c[1]), (init, x)
        )

    return fn


def runs(init: int, step: int, limit: int, kind: str) -> int | None:
    test = {"<": int.__lt__, "<=": int.__le__, ">": int.__gt__, ">=": int.__ge__, "!=": int.__ne__}[kind]
    count = 0
    while test(init, limit):
        init, count = init + step, count + 1
        if count > 100:
            return None
    return count


@settings(deadline=None, max_examples=80, derandomize=True)
@given(st.integers(-9, 9), st.integers(-3, 3), st.integers(-9, 9), st.sampled_from(sorted(COMPARISONS)), st.booleans())
def test_a_counted_loop_is_priced_at_its_count(init: int, step: int, limit: int, kind: str, by_carry: bool) -> None:
    expected = runs(init, step, limit, kind)
    wanted = (1, "unknown") if expected is None else (expected, "exact")
    assert trips(counted(init, step, limit, kind, by_carry), X) == [wanted]


def test_loops_that_do_not_say_are_unknown() -> None:
    def until_small(x: Any) -> Any:
        return lax.while_loop(lambda c: jnp.max(c) > 1e-3, lambda c: c @ c, x)

    def until_given(n: Any, x: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, c: c @ c, x)

    def doubling(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 100, lambda c: (c[0] * 2, c[1] @ c[1]), (1, x))

    def floats(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 5.0, lambda c: (c[0] + 1.0, c[1] @ c[1]), (0.0, x))

    n = jax.ShapeDtypeStruct((), "int32")
    assert (
        trips(until_small, X) == trips(until_given, n, X) == trips(doubling, X) == trips(floats, X) == [(1, "unknown")]
    )
    assert trips(until_small, X, while_trip_count=9) == [(9, "declared")]


def test_loops_that_may_stop_early_are_bounded() -> None:
    def search(x: Any) -> Any:
        def go_on(c: Any) -> Any:
            return jnp.logical_and(c[0] < 12, jnp.max(c[1]) > 1e-3)

        return lax.while_loop(go_on, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))

    assert trips(search, X) == [(12, "bound")]
    found = optimize_fn(search, (X,))
    assert any("at their most: 12" in note for note in found.notes)


def test_a_bound_that_only_guards_the_counter_says_nothing() -> None:
    found = optimize_fn(jax.random.poisson, (jax.random.key(0), X))
    assert any("whose number of iterations is not known" in note for note in found.notes)
    assert not any("at their most" in note for note in found.notes)
    assert found.cost.total_s < 1e-3
    assert trips(counted(0, 1, 2**31 - 1, "<"), X) == [(2**31 - 1, "exact")], "but a count is one, however large"


def test_nested_loops_multiply() -> None:
    def inner(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]

    def outer(x: Any) -> Any:
        return jax.jit(lambda v: lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 2, inner(c[1])), (10, v))[1])(x)

    assert trips(outer, X) == [(5, "exact"), (3, "exact")]
    assert autoshard.optimize_fn(outer, (X,), {"x": 1}, progress=False).cost.flops == 15 * 2 * 4**3


class Repeats(layers.Layer):
    """A product that is repeated under a while loop, whose count only the user may know."""

    def __init__(self, count: int | None = None) -> None:
        super().__init__()
        self.count = count

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x: Any) -> Any:
        limit = jnp.int32(self.count) if self.count else jnp.int32(x.sum())
        return lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] @ self.kernel), (0, x))[1]


def test_models_take_a_declared_count() -> None:
    def flops(count: int | None, **options: Any) -> tuple[float, tuple[str, ...]]:
        def build() -> keras.Model:
            x = keras.Input((16,))
            return keras.Model(x, Repeats(count)(x))

        found = autoshard.optimize(build, {"x": 1}, mode="predict", batch_size=8, progress=False, **options)
        return found.cost.flops, found.notes

    one = 2 * 8 * 16 * 16
    assert flops(5) == (5 * one, ())
    assert flops(None, while_trip_count=7) == (7 * one, ())
    unknown, notes = flops(None)
    assert unknown == one and "while_trip_count=" in notes[0]
    with pytest.raises(autoshard.InputShapeError, match="while_trip_count"):
        flops(5, while_trip_count=0)
