"""plan.what_if answers as optimize would, without tracing again, and says what it proved."""

import dataclasses

import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.graph import step as step_module
from explore_models import MESH, OPTIONS, deep
from explore_models import mlp as build


def planned(**options):
    return autoshard.optimize(build, options.pop("mesh", MESH), options.pop("budget", None), **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def plan():
    return planned()


@pytest.fixture
def no_trace(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("traced again")

    monkeypatch.setattr(step_module, "trace", fail)
    monkeypatch.setattr("autoshard_ilp.trace.trace_model", fail)


def same(a, b):
    assert a.cost.total_s == pytest.approx(b.cost.total_s, rel=1e-9)
    assert a.status == b.status == "optimal"
    assert a.lower_bound <= a.cost.total_s * (1 + 1e-9)
    assert a.memory.budget_bytes == b.memory.budget_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"pins": {"wide/kernel$": (None, "model")}},
        {"pins": {"kernel$": ("data",), "features": ("data",)}},
        {"pins": {"wide/kernel$": ("model", "data"), "last/bias": (("data", "model"),)}},
        {"objective": "communication"},
        {"mesh": {"data": 4}},
        {"hardware": "h100"},
    ],
    ids=str,
)
def test_the_answer_is_that_of_optimize(plan, no_trace, change, monkeypatch):
    answer = plan.what_if(**change)
    monkeypatch.undo()
    same(answer, planned(**change))
    for pattern, spec in change.get("pins", {}).items():
        own = [s for path, s in answer.specs.items() if path.endswith(pattern.rstrip("$"))]
        assert own and all(tuple(s) == spec for s in own)


def test_another_budget_and_back(plan, no_trace, monkeypatch):
    peak = plan.memory.peak_bytes
    assert plan.status == "optimal"
    less = plan.what_if(memory_budget=peak - 1)
    back = less.what_if(memory_budget=peak)
    monkeypatch.undo()
    assert less.memory.peak_bytes < peak
    same(less, planned(budget=peak - 1))
    assert less.cost.total_s > plan.cost.total_s
    same(back, planned(budget=peak))


def test_a_proof_is_used_again_where_it_holds(plan, no_trace, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("solved again")

    monkeypatch.setattr("autoshard_ilp.program.solve", fail)
    peak, table = plan.memory.peak_bytes, plan.trail.costs
    for budget in (peak, 2 * peak, 10**12):
        again = plan.what_if(memory_budget=budget)
        assert again.status == "optimal" and again.cost == plan.cost and again.memory.budget_bytes == budget
        assert again.trail.costs is table
    own = {rf"^{leaf.path}$": tuple(plan.specs[leaf.path]) for leaf in plan.arguments if leaf.role == "parameter"}
    assert plan.what_if(pins=own).cost == plan.cost


def test_pins_are_replaced_not_added(plan, no_trace):
    pinned = plan.what_if(pins={"wide/kernel$": ("model", "data")})
    assert pinned.cost.total_s > plan.cost.total_s
    assert pinned.what_if(memory_budget="10GB").specs["wide/kernel"] == pinned.specs["wide/kernel"]
    assert pinned.what_if(pins={}).cost.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
    other = pinned.what_if(pins={"last/kernel$": ()})
    assert tuple(other.specs["last/kernel"]) == ()
    assert other.cost.total_s == pytest.approx(plan.what_if(pins={"last/kernel$": ()}).cost.total_s, rel=1e-9)


def test_a_plan_freed_of_its_pins_is_the_optimum(plan):
    pinned = planned(pins={"kernel$": ("model", "data")})
    assert pinned.cost.total_s > plan.cost.total_s
    same(pinned.what_if(pins={}), plan)


def test_no_plan_fits(plan, no_trace):
    with pytest.raises(autoshard.InfeasibleError, match="The smallest budget that fits is") as caught:
        plan.what_if(memory_budget=10_000)
    error = caught.value
    assert error.minimum_budget_bound <= error.minimum_budget
    assert error.contributors and error.contributors[0][1] > 0 and not error.conflicts
    assert f"exactly {error.minimum_budget} bytes" in str(error)
    fits = plan.what_if(memory_budget=error.minimum_budget)
    assert fits.memory.peak_bytes <= error.minimum_budget


def test_pins_at_fault_are_named(plan, no_trace):
    small = plan.what_if(memory_budget=plan.memory.peak_bytes - 1)
    with pytest.raises(autoshard.InfeasibleError) as caught:
        small.what_if(pins={"kernel$": (), "features": ()}, memory_budget=small.memory.peak_bytes)
    assert caught.value.conflicts == ["kernel$", "features"]


def test_a_plan_from_a_file(plan, tmp_path):
    path = tmp_path / "plan.json"
    pinned = plan.what_if(pins={"last/kernel$": (None, "model")})
    pinned.save(path)
    with pytest.raises(autoshard.UnsupportedModelError, match="without its model"):
        autoshard.load(path).what_if(memory_budget="1GB")
    loaded = autoshard.load(path, model=build)
    assert loaded.what_if(memory_budget="5GB").cost.total_s == pytest.approx(pinned.cost.total_s, rel=1e-9)
    assert loaded.what_if(pins={}).cost.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
    foreign = dataclasses.replace(loaded, hardware="mine", origin={"hardware": "mine"})
    with pytest.raises(autoshard.ProfileError, match="'mine'"):
        foreign.what_if(memory_budget="1GB")


def test_a_baseline_stays_one(plan):
    fsdp = autoshard.baseline(build, MESH, "fsdp", **OPTIONS)
    asked = fsdp.what_if(memory_budget=fsdp.memory.peak_bytes)
    assert asked.specs == fsdp.specs and asked.cost == fsdp.cost
    assert any("fsdp" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"objective": "speed"}, autoshard.InputShapeError),
        ({"memory_budget": "16 bananas"}, autoshard.InputShapeError),
        ({"pins": {"no such thing": ()}}, autoshard.InputShapeError),
        ({"hardware": "abacus"}, autoshard.ProfileError),
        ({"mesh": {}}, autoshard.InputShapeError),
    ],
)
def test_options_that_make_no_sense(plan, change, error):
    with pytest.raises(error):
        plan.what_if(**change)


@pytest.mark.slow
def test_less_memory_than_without_recomputation():
    """The search for recomputed blocks is that of optimize; nothing in between is kept."""
    options = {"hardware": "tpu-v5e", "batch_size": 4096, "solver": autoshard.SolverOptions(time_limit=10.0)}
    start = autoshard.optimize(deep, {"data": 2}, **options)
    with pytest.raises(autoshard.InfeasibleError) as caught:
        start.what_if(memory_budget=1000, remat="never")
    budget = int(0.97 * caught.value.minimum_budget)
    there, direct = start.what_if(memory_budget=budget), autoshard.optimize(deep, {"data": 2}, budget, **options)
    assert there.remat_policy == direct.remat_policy != "never" and there.memory.peak_bytes <= budget
    assert there.cost.total_s == pytest.approx(direct.cost.total_s, rel=1e-9)
    assert {f.step.remat for f in there.trail.failures} <= set(there.trail.policies)
    back = there.what_if(memory_budget="16GB")
    assert back.remat_policy == "never" and back.cost.total_s == pytest.approx(start.cost.total_s, rel=1e-9)


@pytest.mark.slow
def test_a_question_that_leaves_the_plan_allowed_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is solved, no other number of recomputed blocks either, and what the search noted still holds."""
    options = {"hardware": "tpu-v5e", "batch_size": 4096, "progress": False}
    fast = autoshard.optimize(deep, {"data": 2}, **options)
    with pytest.raises(autoshard.InfeasibleError) as caught:
        fast.what_if(memory_budget=1000, remat="never")
    tight = fast.what_if(memory_budget=int(0.97 * caught.value.minimum_budget))
    assert tight.remat_policy != "never" and tight.status == "optimal"
    monkeypatch.setattr("autoshard_ilp.program.solve", lambda *args, **keywords: pytest.fail("solved again"))
    path = next(p for p in tight.specs if p.endswith("kernel"))
    for change in ({}, {"memory_budget": tight.memory.peak_bytes}, {"pins": {f"{path}$": tight.specs[path]}}):
        again = tight.what_if(**change)
        assert (again.remat_policy, again.cost, again.specs) == (tight.remat_policy, tight.cost, tight.specs)
        assert set(tight.notes) <= set(again.notes) and again.status == "optimal"
