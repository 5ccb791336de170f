"""search_mesh, smallest_slice, largest_batch: each answer is that of optimize, and nothing better was left out."""

import json
import math
from dataclasses import replace

import keras
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.explore import meshes, sizing
from autoshard_ilp.explore.meshes import factorisations, hardware_list, search_mesh
from autoshard_ilp.explore.sizing import largest_batch, rentable, smallest_slice
from autoshard_ilp.explore.source import Source
from explore_models import mlp, tiny

BATCH = {"batch_size": 512}


def test_every_factorisation_once():
    assert sorted(factorisations(12, 2)) == [(2, 6), (3, 4), (4, 3), (6, 2), (12,)]
    assert sum(1 for _ in factorisations(32, 3)) == 1 + 4 + 6
    assert list(factorisations(7)) == [(7,)] and list(factorisations(1)) == [(1,)]
    assert all(math.prod(f) == 64 for f in factorisations(64))
    assert list(factorisations(10**10 + 19)) == [(10**10 + 19,)]  # a prime: no trial of every smaller number


@pytest.fixture(scope="module")
def found():
    return search_mesh(mlp, 8, "tpu-v5e", **BATCH)


def test_the_best_mesh_is_the_best_of_all(found):
    assert len(found) == len({c.mesh for c in found}) == 4
    times = []
    for candidate in found:
        mesh = dict(zip(candidate.mesh.axis_names, candidate.mesh.axis_sizes, strict=True))
        plan = autoshard.optimize(mlp, mesh, hardware="tpu-v5e", **BATCH)
        assert candidate.status == plan.status == "optimal"
        assert candidate.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
        assert candidate.plan.specs.keys() and candidate.plan.mesh.size == 8
        times.append(plan.cost.total_s)
    assert [c.total_s for c in found] == sorted(c.total_s for c in found)
    assert found.best.cost.total_s == pytest.approx(min(times), rel=1e-9)
    assert found.best.what_if(memory_budget="1GB").cost.total_s == pytest.approx(min(times), rel=1e-9)


def test_bounds_prune_and_never_the_best():
    free = search_mesh(mlp, 4, "h100", **BATCH)
    budget = free.best.memory.peak_bytes - 1  # the fastest plan needs more, so that memory decides
    every = search_mesh(mlp, 4, "h100", memory_budget=budget, prune=False, **BATCH)
    some = search_mesh(mlp, 4, "h100", memory_budget=budget, **BATCH)
    assert some.best.cost.total_s == pytest.approx(every.best.cost.total_s, rel=1e-9)
    best = some.candidates[0].total_s
    for c in some:
        assert c.status in ("optimal", "feasible") or (c.status == "pruned" and c.lower_bound_s >= best * (1 - 1e-9))
        same = next(e for e in every if e.mesh == c.mesh)
        assert c.lower_bound_s <= same.total_s * (1 + 1e-9)


def test_ctrl_c_keeps_the_meshes_that_are_done(monkeypatch):
    problem, calls = Source.problem, []

    def interrupted(self, policy, request, progress):
        calls.append(request.mesh)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return problem(self, policy, request, progress)

    monkeypatch.setattr(Source, "problem", interrupted)
    stop = 2
    found = search_mesh(mlp, 4, "tpu-v5e", max_axes=2, **BATCH)
    assert [c.status for c in found] == ["optimal", "not tried"] and found.interrupted and found.best is not None
    calls.clear()
    stop = 1
    with pytest.raises(KeyboardInterrupt):
        search_mesh(mlp, 4, "tpu-v5e", max_axes=2, **BATCH)


def test_across_hardware_with_prices():
    prices = {"tpu-v5e": 1.2, "h100": 300.0}
    kinds = {"tpu-v5e": 4, "h100": 2}
    by_time = search_mesh(mlp, hardware=kinds, prices=prices, max_axes=2, **BATCH)
    by_price = search_mesh(mlp, hardware=kinds, prices=prices, rank="price", max_axes=2, **BATCH)
    assert {c.hardware for c in by_time} == {"tpu-v5e", "h100"} == set(by_time.best_by_hardware)
    assert by_time.candidates[0].hardware == "h100" and by_price.candidates[0].hardware == "tpu-v5e"
    for c in by_price:
        assert c.price_per_step == pytest.approx(prices[c.hardware] * c.devices * c.total_s / 3600)
    for width in (60, 110):  # what ranks them is seen in a narrow terminal too
        text = by_price.text(width)
        assert " price " in text and "(h100)" in text and max(map(len, text.splitlines())) <= width
    assert "price" not in by_price.text(40).lower()


def test_what_cannot_be_is_said():
    with pytest.raises(autoshard.InfeasibleError, match="No mesh of the search fits") as caught:
        search_mesh(mlp, 4, "tpu-v5e", memory_budget="4MB", max_axes=1, **BATCH)
    assert caught.value.minimum_budget > 4_000_000 and caught.value.contributors
    odd = search_mesh(mlp, 6, "tpu-v5e", batch_size=9, max_axes=2)
    refused = {str(c.mesh): c.status for c in odd}
    assert refused["data=6"] == "refused" and refused["data=2, model=3"] == "optimal"
    assert "divides by no mesh axis" in odd.to_dataframe().set_index("mesh")["reason"]["data=6"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"devices": None, "hardware": "tpu-v5e"}, autoshard.InputShapeError),
        ({"devices": 0, "hardware": "tpu-v5e"}, autoshard.InputShapeError),
        ({"devices": 4, "hardware": []}, autoshard.InputShapeError),
        ({"devices": 4, "hardware": ["h100", "h100"]}, autoshard.InputShapeError),
        ({"devices": 4, "hardware": "abacus"}, autoshard.ProfileError),
        ({"devices": 4, "hardware": "h100", "rank": "beauty"}, autoshard.InputShapeError),
        ({"devices": 4, "hardware": "h100", "rank": "price"}, autoshard.InputShapeError),
        ({"devices": 4, "hardware": "h100", "prices": {"tpu": 1.0}}, autoshard.InputShapeError),
        ({"devices": 4, "hardware": "h100", "prices": {"h100": -1.0}}, autoshard.InputShapeError),
        ({"devices": 4, "hardware": "h100", "max_axes": 4}, autoshard.InputShapeError),
        pytest.param({"hardware": "h100:" + 5000 * "9"}, autoshard.InputShapeError, id="5000 digits"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(arguments, error):
    with pytest.raises(error):
        search_mesh(mlp, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"devices": 10**9}, {"devices": 2**20 + 1}, {"hardware": {"h100": 10**9}}, {"hardware": "h100:1000000000"}],
    ids=str,
)
def test_a_mesh_has_so_many_devices_at_most(arguments, monkeypatch):
    monkeypatch.setattr(meshes, "factorisations", lambda *_: pytest.fail("enumerated"))
    with pytest.raises(autoshard.InputShapeError, match=r"at most 1048576 devices\. Received: 10"):
        search_mesh(mlp, **{"hardware": "h100", **arguments})


def test_hardware_says_how_many():
    assert hardware_list("tpu-v5e:4x8", None) == {"tpu-v5e:4x8": ("tpu-v5e:4x8", 32)}
    assert hardware_list("h100:8", None) == {"h100:8": ("h100:8", 8)}
    assert hardware_list({"tpu-v5e": 16, "h100": 8}, None) == {"tpu-v5e": ("tpu-v5e", 16), "h100": ("h100", 8)}


def test_it_reads_well(found, tmp_path):
    for width in (60, 110):
        text = found.text(width, only_ascii=True)
        assert text.isascii() and max(map(len, text.splitlines())) <= width
    assert len(json.loads(json.dumps(found.to_dict(), allow_nan=False))["candidates"]) == len(found)
    assert "<pre" in found._repr_html_()
    pytest.importorskip("matplotlib")
    found.plot().savefig(tmp_path / "meshes.svg")


# -- how small, how large ----------------------------------------------------------------------------------------------


def test_sizes_that_can_be_rented():
    assert rentable(autoshard.profile("h100"))[:6] == [1, 2, 4, 8, 16, 32]
    assert rentable(autoshard.profile("tpu-v5e")) == [1, 4, 8, 16, 32, 64, 128, 256]
    with pytest.raises(autoshard.InputShapeError):
        rentable(autoshard.profile("tpu-v5e"), 0.5)
    with pytest.raises(autoshard.InputShapeError):
        rentable(autoshard.profile("tpu-v5e"), 0)
    assert rentable(replace(autoshard.profile("h100"), domain_devices=2**19), 10**9)[-2:] == [2**19, 2**20]


def test_the_smallest_slice():
    budget = 20_000_000
    answer = smallest_slice(mlp, "h100", memory_budget=budget, max_axes=1, **BATCH)
    assert answer.proved and answer.plan.memory.peak_bytes <= budget
    assert [t.fits for t in answer.tried] == [False] * (len(answer.tried) - 1) + [True]
    assert answer.size == answer.plan.mesh.size > 1
    for smaller in answer.tried[:-1]:
        with pytest.raises(autoshard.InfeasibleError):
            autoshard.optimize(mlp, {"data": smaller.size}, budget, hardware="h100", **BATCH)
    assert str(answer.size) in answer.text(60)
    json.dumps(answer.to_dict(), allow_nan=False)
    with pytest.raises(autoshard.InfeasibleError, match="must fit some slice"):
        smallest_slice(mlp, "h100", memory_budget="1MB", max_devices=2, max_axes=1, **BATCH)


def test_the_smallest_slice_of_a_model_with_a_fixed_batch():
    inputs = keras.Input((32,), batch_size=8)
    model = keras.Model(inputs, keras.layers.Dense(16)(inputs))
    model.compile("sgd", "mse")
    assert smallest_slice(model, "h100", progress=False).plan.batch_size == 8


@pytest.mark.parametrize(("batch", "devices"), [(512, 4), (7, 1)])  # 7 divides by no mesh of 2 or 4 devices
def test_the_budget_that_a_slice_needs_is_enough(batch: int, devices: int):
    question = {"max_devices": 4, "max_axes": 1, "batch_size": batch, "progress": False}
    with pytest.raises(autoshard.InfeasibleError, match=f"On {devices} devices it needs") as caught:
        smallest_slice(mlp, "h100", memory_budget="4MB", **question)  # a quarter of the weights alone is 8 MB
    least = caught.value.minimum_budget
    options = {"hardware": "h100", "batch_size": batch, "progress": False}
    autoshard.optimize(mlp, {"data": devices}, least, **options)
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.optimize(mlp, {"data": devices}, least - 1, **options)


def test_the_budget_that_the_smallest_batch_needs_is_enough_and_no_more():
    question = {"hardware": "h100", "progress": False}
    with pytest.raises(autoshard.InfeasibleError, match="smallest batch") as caught:
        largest_batch(tiny, {"data": 2}, memory_budget="1kB", **question)
    least = caught.value.minimum_budget
    assert largest_batch(tiny, {"data": 2}, memory_budget=least, **question).size >= 2
    with pytest.raises(autoshard.InfeasibleError, match="smallest batch"):
        largest_batch(tiny, {"data": 2}, memory_budget=least - 1, **question)


def test_the_largest_batch():
    budget = 20_000_000
    answer = largest_batch(mlp, {"data": 4}, memory_budget=budget, hardware="h100", multiple_of=64)
    assert answer.proved and answer.size % 64 == 0
    assert answer.plan.batch_size == answer.size and answer.plan.memory.peak_bytes <= budget
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.optimize(mlp, {"data": 4}, budget, hardware="h100", batch_size=answer.size + 64)
    with pytest.raises(autoshard.InfeasibleError, match="smallest batch"):
        largest_batch(mlp, {"data": 4}, memory_budget="5MB", hardware="h100")
    with pytest.raises(autoshard.InputShapeError):
        largest_batch(mlp, {"data": 4}, hardware="h100", multiple_of=0)


@pytest.mark.parametrize("asked", [1, 3])
def test_an_interrupt_leaves_the_largest_batch_seen_to_fit(asked: int, monkeypatch: pytest.MonkeyPatch):
    least, calls = sizing._least, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == asked:
            raise KeyboardInterrupt
        return least(*arguments)

    monkeypatch.setattr(sizing, "_least", interrupted)
    question = {"memory_budget": 20_000_000, "hardware": "h100", "multiple_of": 64}
    if asked == 1:  # nothing is known yet
        with pytest.raises(KeyboardInterrupt):
            largest_batch(mlp, {"data": 4}, **question)
        return
    answer = largest_batch(mlp, {"data": 4}, **question)
    assert answer.size == answer.plan.batch_size == 128 and not answer.proved and answer.interrupted
    assert [t.size for t in answer.tried] == [64, 128]
