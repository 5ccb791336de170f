"""Plan and sweep files follow their published JSON Schemas, and what does not is explained."""

import json

import pytest
from jsonschema import Draft202012Validator

import autoshard_ilp as autoshard
from autoshard_ilp import schema
from autoshard_ilp.saved.planfile import to_dict
from explore_models import MESH, OPTIONS, tiny


@pytest.fixture(scope="module")
def stored():
    plan = autoshard.optimize(tiny, MESH, **{**OPTIONS, "batch_size": 64}, pins={"kernel$": (None, ("data", "model"))})
    return json.loads(json.dumps(to_dict(plan)))


@pytest.mark.parametrize("name", ["sweep", "plan"])
def test_schemas_are_schemas(name):
    Draft202012Validator.check_schema(schema.schema(name))


def test_a_plan_follows_its_schema(stored):
    assert schema.problem(stored, "plan") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"axis_names": [], "axis_sizes": []}}, r"mesh.axis_names is empty"),
        ({"status": "perfect"}, "status is one of 'optimal', 'feasible'"),
        ({"batch_size": "32"}, "batch_size is of type integer, not '32'"),
        ({"cost": {"total_s": -1, "compute_s": 0, "communication_s": 0}}, r"cost.total_s: -1 is less than"),
        ({"arguments": [{"path": "x"}]}, r"arguments.0 lacks 'role'"),
        ({"specs": {"kernel": [3]}}, r"specs.kernel.0"),
        ({"memory": {"peak_bytes": 1.5, "budget_bytes": None}}, "memory.peak_bytes"),
    ],
    ids=str,
)
def test_a_damaged_plan_is_explained(stored, tmp_path, change, message):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**stored, **change}))
    with pytest.raises(autoshard.PlanFileError, match=message) as caught:
        autoshard.load(path)
    assert str(path) in str(caught.value)


def test_a_newer_writer_may_add_fields(stored, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**stored, "colour": "blue"}))
    assert autoshard.load(path).status == stored["status"]
