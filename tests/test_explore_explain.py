"""plan.explain and plan.compare: every price is that of a plan which is found by itself."""

import dataclasses
import json
import math

import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from autoshard_ilp.sharding import divisible_layouts
from explore_models import MESH, OPTIONS, deep, mlp


@pytest.fixture(scope="module")
def plan():
    return autoshard.optimize(mlp, MESH, **OPTIONS)


@pytest.fixture(scope="module")
def fsdp():
    return autoshard.baseline(mlp, MESH, "fsdp", **OPTIONS)


# -- explain -----------------------------------------------------------------------------------------------------------


def test_where_memory_is_short_a_note_says_that_recomputation_is_the_plans(plan):
    short = plan.what_if(memory_budget=plan.memory.peak_bytes)
    assert any("what the plan does" in note for note in short.explain("wide/kernel").notes)
    assert not any("what the plan does" in note for note in plan.explain("wide/kernel").notes)


def test_every_alternative_is_the_best_plan_that_uses_it(plan):
    why = plan.explain("wide/kernel")
    assert {a.layout for a in why.alternatives} == set(divisible_layouts((1024, 4096), (2, 2)))
    assert why.chosen.spec == plan.specs["wide/kernel"]
    assert why.chosen.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
    for a in why.alternatives:
        assert a.proof == "exact"
        assert a.total_s == a.lower_bound_s >= plan.cost.total_s * (1 - 1e-9)
        pinned = autoshard.optimize(mlp, MESH, pins={"wide/kernel$": a.spec}, **OPTIONS)
        assert pinned.status == "optimal"
        assert a.total_s == pytest.approx(pinned.cost.total_s, rel=1e-9)


def test_the_differences_add_up_to_the_communication(plan):
    why = plan.explain("last/kernel")
    for a in why.alternatives:
        moved = sum(d.seconds for d in a.differences)
        assert moved == pytest.approx(a.communication_s - plan.cost.communication_s, rel=1e-6, abs=1e-12)
        assert a.total_s == pytest.approx(a.compute_s + a.communication_s)


def test_a_layer_among_equal_ones_is_explained_alone():
    mesh = {"data": 4}
    plan = autoshard.optimize(deep, mesh, **OPTIONS)
    assert any(len(c.members) > 1 for c in plan.trail.costs.classes)
    one = plan.explain("up_3/kernel")
    assert one.paths == ("up_3/kernel",) and "decide for themselves" in one.notes[0]
    other = next(a for a in one.alternatives if not a.chosen)
    pinned = autoshard.optimize(deep, mesh, pins={"up_3/kernel$": other.spec}, **OPTIONS)
    assert pinned.cost.total_s <= other.total_s * (1 + 1e-9), "the other layers are tied in what is explained"
    assert other.total_s == pytest.approx(pinned.cost.total_s, rel=0.02)
    every = plan.explain("up_./kernel$")
    assert len(every.paths) == 6 and not every.notes
    same = next(a for a in every.alternatives if a.layout == other.layout)
    assert same.total_s > other.total_s


def test_a_pin_on_the_tensor_itself_is_lifted(plan):
    pinned = plan.what_if(pins={"wide/kernel$": ("model", "data")})
    why = pinned.explain("wide/kernel")
    assert why.chosen.spec == P("model", "data")
    best = min(why.alternatives, key=lambda a: a.total_s)
    assert best.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
    assert "would save" in why.text() and "lifted" in why.text()


def test_what_does_not_fit_is_said(plan):
    line = plan.what_if(mesh={"data": 4})
    tight = line.what_if(memory_budget=line.memory.peak_bytes)
    why = tight.explain("wide/kernel")
    by_spec = {tuple(a.spec): a for a in why.alternatives}
    assert by_spec[()].proof == "infeasible" and math.isinf(by_spec[()].total_s)
    assert "does not fit" in why.text()
    for a in why.alternatives:
        assert a.peak_bytes <= line.memory.peak_bytes
    with pytest.raises(autoshard.InfeasibleError):
        tight.what_if(pins={"wide/kernel$": ()})


def test_without_time_the_bounds_are_honest(plan):
    full = {a.layout: a.total_s for a in plan.explain("wide/kernel").alternatives}
    for a in plan.explain("wide/kernel", time_limit=0.0).alternatives:
        assert a.lower_bound_s <= full[a.layout] * (1 + 1e-9) <= a.total_s * (1 + 2e-9)
        assert a.proof == "exact" or not a.chosen


def test_ctrl_c_keeps_the_layouts_that_are_done(plan, monkeypatch):
    from autoshard_ilp.explore import explain as module

    alternative, calls = module._alternative, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return alternative(*args)

    monkeypatch.setattr(module, "_alternative", interrupted)
    stop = 3
    why = plan.explain("wide/kernel")
    assert len(why.alternatives) == 2 and why.chosen.spec == plan.specs["wide/kernel"]
    assert "Interrupted: 7 other layouts" in why.text(100)
    calls.clear()
    stop = 1
    with pytest.raises(KeyboardInterrupt):
        plan.explain("wide/kernel")


def test_what_was_not_found_in_time_is_not_said_not_to_exist(plan):
    why = plan.explain("wide/kernel", time_limit=0.0)
    late = [
        dataclasses.replace(a, total_s=math.inf, lower_bound_s=0.5, proof="bounded")
        for a in why.alternatives
        if not a.chosen
    ]
    text = dataclasses.replace(why, alternatives=(why.chosen, *late)).text(100)
    assert "had a plan in time" in text and ">= 500 ms" in text
    never = [dataclasses.replace(a, proof="infeasible") for a in late]
    assert "No other layout has a plan" in dataclasses.replace(why, alternatives=(why.chosen, *never)).text(100)


@pytest.mark.parametrize("width", [60, 100])
def test_it_reads_well_everywhere(plan, width):
    why = plan.explain("wide/kernel")
    text = why.text(width, only_ascii=True)
    assert text.isascii() and max(map(len, text.splitlines())) <= width
    assert "wide/kernel" in repr(why) and "<pre" in why._repr_html_()
    frame = why.to_dataframe()
    assert list(frame["chosen"]) == [True] + [False] * 8
    assert frame["extra_s"].min() >= -1e-12
    record = json.loads(json.dumps(why.to_dict(), allow_nan=False))
    assert len(record["alternatives"]) == 9


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such/thing", "finds none"),
        ("kernal", "wide/kernel|last/kernel"),
        ("(", "regular expression"),
        ("wide", "of shapes"),
    ],
)
def test_paths_that_name_nothing(plan, path, message):
    with pytest.raises(autoshard.InputShapeError, match=message):
        plan.explain(path)


def test_inputs_outputs_and_scalars_have_layouts_too(plan):
    assert len(plan.explain("inputs/features").alternatives) == 9
    assert [a.proof for a in plan.explain("outputs/loss").alternatives] == ["exact"]


# -- compare -----------------------------------------------------------------------------------------------------------


def test_a_plan_equals_itself(plan):
    same = plan.compare(plan)
    assert not same.tensors and not same.collectives and same.seconds == 0
    assert "Every tensor lies the same way" in same.text()


def test_what_differs_from_a_baseline(plan, fsdp):
    found = plan.compare(fsdp, price=True)
    differ = {path for path, spec in plan.specs.items() if path in fsdp.specs and fsdp.specs[path] != spec}
    assert {p for t in found.tensors for p in t.paths if not p.startswith("sgd")} == differ
    moved = sum(d.seconds for d in found.collectives)
    assert moved == pytest.approx(fsdp.cost.communication_s - plan.cost.communication_s, rel=1e-9)
    for t in found.tensors:
        assert t.proved
        pins = {rf"^{path}$": t.other_spec for path in t.paths}
        best = autoshard.optimize(mlp, MESH, pins=pins, **OPTIONS).cost.total_s
        assert t.best_s == pytest.approx(best - plan.cost.total_s, rel=1e-6, abs=1e-12)
        assert t.alone_s >= t.best_s - 1e-12
    assert found.seconds == pytest.approx(fsdp.cost.total_s - plan.cost.total_s)


def test_both_ways(plan, fsdp):
    there, back = plan.compare(fsdp), fsdp.compare(plan)
    assert there.seconds == -back.seconds
    assert {t.name: t.bytes_per_device for t in there.tensors} == {t.name: -t.bytes_per_device for t in back.tensors}


def test_a_comparison_of_files_and_of_meshes(plan, fsdp, tmp_path):
    plan.save(tmp_path / "a.json")
    fsdp.save(tmp_path / "b.json")
    a, b = autoshard.load(tmp_path / "a.json"), autoshard.load(tmp_path / "b.json")
    found = a.compare(b)
    assert [t.paths for t in found.tensors] and all(t.alone_s is None for t in found.tensors)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["totals"]["total_s"]["first"] == a.cost.total_s
    assert len(found.to_dataframe()) == len(found.tensors)
    other = plan.compare(plan.what_if(mesh={"data": 4}))
    assert "mesh: data=2, model=2 against data=4" in other.text(60)
    assert max(map(len, other.text(60, only_ascii=True).splitlines())) <= 60
    with pytest.raises(autoshard.PlanMismatchError, match="one mesh"):
        plan.compare(plan.what_if(mesh={"data": 4}), price=True)


def test_plans_of_two_models(plan):
    other = autoshard.optimize(deep, {"data": 4}, **OPTIONS)
    with pytest.raises(autoshard.PlanMismatchError, match="one model"):
        plan.compare(other)
    with pytest.raises(autoshard.PlanMismatchError, match="Received: str"):
        plan.compare("plan.json")
