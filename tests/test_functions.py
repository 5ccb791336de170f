"""Plans of plain JAX functions: the numbers of one device, names, donation, errors."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from autoshard_ilp.functions import trace_function
from dear_compute import dear_compute

MESH = {"data": 2, "model": 4}
shape = jax.ShapeDtypeStruct


def plan(fn, args, mesh=MESH, **options):
    return autoshard.optimize_fn(fn, args, mesh, **{"hardware": dear_compute(), **options})


def run(found, args):
    """The planned step on eight devices; donation consumes copies, not the test's arrays."""
    copies = jax.tree.map(lambda x: jnp.array(x, copy=True), args)
    return found.jit()(*jax.device_put(copies, found.in_shardings))


def check_against_one_device(fn, args, found, rtol=1e-5):
    expected = jax.jit(fn)(*args)
    got = run(found, args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), got, expected)


def sharded(found):
    return {path for path, spec in found.specs.items() if spec != P()}


# -- a hand-written training step


def parameters():
    rng = np.random.default_rng(0)
    return {
        "up": jnp.asarray(rng.normal(size=(64, 128)) / 8, jnp.float32),
        "bias": jnp.zeros(128),
        "down": jnp.asarray(rng.normal(size=(128, 16)) / 8, jnp.float32),
    }


def batch():
    rng = np.random.default_rng(1)
    return (
        jnp.asarray(rng.normal(size=(32, 64)), jnp.float32),
        jnp.asarray(rng.normal(size=(32, 16)), jnp.float32),
    )


def predict(params, x):
    return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]


class Adam(NamedTuple):
    count: Any
    mean: Any
    square: Any


def adam_state(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Adam(jnp.zeros((), jnp.int32), zeros, zeros)


def train_step(params, adam, batch):
    x, y = batch
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
    count = adam.count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam.mean, grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, adam.square, grads)

    def update(p, m, v):
        return p - 1e-2 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-6)

    return jax.tree.map(update, params, mean, square), Adam(count, mean, square), {"loss": loss}


def training_args():
    params = parameters()
    return params, adam_state(params), batch()


@pytest.fixture(scope="module")
def training():
    return plan(train_step, training_args())


def test_training_step_gives_the_numbers_of_one_device(training):
    assert training.status == "optimal" and training.mode == "function"
    assert {"args/0/up", "args/0/down"} <= sharded(training)
    check_against_one_device(train_step, training_args(), training)


def test_training_step_is_named_by_its_keys(training):
    assert set(training.specs) == {
        *(f"args/0/{k}" for k in ("up", "bias", "down")),
        "args/1/count",
        *(f"args/1/{m}/{k}" for m in ("mean", "square") for k in ("up", "bias", "down")),
        "args/2/0",
        "args/2/1",
        "outputs/2/loss",
    }


def test_leading_state_is_donated_and_keeps_its_layout(training):
    roles = {leaf.path: leaf.role for leaf in training.arguments}
    assert {p for p, r in roles.items() if r == "parameter"} == {p for p in roles if p[:6] in ("args/0", "args/1")}
    assert training.executable.donated == (0, 1)
    before = {leaf.path: leaf.layout for leaf in training.arguments}
    after = {leaf.path: leaf.layout for leaf in training.results if leaf.path in before}
    assert len(after) == 10 and all(before[path] == layout for path, layout in after.items())
    args = jax.device_put(training_args(), training.in_shardings)
    new = training.jit()(*args)
    assert args[0]["up"].is_deleted() and not args[2][0].is_deleted()
    training.jit()(new[0], new[1], args[2])  # the new state fits the next step


def test_step_has_the_signature_of_the_function(training):
    assert len(training.in_shardings) == 3
    out = jax.jit(training.step)(*training_args())
    assert jax.tree.structure(out) == jax.tree.structure(train_step(*training_args()))
    with pytest.raises(autoshard.PlanMismatchError, match="structure it was planned for"):
        training.step(*training_args()[:2])


def test_a_tight_budget_shards_more_and_still_runs():
    free = plan(train_step, training_args(), {"x": 8}, hardware="h100")
    assert not sharded(free)  # so small a step is fastest without any communication
    tight = plan(
        train_step, training_args(), {"x": 8}, memory_budget=int(free.memory.peak_bytes * 0.6), hardware="h100"
    )
    assert tight.memory.peak_bytes <= free.memory.peak_bytes * 0.6
    assert sharded(tight)
    check_against_one_device(train_step, training_args(), tight)


def test_shapes_are_enough():
    args = jax.tree.map(lambda x: shape(x.shape, x.dtype), training_args())
    found = plan(train_step, args)
    assert found.specs == plan(train_step, training_args()).specs
    assert found.jit().lower(*found.abstract_args()).compile() is not None


def test_infeasible_budget():
    with pytest.raises(autoshard.InfeasibleError) as caught:
        plan(predict, (parameters(), batch()[0]), memory_budget=1000)
    assert caught.value.minimum_budget > 1000


def test_pins():
    found = plan(predict, (parameters(), batch()[0]), pins={"args/0/up": (None, "model"), "^outputs/": "data"})
    assert found.specs["args/0/up"] == P(None, "model") and found.specs["outputs/0"] == P("data")


# -- other kinds of functions


def test_forward_function_donates_nothing():
    args = (parameters(), batch()[0])
    found = plan(predict, args)
    assert found.executable.donated == () and "No argument is donated." in found.notes
    assert set(found.specs) == {"args/0/up", "args/0/bias", "args/0/down", "args/1", "outputs/0"}
    check_against_one_device(predict, args, found)


def test_scan():
    def rnn(weights, start, xs):
        def cell(h, x):
            h = jnp.tanh(h @ weights["hidden"] + x @ weights["input"])
            return h, h

        return jax.lax.scan(cell, start, xs)

    rng = np.random.default_rng(2)
    weights = {
        "hidden": jnp.asarray(rng.normal(size=(64, 64)) / 8),
        "input": jnp.asarray(rng.normal(size=(32, 64)) / 8),
    }
    args = (weights, jnp.zeros((16, 64)), jnp.asarray(rng.normal(size=(5, 16, 32))))
    args = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    found = plan(rnn, args)
    assert sharded(found) and not found.unknown
    check_against_one_device(rnn, args, found)


def test_jitted_function_with_constants_keys_and_python_numbers():
    table = jnp.arange(64.0 * 32).reshape(64, 32)

    @jax.jit
    def noisy(x, key, scale):
        return {"y": x @ table + scale * jax.random.normal(key, (x.shape[0], 32))}

    args = (jnp.ones((16, 64)), jax.random.key(3), 0.5)
    found = plan(noisy, args)
    expected, got = noisy(*args), found.jit()(*args)
    np.testing.assert_allclose(got["y"], expected["y"], rtol=1e-5)
    assert set(found.specs) == {"args/0", "args/1", "args/2", "outputs/y"}


def test_containers_of_other_libraries():
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "steps"], meta_fields=["name"])
    @dataclasses.dataclass
    class State:
        weight: Any
        steps: Any
        name: str

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(state.weight)
        return State(state.weight - 0.01 * gradient, state.steps + 1, state.name)

    args = (State(jnp.ones((64, 32)), jnp.int32(0), "net"), jnp.ones((16, 64)))
    found = plan(step, args)
    assert set(found.specs) == {"args/0/weight", "args/0/steps", "args/1"}  # the state alone comes back
    assert found.executable.donated == (0,)
    check_against_one_device(step, args, found)


def test_flax_nnx_step():
    nnx = pytest.importorskip("flax.nnx")
    graph, state = nnx.split(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))

    def step(state, x):
        gradient = jax.grad(lambda s: jnp.mean(nnx.merge(graph, s)(x) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient)

    args = (state, jnp.ones((16, 64)))
    found = plan(step, args)
    assert any("kernel" in path for path in found.specs)
    check_against_one_device(step, args, found)


# -- donation


def swap(a, b, c):
    return {"x": b}, a, jnp.sum(c)


def trio():
    return {"x": jnp.ones(4)}, {"x": jnp.zeros(4)}, jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("donate", "donated", "aliases"),
    [
        ((), (), {}),
        (0, (0,), {0: 0}),
        ((1,), (1,), {0: 1}),
        ((-1, 0), (0, 2), {0: 0}),
    ],
)
def test_explicit_donation(donate, donated, aliases):
    def fn(a, b, c):
        return {"x": b["x"] + 1}, a["x"], jnp.sum(c)

    traced = trace_function(fn, trio(), donate)
    assert (traced.donated, traced.aliases) == (donated, aliases)


def test_an_explicitly_donated_argument_finds_its_result_at_another_position():
    def fn(batch, state):
        return jnp.mean(batch), {"x": state["x"] + jnp.sum(batch)}

    traced = trace_function(fn, (jnp.ones((2, 3)), {"x": jnp.ones(4)}), donate_argnums=np.int64(1))
    assert traced.aliases == {1: 1} and traced.donated == (1,)
    assert [r.path for r in traced.results] == ["outputs/0", "args/1/x"]


@pytest.mark.parametrize(
    ("fn", "args", "donated"),
    [
        (lambda x: x + 1, (jnp.ones(4),), ()),  # one array in and out may as well be an activation
        (lambda s: {"x": s["x"] + 1}, ({"x": jnp.ones(4)},), (0,)),
        (lambda s: {"y": s["x"] + 1}, ({"x": jnp.ones(4)},), ()),
        (lambda s: ({"x": s["x"].astype(jnp.bfloat16)}, 1.0), ({"x": jnp.ones(4)},), ()),
        (lambda s, t: (s, t, 1.0), ({"x": jnp.ones(4)}, jnp.ones(3)), (0, 1)),
        (lambda s, t: (s, t[:2]), ({"x": jnp.ones(4)}, jnp.ones(3)), (0,)),
        (lambda s, t: (t, s), ({"x": jnp.ones(4)}, jnp.ones(3)), ()),
        (lambda: jnp.ones(3), (), ()),
    ],
)
def test_automatic_donation(fn, args, donated):
    assert trace_function(fn, args).donated == donated


@pytest.mark.parametrize("donate", [3, (0, 5), "all", (True,), (0.5,), -4])
def test_donation_of_no_argument(donate):
    with pytest.raises(autoshard.InputShapeError, match="positions of the 3 arguments"):
        trace_function(swap, trio(), donate)


def test_equal_names_are_told_apart():
    traced = trace_function(lambda t: t["a/b"] + t["a"]["b"], ({"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}},))
    assert [a.path for a in traced.arguments] == ["args/0/a/b", "args/0/a/b#2"]


# -- errors


def test_not_a_function():
    with pytest.raises(autoshard.UnsupportedModelError, match="Received: 3 of type int"):
        plan(3, ())


def test_a_keras_model_is_not_a_function():
    import keras

    with pytest.raises(autoshard.UnsupportedModelError, match=r"Use autoshard_ilp.optimize"):
        plan(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), (jnp.ones((2, 4)),))


def test_arguments_are_a_tuple():
    with pytest.raises(autoshard.InputShapeError, match=r"Received: list.*args=\(x,\)"):
        plan(jnp.sin, [jnp.ones(4)])


def test_arguments_are_arrays():
    with pytest.raises(autoshard.InputShapeError, match="args/0/mode = 'relu' of type str"):
        plan(lambda options: options["x"], ({"x": jnp.ones(2), "mode": "relu"},))


def test_functions_that_cannot_be_traced_say_why():
    def branch(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(autoshard.UnsupportedModelError, match=r"branch, which failed with TracerBoolConversionError"):
        plan(branch, (jnp.ones(4),))
    with pytest.raises(autoshard.UnsupportedModelError, match=r"missing 2 required positional arguments"):
        plan(train_step, (jnp.ones(4),))


def test_a_while_loop_is_priced_at_its_declared_count():
    def power(x, w):
        return jax.lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    args = (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32"))
    flops = [
        autoshard.optimize_fn(power, args, {"x": 1}, while_trip_count=count, progress=False).cost.flops
        for count in (1, 7)
    ]
    assert flops == [2 * 64**3, 7 * 2 * 64**3]
    with pytest.raises(autoshard.InputShapeError, match="while_trip_count"):
        autoshard.optimize_fn(power, args, {"x": 1}, while_trip_count=0)


def test_ordered_callbacks_run_in_order_on_several_devices(capfd):
    """JAX refuses those of ``jax.debug`` there; each is called once, as on one device."""
    seen = []

    def fn(x):
        def body(total, row):
            jax.debug.callback(lambda v: seen.append(float(v)), row[0], ordered=True)
            jax.debug.print("{:.0f} of {rows}", row[0], rows=total[1], ordered=True)
            return total + row, row.sum()

        return jax.grad(lambda x: jnp.sum(jax.lax.scan(body, x[0], x)[0] ** 2))(jnp.sin(x) * 0 + x)

    x = jnp.broadcast_to(jnp.arange(16.0)[:, None], (16, 8))
    check_against_one_device(fn, (x,), plan(fn, (x,), pins={"args/0": P("data", "model")}, donate_argnums=()))
    jax.effects_barrier()
    assert seen == [*range(16), *range(16)]  # alone, then planned
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 32 and lines[:16] == lines[16:]
