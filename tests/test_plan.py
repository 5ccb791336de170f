"""The plan as an object: what it names, what it predicts, and that a file brings all of it back."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.mesh import MeshSpec
from autoshard_ilp.placement import Placement
from autoshard_ilp.plan import Leaf, Plan
from autoshard_ilp.report import Cost, Memory, PlannedCollective
from autoshard_ilp.saved import planfile
from autoshard_ilp.sharding import divisible_layouts, local_shape
from profiles_for_tests import toy

MESH = {"data": 2, "model": 4}


def mlp() -> keras.Model:
    inputs = keras.Input((64,), name="x")
    h = layers.BatchNormalization(name="norm")(layers.Dense(256, activation="relu", name="up")(inputs))
    model = keras.Model(inputs, layers.Dense(16, name="down")(layers.Dropout(0.1)(h)))
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.optimize(mlp, MESH, "16MB", hardware=toy(1e8), batch_size=32, progress=False)


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(32, 64)).astype("float32"), rng.normal(size=(32, 16)).astype("float32")


def test_specs_cover_every_variable_input_and_output(plan: autoshard.Plan) -> None:
    model = plan.executable.traced.model
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    variables += [*model.optimizer.variables, *model.metrics_variables]
    assert {v.path for v in variables} <= plan.specs.keys()
    assert {"inputs/x", "targets/down", "outputs/loss", "outputs/mae"} <= plan.specs.keys()
    assert all(isinstance(spec, P) for spec in plan.specs.values())
    for v in variables:
        assert len(plan.specs[v.path]) <= len(v.shape)


def test_shardings_have_the_structure_of_the_step(plan: autoshard.Plan) -> None:
    args = plan.abstract_args()
    assert jax.tree.structure(plan.in_shardings) == jax.tree.structure(args)
    assert all(isinstance(s, NamedSharding) for s in jax.tree.leaves((plan.in_shardings, plan.out_shardings)))
    for arg, sharding in zip(jax.tree.leaves(args), jax.tree.leaves(plan.in_shardings), strict=True):
        assert arg.sharding == sharding
        assert math.prod(sharding.shard_shape(arg.shape)) <= math.prod(arg.shape)
    state, logs = jax.eval_shape(plan.step, *args)
    assert jax.tree.structure((state, logs)) == jax.tree.structure(plan.out_shardings)
    compiled = plan.jit().lower(*args).compile()
    assert compiled.memory_analysis().alias_size_in_bytes > 0, "the state is donated"


def test_state_is_born_sharded_and_stays_so(plan: autoshard.Plan) -> None:
    state = plan.init_state(seed=3)
    again = plan.init_state(seed=3)
    other = plan.init_state(seed=4)
    flat = list(zip(plan.arguments, jax.tree.leaves(state), jax.tree.leaves(again), strict=False))
    assert any(max(leaf.layout) >= 0 for leaf, _, _ in flat)
    for leaf, array, same in flat:
        assert array.sharding.spec == plan.specs[leaf.path]
        shard = local_shape(leaf.shape, leaf.layout, plan.mesh.axis_sizes)
        assert all(s.data.shape == shard for s in array.addressable_shards)
        assert np.array_equal(array, same)
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(again), strict=True))
    step = plan.jit()
    new, logs = step(state, batch())
    new, logs = step(new, batch())
    assert set(logs) == {"loss", "mae"}
    for leaf, array in zip(plan.arguments, jax.tree.leaves(new), strict=False):
        assert array.sharding.spec == plan.specs[leaf.path]


def test_predictions_add_up(plan: autoshard.Plan) -> None:
    cost, memory = plan.cost, plan.memory
    assert cost.total_s == pytest.approx(cost.compute_s + cost.communication_s, rel=1e-12)
    moved = sum(c.seconds * c.count for c in plan.collectives)
    assert moved == pytest.approx(cost.communication_s, rel=1e-9)
    assert sum(cost.per_axis.values()) == pytest.approx(sum(cost.per_kind.values()), rel=1e-9) == pytest.approx(moved)
    assert sum(memory.parts.values()) == memory.peak_bytes <= memory.budget_bytes == 16_000_000
    assert plan.status == "optimal" and plan.gap == 0.0
    assert plan.lower_bound == pytest.approx(cost.total_s, rel=1e-6)
    assert {"trace", "graph", "strategies", "costs", "presolve", "solve"} <= plan.timings.keys()
    assert all(s >= 0 for s in plan.timings.values())
    for c in plan.collectives:
        assert c.bytes_per_device > 0 and c.count >= 1 and set(c.mesh_axes) <= set(MESH)


def test_the_trail_holds_every_stage(plan: autoshard.Plan) -> None:
    trail = plan.trail
    choices = trail.solution.choices
    assert len(choices) == len(trail.program.nodes) == len(trail.costs.classes)
    assert trail.program.cost(choices) == pytest.approx(plan.cost.total_s, rel=1e-9)
    assert trail.program.peak(choices) == plan.memory.peak_bytes
    assert {d["kind"] for _, d in trail.graph.networkx().nodes(data=True)} == {"op", "tensor"}
    assert len(trail.jaxpr.jaxpr.invars) == len(plan.arguments)
    whole = [0 if len(n.costs) else -1 for n in trail.program.nodes]
    assert trail.program.cost(whole) >= plan.cost.total_s


def test_a_plan_shows_itself(plan: autoshard.Plan) -> None:
    text = plan.summary()
    for part in ("kernel", "optimal", "data=2, model=4", "toy", "all-"):
        assert part in text
    assert "optimal" in repr(plan) and "\n" not in repr(plan)
    size = autoshard.units.format_bytes(plan.memory.peak_bytes).split(" (")[0]
    assert repr(plan).endswith(f", peak {size})") and "B" in size and not size.startswith("0.0")
    page = plan._repr_html_()
    assert "kernel" in page and page.startswith("<") and "<script" not in page
    assert max(map(len, plan.summary(width=90).splitlines())) <= 90


def test_a_plan_is_a_table(plan: autoshard.Plan) -> None:
    frame = plan.to_dataframe()
    assert {"path", "role", "shape", "dtype", "spec", "bytes_per_device"} <= set(frame.columns)
    assert set(frame["path"]) == set(plan.specs)
    row = frame.set_index("path").loc["up/kernel"]
    assert row["bytes_per_device"] == 4 * math.prod(local_shape((64, 256), _layout(plan, "up/kernel"), (2, 4)))


def _layout(plan: autoshard.Plan, path: str) -> tuple[int, ...]:
    return next(leaf.layout for leaf in plan.arguments if leaf.path == path)


def test_a_file_brings_everything_back(plan: autoshard.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    found = autoshard.load(path)
    assert planfile.to_dict(found) == planfile.to_dict(plan)
    assert found.specs == plan.specs and found.collectives == plan.collectives
    assert found.cost == plan.cost and found.memory == plan.memory and found.summary() == plan.summary()
    assert found.trail is None
    bound = found.bind(mlp)
    wanted = plan.jit()(plan.init_state(), batch())
    reloaded = bound.jit()(bound.init_state(), batch())
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(reloaded), strict=True):
        assert np.array_equal(a, b)
    plan.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "no temporary file is left behind"


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=8)
AXES = st.text(st.characters(codec="ascii", exclude_characters="\\"), min_size=1, max_size=8)  # what a mesh may have
SECONDS = st.floats(0, 1e3)
SIZES = st.integers(1, 2**50)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that a file can hold; only its parts need to be well formed."""
    axes = draw(st.lists(AXES, min_size=1, max_size=3, unique=True))
    sizes = tuple(draw(st.integers(1, 4)) for _ in axes)

    def leaf(path: str) -> Leaf:
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        layout = draw(st.sampled_from(divisible_layouts(shape, sizes)))
        return Leaf(path, draw(NAMES), shape, draw(st.sampled_from(["float32", "bfloat16", "int32"])), layout)

    arguments = tuple(leaf(name) for name in draw(st.lists(NAMES, max_size=3, unique=True)))
    layouts = [leaf.layout for leaf in arguments] or [(-1,) * len(sizes)]
    choice = st.tuples(
        st.lists(st.none() | st.sampled_from(layouts), max_size=2).map(tuple),
        st.lists(st.sampled_from(layouts), max_size=2).map(tuple),
    )
    choices = tuple(draw(st.lists(choice, min_size=1, max_size=3)))
    of_op = tuple(draw(st.lists(st.integers(0, len(choices) - 1), max_size=5)))
    collective = st.builds(
        PlannedCollective,
        NAMES,
        SECONDS,
        st.lists(st.sampled_from(axes)).map(tuple),
        SECONDS,
        NAMES,
        NAMES,
        NAMES,
        SECONDS,
    )
    times = st.dictionaries(NAMES, SECONDS, max_size=2)
    contributors = st.lists(st.tuples(NAMES, st.integers(0, 2**50)), max_size=2).map(tuple)
    total, gap = draw(st.floats(1e-9, 1e3)), draw(st.floats(0, 1))
    return Plan(
        mesh=MeshSpec(tuple(axes), sizes),
        hardware=draw(NAMES),
        mode=draw(st.sampled_from(["train", "predict", "function"])),
        batch_size=draw(st.integers(0, 10**6)),
        objective="step_time",
        arguments=arguments,
        results=tuple(leaf(f"outputs/{i}") for i in range(draw(st.integers(0, 2)))),
        cost=Cost(total, draw(SECONDS), draw(SECONDS), draw(times), draw(times), draw(SECONDS)),
        collectives=tuple(draw(st.lists(collective, max_size=2))),
        memory=Memory(
            draw(st.integers(0, 2**50)), draw(st.none() | st.integers(1, 2**50)), contributors=draw(contributors)
        ),
        status=draw(st.sampled_from(["optimal", "feasible"])),
        lower_bound=total * (1 - gap),
        gap=gap,
        timings=draw(times),
        placement=Placement(choices, of_op, draw(NAMES)),
        unknown=tuple(draw(st.lists(NAMES, max_size=2))),
        notes=tuple(draw(st.lists(NAMES, max_size=2))),
        origin=draw(st.dictionaries(NAMES, st.none() | st.integers() | NAMES, max_size=2)),
    )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(plans())
def test_any_plan_survives_its_file(plan: Plan) -> None:
    text = json.dumps(planfile.to_dict(plan))
    found = planfile.from_dict(json.loads(text))
    assert planfile.to_dict(found) == planfile.to_dict(plan)
    for name in ("mesh", "arguments", "results", "cost", "collectives", "memory", "placement", "lower_bound", "notes"):
        assert getattr(found, name) == getattr(plan, name)
    assert found.specs == plan.specs
    assert found.summary() == plan.summary()


def test_a_live_model_keeps_its_weights() -> None:
    model: Any = mlp()
    before = [np.array(v.value) for v in model.trainable_variables]
    plan = autoshard.optimize(model, MESH, hardware=toy(1e8), batch_size=32, progress=False)
    state = plan.init_state()
    for value, array in zip(before, state[0], strict=True):
        assert np.array_equal(value, array)
    plan.jit()(state, batch())
    for value, v in zip(before, model.trainable_variables, strict=True):
        assert np.array_equal(value, v.value), "a donated state is not the model's own"


def test_a_pickled_plan_is_what_its_file_holds(plan: autoshard.Plan) -> None:
    """As in a pool of processes: layouts and predictions travel, and the model is bound again."""
    found = pickle.loads(pickle.dumps(plan))
    assert planfile.as_text(found) == planfile.as_text(plan)
    assert found.specs == plan.specs and found.fingerprint == plan.fingerprint
    with pytest.raises(autoshard.UnsupportedModelError, match="unpickled, holds layouts, not the model"):
        found.jit()
    with pytest.raises(autoshard.PlanFileError, match="a pickled plan, which is damaged"):
        planfile.parsed(planfile.as_text(plan)[:-9])


def test_copies_of_a_plan_share_its_step(plan: autoshard.Plan) -> None:
    for made in (copy.copy(plan), copy.deepcopy(plan), copy.deepcopy({"plans": [plan]})["plans"][0]):
        assert made is not plan and made.executable is plan.executable and made.trail is plan.trail
        assert made.specs == plan.specs
