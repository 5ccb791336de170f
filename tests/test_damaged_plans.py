"""Plan files in which something is wrong: a PlanFileError or a plan that can be shown, never an error of Python."""

from __future__ import annotations

import copy
import json
import random

import jax
import jax.numpy as jnp
import pytest

import autoshard_ilp as autoshard

VALUES = (None, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "x", "", [], {}, [1], [[-1, -1]], True, {"a": 1}, -5.5)


def step(params, x):
    def loss(p):
        return jnp.sum(jnp.tanh(x @ p["up"]) @ p["down"])

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    args = ({"up": jnp.ones((16, 64)), "down": jnp.ones((64, 8))}, jnp.ones((32, 16)))
    plan = autoshard.optimize_fn(step, args, {"data": 2, "model": 4}, "40kB", hardware="h100")
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return path.read_text()


def places(data, prefix=()):
    yield prefix
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield from places(data[key], (*prefix, key))


def changed(data, path, rng):
    """``data`` with one value removed, repeated or replaced."""
    data = copy.deepcopy(data)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    kind = rng.random()
    if kind < 0.25:
        del holder[path[-1]]
    elif kind < 0.35 and isinstance(holder, list):
        holder.append(holder[path[-1]])
    else:
        holder[path[-1]] = rng.choice(VALUES)
    return data


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_file_is_refused_or_shown(seed, saved, tmp_path):
    rng, data = random.Random(seed), json.loads(saved)
    paths = [path for path in places(data) if path]
    refused = 0
    for _ in range(60):
        path = rng.choice(paths)
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(changed(data, path, rng)))
        try:
            plan = autoshard.load(file)
        except autoshard.PlanFileError:
            refused += 1
            continue
        assert plan.summary() and plan._repr_html_() and repr(plan), path
        assert len(plan.to_dataframe()) == len(plan.specs), path
        plan.save(file)
        assert autoshard.load(file).specs == plan.specs, path
    assert 10 < refused < 60


def replaced(saved, path, value):
    data = json.loads(saved)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("arguments", 1, "layout", 0), 2),  # a dimension that the tensor does not have
        (  # and one that does not divide
            ("arguments", 0),
            {"path": "args/0/down", "role": "parameter", "shape": [7, 8], "dtype": "float32", "layout": [0, -1]},
        ),
        (("course", "segments", 0, 4), -1.0),
        (("course", "at_s", 0), 1e9),
        (("course", "at_s", -1), 1e308),
        (("course", "held", "parameters", 0), 1e308),
        (("course", "segments", 0, 4), 1e308),
        (("arguments", 0, "path"), "\ud800"),
        (("lower_bound",), -1.0),
        (("lower_bound",), 1e3),  # of a step of microseconds
        (("gap",), 0.5),
        (("specs",), {}),
        (("cost", "per_kind"), "x"),
        (("memory", "gradients"), "x"),
        (("signature", "args"), {"tree": {"shape": [float("inf")], "dtype": "float32"}}),
        (("signature", "args"), {"tree": {"list": 3}}),
        (("mesh", "axis_names"), ["data", "data"]),
        (("mesh", "axis_names"), ["data", "model", "more"]),
        (("lower_bound",), float("nan")),
        (("batch_size",), int("9" * 30)),
    ],
)
def test_what_the_fields_say_must_agree(path, value, saved, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(replaced(saved, path, value))
    if path == ("batch_size",):  # odd, but only a number
        assert autoshard.load(file).batch_size == value
        return
    with pytest.raises(autoshard.PlanFileError):
        autoshard.load(file)


def test_deep_nesting_is_no_plan(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text("[" * 200_000)
    with pytest.raises(autoshard.PlanFileError):
        autoshard.load(file)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("placement", "of_op", 3), 0),
        (("placement", "via"), [[10**6, 0, []]]),
        (("placement", "via"), [[3, 0, [[5, 5]]]]),
        (("signature", "args", "tree", "tuple", 1, "dtype"), "float33"),
        (("signature", "args", "tree"), None),
    ],
)
def test_binding_refuses_layouts_that_the_step_cannot_take(path, value, saved, tmp_path):
    data = json.loads(saved)
    choices = data["placement"]["choices"]
    if path[:2] == ("placement", "of_op"):  # an operation that reads nothing gets the layouts of one that reads two
        value = next(i for i, (reads, _) in enumerate(choices) if len(reads) > 1)
        path = ("placement", "of_op", 0)
    file = tmp_path / "plan.json"
    file.write_text(replaced(saved, path, value))
    plan = autoshard.load(file)
    with pytest.raises(autoshard.PlanFileError):
        plan.bind(step)
