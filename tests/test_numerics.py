"""A planned step computes what the unplanned one does: every model of the zoo, three steps, every state variable.

How far two correct programs may differ. They sum in another order, so every intermediate value differs by rounding,
as it would if the parameters were off by half a unit in the last place. Most state barely moves under that; but an
optimizer that divides by the size of the gradient (Adam) turns a gradient that is zero but for rounding (of a bias in
front of a normalisation, of the bias of attention keys) into a step of full size and random direction. No single
tolerance separates the two, and names should not. So the unplanned step runs ``SHAKEN`` more times, from parameters
perturbed by one rounding error each, and each variable of the planned run may differ from the reference by ``NOISE``
times as much as the worst of these runs does, in the norm, plus ``TOLERANCE`` of its own norm. Slots and gradients'
moments are compared likewise, so a gradient that is wrong by a factor shows even where Adam's step hides it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.placement import decisions
from profiles_for_tests import toy
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("quick_code")

ONE, TWO, THREE = {"data": 8}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2}
MESH_OF = {
    "mlp_loss_scaling": THREE,
    "mlp_adafactor": THREE,
    "sequential": THREE,
    "multi_input_output": THREE,
    "mlp_accumulation_ema": TWO,
    "mobilenet": TWO,
    "llama": TWO,
    "mixtral": TWO,
    "tied_embeddings": TWO,
}  # the others: ONE
SLOW = [
    ("efficientnet", TWO),
    ("unet", TWO),
    ("gru", TWO),
    ("bert", ONE),
    ("lora", THREE),
    ("gemma", ONE),
    ("vit", THREE),
    ("gpt2", THREE),
]
HARDWARE = toy(1e8, 1e12)  # so slow at arithmetic that even tiny matmuls are worth splitting
COMMUNICATION = toy(1e11, 1e18)  # only matmuls and bytes over the links count
SOLVER = autoshard.SolverOptions(time_limit=20.0)
STEPS = 3
TOLERANCE = 1e-5
NOISE = 20.0
SHAKEN = 5


def plan_of(model: Any, mesh: dict[str, int], batch: Any, **options: Any) -> autoshard.Plan:
    if len(batch) > 1:
        options["targets"] = batch[1]
    options = {"hardware": HARDWARE, "solver": SOLVER, **options}
    plan = autoshard.optimize(model, mesh, inputs=batch[0], progress=False, **options)
    assert not plan.unknown
    return plan


def rounding(plan: autoshard.Plan) -> float:
    """Unit roundoff of the coarsest floating point type that the step computes in."""
    dtypes = {t.dtype for t in plan.executable.graph.tensors if t.shape}
    return max(float(jnp.finfo(d).eps) / 2 for d in dtypes if d.startswith(("float", "bfloat")))


def perturbed(plan: autoshard.Plan, state: Any, seed: int) -> Any:
    """``state`` with every parameter off by one rounding error."""
    rng, size = np.random.default_rng(seed), rounding(plan)
    flat, tree = jax.tree.flatten(state)
    for i, leaf in enumerate(plan.arguments[: len(flat)]):
        if leaf.role == "parameter":
            off = 1 + size * rng.choice([-1.0, 1.0], leaf.shape)
            flat[i] = np.asarray(np.asarray(flat[i], np.float64) * off, flat[i].dtype)
    return jax.tree.unflatten(tree, flat)


def distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)))


def assert_same_training(plan: autoshard.Plan, batch: Any, steps: int = STEPS) -> None:
    """Runs planned and unplanned steps from the same state and compares losses and all state."""
    planned, unplanned = plan.jit(), jax.jit(plan.executable.traced.fn)
    state = plan.init_state()
    for array, leaf in zip(jax.tree.leaves(state), plan.arguments, strict=False):
        assert array.sharding.spec == plan.specs[leaf.path], leaf.path
    reference = jax.device_get(state)
    shaken = [perturbed(plan, reference, seed) for seed in range(SHAKEN)]
    size = rounding(plan)
    for _ in range(steps):
        state, logs = planned(state, batch)
        reference, expected = unplanned(reference, batch)
        shaken = [unplanned(one, batch)[0] for one in shaken]
        assert logs.keys() == expected.keys()
        for name, value in expected.items():
            assert float(logs[name]) == pytest.approx(float(value), rel=max(1e-5, 4 * size)), name
    flat = zip(*map(jax.tree.leaves, (state, reference, *shaken)), strict=True)
    for leaf, (found, wanted, *noisy) in zip(plan.arguments, flat, strict=False):
        assert found.dtype == wanted.dtype
        if not jnp.issubdtype(found.dtype, jnp.floating):
            assert np.array_equal(found, wanted), leaf.path
            continue
        allowed = TOLERANCE * float(np.linalg.norm(np.asarray(wanted, np.float64)))
        allowed += NOISE * max(distance(one, wanted) for one in noisy)
        assert distance(found, wanted) <= allowed, leaf.path


def shards_something(plan: autoshard.Plan) -> bool:
    parameters = [leaf for leaf in plan.arguments if leaf.role == "parameter" and len(leaf.shape) >= 2]
    return any(max(leaf.layout) >= 0 for leaf in parameters) or bool(plan.collectives)


def cases() -> list[Any]:
    only_slow = {name for name, _ in SLOW} - {"gpt2"}
    quick = [(name, MESH_OF.get(name, ONE), ()) for name in ZOO if name not in only_slow]
    all_cases = [*quick, *((name, mesh, (pytest.mark.slow,)) for name, mesh in SLOW)]
    return [pytest.param(n, m, id=f"{n}-{'x'.join(map(str, m.values()))}", marks=marks) for n, m, marks in all_cases]


@pytest.mark.parametrize(("name", "mesh"), cases())
def test_every_model_trains_as_without_a_plan(name: str, mesh: dict[str, int]) -> None:
    batch = ZOO[name].make_batch(np.random.default_rng(0))
    plan = plan_of(ZOO[name].build, mesh, batch)
    assert plan.gap < 0.05 and shards_something(plan)
    assert_same_training(plan, batch)


@pytest.mark.parametrize(
    ("name", "mesh"), [("mlp", THREE), ("resnet", TWO), pytest.param("llama", ONE, marks=pytest.mark.slow)]
)
def test_predictions_are_those_of_the_unplanned_model(name: str, mesh: dict[str, int]) -> None:
    batch = ZOO[name].make_batch(np.random.default_rng(0))[:1]
    plan = plan_of(ZOO[name].build, mesh, batch, mode="predict")
    assert shards_something(plan) or any(max(r.layout) >= 0 for r in plan.results)
    state = plan.init_state()
    reference = jax.jit(plan.executable.traced.fn)(jax.device_get(state), batch)[1]
    found = plan.jit()(state, batch)[1]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        assert a.shape == b.shape and distance(a, b) <= 1e-5 * float(np.linalg.norm(b))


@pytest.mark.parametrize("role", ["parameter", "optimizer"])
def test_the_comparison_sees_an_error_of_one_in_a_thousand(role: str) -> None:
    batch = ZOO["sequential"].make_batch(np.random.default_rng(0))
    plan = plan_of(ZOO["sequential"].build, ONE, batch)
    wrong = next(i for i, leaf in enumerate(plan.arguments) if leaf.role == role and len(leaf.shape) == 2)
    right = plan.executable.traced.fn

    def spoiled(state: Any, batch: Any) -> Any:
        state, logs = right(state, batch)
        flat, tree = jax.tree.flatten(state)
        flat[wrong] = flat[wrong] * 1.0003
        return jax.tree.unflatten(tree, flat), logs

    traced = dataclasses.replace(plan.executable.traced, fn=spoiled)
    other = dataclasses.replace(plan, executable=dataclasses.replace(plan.executable, traced=traced))
    with pytest.raises(AssertionError, match=re.escape(plan.arguments[wrong].path)):
        assert_same_training(other, batch, steps=1)


# -- decisions that change the program --


def deep(width: int = 256, depth: int = 3) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        x = inputs = keras.Input((width,), name="x")
        for i in range(depth):
            x = layers.Dense(width, activation="tanh", name=f"block_{i}")(x)
        model = keras.Model(inputs, layers.Dense(8)(x))
        model.compile(optimizer="adam", loss="mse")
        return model

    return build


def deep_batch(rows: int, width: int = 256) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, width)).astype("float32"), rng.normal(size=(rows, 8)).astype("float32")


def test_weights_gathered_again_in_the_backward_pass() -> None:
    """Column-sharded weights of a data-parallel step under a budget that cannot hold the gathered copies."""
    batch = deep_batch(512)
    pins = {r"block_\d/kernel$": (None, "data"), "inputs|targets": "data"}
    options = {"pins": pins, "remat": "never", "hardware": COMMUNICATION}
    free = plan_of(deep(), {"data": 4}, batch, **options)
    tight = plan_of(deep(), {"data": 4}, batch, memory_budget=int(0.85 * free.memory.peak_bytes), **options)
    again = decisions(tight.executable.graph, tight.placement).regather
    assert len(again) > len(decisions(free.executable.graph, free.placement).regather)
    gathered = [c.tensor for c in tight.collectives if c.kind == "all-gather" and c.tensor.startswith("block")]
    assert len(gathered) - len(set(gathered)) == len(again), "what is priced twice is done twice"
    assert tight.memory.peak_bytes < free.memory.peak_bytes
    compiled = tight.jit().lower(*tight.abstract_args()).compile().as_text()
    whole_weights = re.findall(r"= f32\[256,256\]\S* all-gather\(", compiled)
    assert len(whole_weights) >= len(gathered)
    assert_same_training(tight, batch)


def residual(width: int = 64, depth: int = 4) -> keras.Model:
    x = inputs = keras.Input((width,), name="x")
    for i in range(depth):
        h = layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(layers.LayerNormalization(name=f"norm_{i}")(x))
        x = x + layers.Dense(width, name=f"down_{i}")(h)
    model = keras.Model(inputs, layers.Dense(8, name="head")(x))
    model.compile(optimizer="adam", loss="mse")
    return model


def test_activations_computed_again_under_a_tight_budget() -> None:
    batch = deep_batch(2048, 64)
    options = {"pins": {"inputs|targets": "data"}, "hardware": COMMUNICATION}
    kept = plan_of(residual, {"data": 4}, batch, remat="never", **options)
    plan = plan_of(residual, {"data": 4}, batch, remat="full", **options)
    assert plan.memory.peak_bytes < 0.8 * kept.memory.peak_bytes
    assert plan.cost.total_s > kept.cost.total_s, "computing twice takes time"
    assert_same_training(plan, batch)


@pytest.mark.parametrize("vocabulary", [257, 131])
def test_a_prime_vocabulary_is_no_obstacle(vocabulary: int) -> None:
    """No argument is sharded over a dimension that does not divide, and the step runs, whatever its budget."""
    mesh = {"model": 4}

    def build() -> keras.Model:
        tokens = keras.Input((8,), dtype="int32", name="tokens")
        x = layers.Embedding(vocabulary, 32, name="embedding")(tokens)
        model = keras.Model(tokens, layers.Dense(vocabulary, name="head")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss)
        return model

    rng = np.random.default_rng(0)
    batch = tuple(rng.integers(0, vocabulary, size=(8, 8)).astype("int32") for _ in range(2))
    free = plan_of(build, mesh, batch)
    tight = plan_of(build, mesh, batch, memory_budget=free.memory.peak_bytes * 39 // 40)  # 0.97 of it is the least
    for plan in (free, tight):
        for leaf in (*plan.arguments, *plan.results):
            sharded = {dim for dim in leaf.layout if dim >= 0}
            assert all(leaf.shape[dim] % 4 == 0 for dim in sharded), leaf
    assert_same_training(tight, batch)
    with pytest.raises(autoshard.InputShapeError, match=rf"dimension 0 of size {vocabulary}"):
        plan_of(build, mesh, batch, pins={"embedding": ("model",)})
