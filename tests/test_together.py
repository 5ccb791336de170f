"""Mesh axes that go together where a mesh has too many for all of their combinations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import keras
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.costs import together as together_module
from autoshard_ilp.costs.collectives import CollectiveCosts
from autoshard_ilp.costs.profile import load_profile
from autoshard_ilp.costs.together import FEW_AXES, MOST_ASSIGNMENTS, MOST_OF_THREE, axes_together, least_seconds
from autoshard_ilp.costs.topology import MeshLinks
from autoshard_ilp.deferral import Deferral
from autoshard_ilp.rules import rule_for
from autoshard_ilp.rules.rule import OpView
from autoshard_ilp.sharding import WHOLE, jointly, keeps_together
from autoshard_ilp.strategies import Strategy, choices_per_axis, hub_strategies, layouts_of, strategies_of
from profiles_for_tests import toy

pytestmark = pytest.mark.usefixtures("quick_code")

NAMES = ("a", "b", "c", "d")
MANY = MOST_ASSIGNMENTS // 5**4 + 1  # decisions of five choices each: too many on four axes, and few on three
HARDWARE = toy(1e8, 1e12)  # so slow at arithmetic that even tiny matmuls are worth splitting


def _links(sizes: tuple[int, ...], hardware: str = "h100") -> CollectiveCosts:
    return CollectiveCosts(MeshLinks.create(load_profile(hardware), NAMES[: len(sizes)], sizes, None))


def test_axes_that_go_together_choose_alike():
    choices = [(0, 1, 2)] * 4
    for groups in ((), ((1, 2),), ((0, 3), (1, 2)), ((0, 1, 2, 3),)):
        wanted = {x for x in itertools.product(*choices) if keeps_together(x, groups)}
        found = list(jointly(choices, groups))
        assert len(found) == len(wanted) and set(found) == wanted


def _all_layouts(s: Strategy) -> list[tuple[int, ...]]:
    return [x for x in (*s.operands, *s.results, s.partial) if x is not None]


@pytest.mark.parametrize("groups", [((1, 2),), ((0, 2),), ((0, 1, 2),)])
@pytest.mark.parametrize("deferral", [Deferral(), Deferral(leaves=True, local=True)])
def test_strategies_are_those_of_all_that_keep_axes_together(groups, deferral):
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": None, "preferred_element_type": None}
    shapes = (64, 128), (128, 32), (64, 32)
    rule = rule_for(OpView("dot_general", shapes[:2], shapes[2:], ("float32",) * 2, ("float32",), params))
    asked: Any = (rule, shapes[:2], shapes[2:], (2, 2, 4))
    every = strategies_of(*asked, deferral=deferral)
    kept = {s for s in every if all(keeps_together(x, groups) for x in _all_layouts(s))}
    found = strategies_of(*asked, deferral=deferral, together=groups)
    assert set(found) == kept and len(found) == len(kept) < len(every)
    assert choices_per_axis(rule) == 4  # nothing, two dimensions that pass through, and the one that is summed

    layouts = [x for x in layouts_of((64, 33), (2, 2, 4)) if keeps_together(x, groups)]
    hub = hub_strategies((64, 33), (2, 2, 4), may_reuse=False, together=groups)
    assert [s.results[0] for s in hub] == layouts


def test_few_axes_and_small_programs_are_left_alone():
    for sizes, most in (((2, 2, 2), MOST_OF_THREE), ((2, 2, 1, 2), MOST_OF_THREE), ((2, 2, 2, 2), MOST_ASSIGNMENTS)):
        few = most // 5 ** (4 - sizes.count(1) - (len(sizes) == 3))
        assert axes_together([5] * few, sizes, _links(sizes)) == ()
        assert axes_together([5] * (few + 1), sizes, _links(sizes)) != ()
    assert axes_together([5] * 10 * MOST_OF_THREE, (2, 4), _links((2, 4))) == ()


@pytest.mark.parametrize(
    ("sizes", "hardware", "wanted"),
    [
        ((2, 2, 2, 2), "h100", ((1, 2),)),  # the first one spans two nodes of eight
        ((2, 4, 4, 4), "tpu-v5p", ((0, 1),)),  # fewest devices
        ((4, 4, 2, 2), "tpu-v5p", ((2, 3),)),
    ],
)
def test_alike_links_and_few_devices_go_first(sizes, hardware, wanted):
    assert axes_together([5] * MANY, sizes, _links(sizes, hardware)) == wanted


def test_five_axes_go_into_three():
    collectives = CollectiveCosts(MeshLinks.create(load_profile("tpu-v5p"), tuple("abcde"), (2,) * 5, None))
    groups = axes_together([5] * MANY, (2,) * 5, collectives)
    assert sum(len(g) - 1 for g in groups) == 2
    groups = axes_together([5] * MOST_OF_THREE, (2,) * 5, collectives)
    assert sum(len(g) - 1 for g in groups) == 5 - FEW_AXES


def test_pins_part_axes():
    sizes = (2, 2, 2, 2)
    links = _links(sizes, "tpu-v5p")
    first = axes_together([5] * MANY, sizes, links)[0]

    def pinned(*layouts: tuple[int, ...]) -> Any:
        return axes_together([5] * MANY, sizes, links, [frozenset({layout}) for layout in layouts])

    alone = tuple(0 if axis == first[0] else WHOLE for axis in range(4))
    assert pinned(alone) and first not in pinned(alone)
    assert keeps_together(alone, pinned(alone))
    assert pinned((0, 1, 0, 1)) == ()  # no two neighbours go together


def _model() -> keras.Model:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((16,)), *[keras.layers.Dense(32, "relu") for _ in range(2)]])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


@pytest.fixture
def two_decide(monkeypatch):
    """As if three axes were too many for any model."""
    monkeypatch.setattr(together_module, "MOST_OF_THREE", 0)


MESH = {"a": 2, "b": 2, "c": 2}
OPTIONS: dict[str, Any] = {"hardware": HARDWARE, "batch_size": 16, "progress": False}


def _separate(plan: autoshard.Plan) -> list[Any]:
    """Layouts of arguments and results in which axes that go together are apart."""
    groups = plan.trail.costs.together
    return [leaf for leaf in (*plan.arguments, *plan.results) if not keeps_together(leaf.layout, groups)]


def test_a_plan_whose_axes_go_together_is_that_of_the_coarser_mesh_and_computes_the_same(two_decide):
    plan = autoshard.optimize(_model(), MESH, **OPTIONS)
    assert plan.trail.costs.together == ((0, 1),) and not _separate(plan)
    assert any("a and b split the same dimension" in note for note in plan.notes)
    coarse = autoshard.optimize(_model(), {"ab": 4, "c": 2}, **OPTIONS)
    assert not coarse.trail.costs.together
    assert coarse.status == "optimal" and "none of these plans is faster" in " ".join(plan.notes)
    assert plan.status == "feasible" and 0 < plan.lower_bound < plan.cost.total_s, (
        "of plans that part them, little is known"
    )
    assert plan.gap == pytest.approx(1 - plan.lower_bound / plan.cost.total_s)
    assert plan.cost.total_s == pytest.approx(coarse.cost.total_s, rel=1e-9)
    x, y = (np.random.default_rng(0).normal(size=(16, n)).astype("float32") for n in (16, 32))
    losses = []
    for planned in (False, True):
        model = _model()
        if planned:
            plan.apply(model)
        losses.append([model.train_on_batch(x, y) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_pin_that_uses_one_axis_alone_is_honoured(two_decide):
    plan = autoshard.optimize(_model(), MESH, **OPTIONS)
    kernel = next(path for path in plan.specs if path.endswith("kernel"))
    spec = jax.sharding.PartitionSpec("a")
    answers = [
        plan.what_if(pins={f"^{kernel}$": spec}, progress=False),
        autoshard.optimize(_model(), MESH, pins={"/kernel$": spec}, **OPTIONS),
    ]
    assert answers[0].specs[kernel] == spec
    for answer in answers:
        assert (0, 1) not in answer.trail.costs.together and answer.trail.costs.together == ((1, 2),)
        assert any("b and c split the same dimension" in note for note in answer.notes)


def test_explain_says_which_layouts_were_not_looked_at(two_decide):
    plan = autoshard.optimize(_model(), MESH, **OPTIONS)
    kernel = next(path for path in plan.specs if path.endswith("kernel"))
    found = plan.explain(kernel, progress=False)
    assert found.chosen.total_s == pytest.approx(plan.cost.total_s)
    assert all(keeps_together(a.layout, ((0, 1),)) for a in found.alternatives)
    assert any("only one of a and b" in note for note in found.notes)


def test_what_does_not_fit_is_not_said_to_be_proved(two_decide):
    options = {**OPTIONS, "solver": autoshard.SolverOptions(time_limit=2.0)}
    with pytest.raises(autoshard.InfeasibleError, match="a and b split the same dimensions") as caught:
        autoshard.optimize(_model(), MESH, memory_budget=600, **options)
    assert caught.value.minimum_budget_bound < caught.value.minimum_budget
    frontier = autoshard.pareto(_model(), MESH, max_points=2, time_limit=4.0, **options)
    assert not frontier.minimum_bound_bytes and frontier.minimum_bytes
    assert {point.status for point in frontier.points} == {"feasible"} and not frontier.complete


def test_the_bound_of_all_plans_is_that_of_the_arithmetic(two_decide, monkeypatch):
    """Of plans whose axes are apart, too, and of every operation."""
    plan = autoshard.optimize(_model(), MESH, **OPTIONS)
    again = plan.what_if(progress=False)
    assert (again.status, again.lower_bound) == ("feasible", pytest.approx(plan.lower_bound))
    monkeypatch.setattr(together_module, "MOST_OF_THREE", 10**9)
    apart = autoshard.optimize(_model(), MESH, **OPTIONS)
    assert apart.status == "optimal" and not apart.trail.costs.together
    assert 0 < plan.lower_bound <= apart.cost.total_s <= plan.cost.total_s
    assert plan.lower_bound == pytest.approx(least_seconds(apart.trail.costs))
    for cls in apart.trail.costs.classes:
        alone = least_seconds(replace(apart.trail.costs, classes=(cls,)))
        assert alone <= cls.count * cls.compute_seconds.min() * (1 + 1e-9), apart.trail.graph.ops[cls.members[0]]
