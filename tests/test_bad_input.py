"""What is wrong with an input is said in the error: the rule, what was received, and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from keras import layers, ops

import autoshard_ilp as autoshard
from profiles_for_tests import toy

MESH = {"data": 2, "model": 4}


def mlp(width: int = 32, optimizer: str | None = "adam") -> keras.Model:
    inputs = keras.Input((16,), name="x")
    h = layers.Dense(width, activation="relu", name="up")(inputs)
    model = keras.Model(inputs, layers.Dense(8, name="down")(h))
    if optimizer:
        model.compile(optimizer=optimizer, loss="mse")
    return model


def plan_of(model: Any = mlp, mesh: Any = None, **options: Any) -> autoshard.Plan:
    return autoshard.optimize(model, MESH if mesh is None else mesh, **{"batch_size": 8, "progress": False, **options})


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return plan_of()


def raises(kind: type[Exception], *parts: str) -> Any:
    """Expects an error of ours whose message has every part, and says what it received."""

    class Checked:
        def __enter__(self) -> Checked:
            self.context = pytest.raises(kind)
            self.info = self.context.__enter__()
            return self

        def __exit__(self, *exc: Any) -> Any:
            swallowed = self.context.__exit__(*exc)
            assert isinstance(self.info.value, autoshard.AutoshardError)
            message = str(self.info.value)
            for part in ("Received", *parts):
                assert part in message, message
            return swallowed

        @property
        def error(self) -> Any:
            return self.info.value

    return Checked()


# -- models and batches --


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(8)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def compiled(model: keras.Model) -> keras.Model:
    model.compile(optimizer="sgd", loss="mse")
    return model


@pytest.mark.parametrize("build", [Subclassed, lambda: keras.Sequential([layers.Dense(8)])])
def test_an_unbuilt_model_needs_shapes(build: Callable[[], keras.Model]) -> None:
    with raises(autoshard.InputShapeError, "input shapes", "inputs="):
        plan_of(lambda: compiled(build()))
    given = plan_of(lambda: compiled(build()), inputs=jax.ShapeDtypeStruct((8, 16), "float32"))
    assert [leaf.shape for leaf in given.arguments if leaf.path.endswith("kernel")] == [(16, 8)]


def test_training_needs_a_compiled_model() -> None:
    with raises(autoshard.UnsupportedModelError, "compile", "mode='predict'"):
        plan_of(lambda: mlp(optimizer=None))
    assert plan_of(lambda: mlp(optimizer=None), mode="predict").mode == "predict"


@pytest.mark.parametrize("model", [None, "gpt2", 3, layers.Dense(3), lambda: layers.Dense(3), lambda x: mlp()])
def test_a_model_is_a_keras_model_or_builds_one(model: Any) -> None:
    with raises(autoshard.UnsupportedModelError, "model"):
        plan_of(model)


def test_a_mode_is_known() -> None:
    with raises(autoshard.InputShapeError, "'evaluate'"):
        plan_of(mode="evaluate")
    with raises(autoshard.InputShapeError, "'fast'"):
        plan_of(objective="fast")


@pytest.mark.parametrize("batch_size", [0, -8, 2.5, True, "8", 7])
def test_a_batch_is_a_positive_whole_number_that_divides(batch_size: Any) -> None:
    with raises(autoshard.InputShapeError, "batch", repr(batch_size)):
        plan_of(batch_size=batch_size)


def test_a_batch_size_agrees_with_the_inputs() -> None:
    with raises(autoshard.InputShapeError, "16", "8"):
        plan_of(inputs=np.zeros((16, 16), "float32"), batch_size=8)
    with raises(autoshard.InputShapeError, "x"):
        plan_of(inputs=np.zeros((8, 17), "float32"))
    with raises(autoshard.InputShapeError, "str"):
        plan_of(inputs=np.array([["a"]] * 8))


# -- meshes and hardware --


@pytest.mark.parametrize(
    ("mesh", "part"),
    [
        ({}, "axis"),
        ({"data": 0}, "'data' = 0"),
        ({"data": -2}, "'data' = -2"),
        ({"data": 2.0}, "'data' = 2.0"),
        ({"data": True}, "True"),
        ({"": 2}, "''"),
        ({1: 2}, "1"),
        ([("data", 2), ("data", 4)], "'data', 'data'"),
        ("data=2", "data=2"),
        (8, "8"),
    ],
)
def test_a_mesh_has_unique_axes_of_positive_size(mesh: Any, part: str) -> None:
    with raises(autoshard.InputShapeError, part):
        autoshard.optimize(mlp, mesh, progress=False)


def test_every_form_of_mesh_gives_the_same_plan(plan: autoshard.Plan) -> None:
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    meshes = [
        Mesh(devices, ("data", "model")),
        Mesh(devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
        jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
        jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit)),
        AbstractMesh((2, 4), ("data", "model")),
        keras.distribution.DeviceMesh((2, 4), ("data", "model"), [f"cpu:{i}" for i in range(8)]),
        [("data", 2), ("model", 4)],
    ]
    for mesh in meshes:
        other = plan_of(mesh=mesh)
        assert other.cost.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
        assert [leaf.layout for leaf in other.arguments] == [leaf.layout for leaf in plan.arguments]
    explicit = plan_of(mesh=meshes[2])
    state, logs = explicit.jit()(explicit.init_state(), _batch())
    assert np.isfinite(float(logs["loss"]))
    state, logs = plan.jit(meshes[2])(plan.init_state(), _batch())
    assert np.isfinite(float(logs["loss"]))
    del state


def _batch(rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((rows, 16), "float32"), np.ones((rows, 8), "float32")


class _FakeDevice:
    """Enough of a device for a mesh: what a compile-only client gives."""

    def __init__(self, kind: str, index: int) -> None:
        self.device_kind, self.id, self.platform, self.process_index = kind, index, "tpu", 0
        self.client = None


class _FakeMesh:
    """A mesh of devices that this machine does not have."""

    def __init__(self, kind: str) -> None:
        self.axis_names, self.axis_sizes = ("data",), (4,)
        self.devices = np.array([_FakeDevice(kind, i) for i in range(4)])


_FakeMesh.__name__ = "Mesh"


def test_hardware_is_that_of_the_devices() -> None:
    with raises(autoshard.ProfileError, "h100", "TPU v5 lite"):
        plan_of(mesh=_FakeMesh("TPU v5 lite"), hardware="h100")
    with raises(autoshard.ProfileError, "Frobnicator 9000", "hardware="):
        plan_of(mesh=_FakeMesh("Frobnicator 9000"))
    assert plan_of(mesh=_FakeMesh("TPU v5 lite")).hardware == "tpu-v5e"
    assert plan_of(mesh=_FakeMesh("Frobnicator 9000"), hardware="h100").hardware == "h100"
    cpus = Mesh(np.array(jax.devices()[:4]), ("data",))
    assert plan_of(mesh=cpus, hardware="tpu-v5e").hardware == "tpu-v5e", "CPU devices stand in for any hardware"


@pytest.mark.parametrize("hardware", ["tpu-v99", "h-100", "", "no/such/profile.toml", 3])
def test_unknown_hardware_is_named(hardware: Any) -> None:
    with raises(autoshard.ProfileError, repr(hardware) if hardware == 3 else str(hardware)):
        plan_of(hardware=hardware)


def test_close_names_of_hardware_are_suggested() -> None:
    with raises(autoshard.ProfileError, "tpu-v5e"):
        plan_of(hardware="tpu-v5")


def test_a_slice_that_does_not_exist_is_refused() -> None:
    with raises((autoshard.ProfileError, autoshard.InputShapeError), "4x4"):
        plan_of(hardware="tpu-v5e:4x4")
    assert plan_of(hardware="tpu-v5e:2x4").hardware == "tpu-v5e"


# -- pins --


@pytest.mark.parametrize(
    ("pins", "parts"),
    [
        ({"no_such_layer": P("data")}, ("'no_such_layer'", "matches none")),
        ({"up[": P("data")}, ("'up['", "regular expression")),
        ({3: P("data")}, ("3", "regular expression")),
        ({"up/kernel": P("expert")}, ("'expert'", "('data', 'model')")),
        ({"up/kernel": P("data", "data")}, ("twice",)),
        ({"up/kernel": P(("model", "data"))}, ("mesh order",)),
        ({"up/bias": P("data", "model")}, ("up/bias", "(32,)")),
        ({"up/kernel": 5}, ("5 of type int", "a tuple of them")),
        ({"up/kernel": P(P.UNCONSTRAINED, "data")}, ("UNCONSTRAINED", "per dimension None")),
        ({"up/kernel": NamedSharding(jax.make_mesh((1,), ("data",)), P("data"))}, ("NamedSharding", "Pass its .spec")),
        ({"up/kernel": ("data", 5)}, ("5",)),
        ({"up/kernel": ({},)}, ("({},)", "per dimension None")),
        ({"up/kernel": ({"data", "model"},)}, ("per dimension None",)),
        ({"up/kernel": {"data": 0}}, ("of type dict", "per dimension None")),
        ({"outputs/loss": ("data",)}, ("outputs/loss",)),
        ({b"up/kernel": ("data",)}, ("b'up/kernel'", "regular expression", "bytes")),
    ],
)
def test_pins_that_make_no_sense(pins: Any, parts: tuple[str, ...]) -> None:
    with raises(autoshard.InputShapeError, *parts):
        plan_of(pins=pins)


def test_a_batch_holds_samples() -> None:
    with raises(autoshard.InputShapeError, "at least one sample", "inputs of 0"):
        plan_of(inputs=np.ones((0, 16), "float32"), batch_size=None)


def test_a_pin_must_divide() -> None:
    with raises(autoshard.InputShapeError, "'up/kernel'", "30", "4"):
        plan_of(lambda: mlp(30), pins={"up/kernel": (None, "model")})


def test_contradicting_pins_are_both_named() -> None:
    with raises(autoshard.InfeasibleError, "up/kernel") as caught:
        plan_of(pins={"up/": P(), "kernel": P("data")})
    assert set(caught.error.conflicts) == {"up/", "kernel"}
    assert plan_of(pins={"up/kernel": P("data"), "kernel": P("data")}).specs["up/kernel"] == P("data")


# -- budgets --


@pytest.mark.parametrize(
    "budget", [0, -1, -(10**9), "16 bananas", "16Gb", "16GB/s", "GB", "", "-16GB", "1e9", 1.5, True, "16", [16]]
)
def test_budgets_that_are_no_sizes(budget: Any) -> None:
    with raises(autoshard.InputShapeError, repr(budget), "16GB"):
        plan_of(memory_budget=budget)


def test_a_budget_that_is_too_small_names_the_smallest_that_works() -> None:
    options = {"hardware": toy(), "batch_size": 256, "mesh": {"data": 4}}
    with raises(autoshard.InfeasibleError, "smallest budget", "4.1 kB") as caught:
        plan_of(memory_budget=4100, **options)
    error = caught.error
    assert 4100 < error.minimum_budget_bound <= error.minimum_budget
    assert error.contributors
    sizes = [size for _, size in error.contributors]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    fits = plan_of(memory_budget=error.minimum_budget, **options)
    assert fits.memory.peak_bytes <= error.minimum_budget
    assert fits.memory.budget_bytes == error.minimum_budget
    with raises(autoshard.InfeasibleError, "smallest budget") as below:
        plan_of(memory_budget=error.minimum_budget_bound - 1, **options)
    assert below.error.minimum_budget >= error.minimum_budget_bound


def test_pins_that_do_not_fit_the_budget_are_named() -> None:
    free = plan_of(hardware=toy(), memory_budget=None, batch_size=8, mesh={"model": 8}, model=lambda: mlp(4096))
    pins = {"kernel": P()}
    with raises(autoshard.InfeasibleError, "kernel") as caught:
        plan_of(
            lambda: mlp(4096),
            {"model": 8},
            hardware=toy(),
            pins=pins,
            memory_budget=min(free.memory.peak_bytes, 600_000),
        )
    assert caught.error.conflicts == ["kernel"]


# -- unknown primitives --


def _with_unknown_primitive() -> keras.Model:
    class Odd(layers.Layer):
        def call(self, x: Any) -> Any:
            return ops.cast(jax.lax.population_count(ops.cast(x, "int32")), "float32") + odd(x)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    inputs = keras.Input((16,), name="x")
    return keras.Model(inputs, layers.Dense(16, name="dense")(Odd()(inputs)))


def odd(x: Any) -> Any:
    return ODD.bind(x)


def _odd_primitive() -> Any:
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive("odd_operation")
    primitive.def_impl(lambda x: x * 2)
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    return primitive


ODD = _odd_primitive()


def test_an_unknown_primitive_is_kept_whole_and_reported() -> None:
    plan = plan_of(_with_unknown_primitive, mode="predict", hardware=toy(1e6))
    assert any("odd_operation" in text and Path(__file__).name in text for text in plan.unknown), plan.unknown
    assert "odd_operation" in plan.summary()
    x = np.linspace(-2, 2, 8 * 16, dtype="float32").reshape(8, 16)
    state = plan.init_state()
    reference = jax.jit(plan.executable.traced.fn)(jax.device_get(state), (x,))[1]
    np.testing.assert_allclose(plan.jit()(state, (x,))[1], reference, rtol=1e-5, atol=1e-6)


def test_an_unknown_primitive_is_an_error_under_strict() -> None:
    for options in ({"strict": True}, {"solver": autoshard.SolverOptions(strict=True)}):
        with raises(autoshard.UnsupportedModelError, "strict", "odd_operation", Path(__file__).name):
            plan_of(_with_unknown_primitive, mode="predict", **options)


# -- plans used where they do not belong --


def test_a_step_takes_the_batch_it_was_planned_for(plan: autoshard.Plan) -> None:
    state, (x, y) = plan.init_state(), _batch()
    for batch, parts in [
        ((x,), ("structure",)),
        ((x, y, y), ("structure",)),
        (({"x": x}, y), ("structure",)),
        (_batch(16), ("(16, 16)", "(8, 16)")),
        ((x[:, :8], y), ("(8, 8)",)),
    ]:
        with raises(autoshard.PlanMismatchError, *parts):
            plan.step(state, batch)


@pytest.mark.parametrize(
    ("shape", "names"), [((2, 4), ("data", "tensor")), ((4, 2), ("data", "model")), ((8,), ("data",))]
)
def test_a_plan_runs_on_a_mesh_of_its_own_axes(plan: autoshard.Plan, shape: Any, names: Any) -> None:
    devices = np.array(jax.devices()[:8]).reshape(shape)
    with raises(autoshard.PlanMismatchError, "data=2, model=4"):
        plan.jit(Mesh(devices, names))
    with raises(autoshard.PlanMismatchError, "data=2, model=4"):
        plan.abstract_args(Mesh(devices, names))


def test_a_plan_needs_as_many_devices_as_its_mesh() -> None:
    with raises(autoshard.PlanMismatchError, "16", "8 attached"):
        plan_of(mesh={"data": 16}, batch_size=16).jit()


# -- plan files --


def test_damaged_plan_files_are_refused(plan: autoshard.Plan, tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    plan.save(good)
    data = json.loads(good.read_text())

    def changed(**fields: Any) -> str:
        return json.dumps({**data, **fields})

    def without(key: str) -> str:
        return json.dumps({k: v for k, v in data.items() if k != key})

    cases = {
        "empty": "",
        "truncated": good.read_text()[: len(good.read_text()) // 2],
        "not json": "layout: [data]",
        "another json": '{"a": 1}',
        "a list": "[1, 2]",
        "foreign": changed(format="someone else's plan"),
        "newer": changed(version=data["version"] + 1),
        "no version": without("version"),
        "version text": changed(version="new"),
        "bad layout": changed(arguments=[{**data["arguments"][0], "layout": ["x", "y"]}]),
        "bad number of axes": changed(mesh={"axis_names": ["data"], "axis_sizes": [8]}),
        "bad placement": changed(placement={**data["placement"], "of_op": [10**6]}),
        "bad cost": changed(cost={"seconds": 3}),
        "null arguments": changed(arguments=None),
        **{f"no {key}": without(key) for key in data if key not in ("format", "version")},
    }
    for name, text in cases.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        if name == "no specs":  # written for readers of the file; derived from the arguments when read
            assert autoshard.load(path).specs == plan.specs
            continue
        with raises(autoshard.PlanFileError, f"{name}.json"):
            autoshard.load(path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\x80\x04\x95\xff\xfe")
    for path in (binary, tmp_path, tmp_path / "missing.json"):
        with raises(autoshard.PlanFileError, str(path)):
            autoshard.load(path)
    with raises(autoshard.PlanFileError, "no such folder"):
        plan.save(tmp_path / "no such folder" / "plan.json")


def test_a_loaded_plan_fits_its_own_model_only(plan: autoshard.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert autoshard.load(path, mlp).executable is not None
    with raises(autoshard.UnsupportedModelError, "bind"):
        autoshard.load(path).jit()
    with raises(autoshard.UnsupportedModelError, "bind"):
        autoshard.load(path).init_state()
    for model, part in [
        (lambda: mlp(64), "(16, 64)"),
        (lambda: mlp(optimizer="sgd"), "variables"),
        (lambda: compiled(keras.Sequential([keras.Input((16,)), layers.Dense(8)])), "variables"),
        (lambda: _with_other_activation(), "computes"),
    ]:
        with raises(autoshard.PlanMismatchError, part):
            autoshard.load(path, model)


def _with_other_activation() -> keras.Model:
    inputs = keras.Input((16,), name="x")
    h = layers.Dense(32, activation="tanh", name="up")(inputs)
    model = keras.Model(inputs, layers.Dense(8, name="down")(h))
    model.compile(optimizer="adam", loss="mse")
    return model


# -- backends --

_PROGRAM = """
import autoshard_ilp as autoshard
from autoshard_ilp.keras_integration import ensure_jax_backend
{before}
try:
    ensure_jax_backend()
except autoshard.UnsupportedModelError as error:
    print("error:", error)
else:
    import keras
    print("backend:", keras.backend.backend())
"""


@pytest.mark.parametrize(
    ("backend", "before", "expected"),
    [(None, "", "backend: jax"), (None, "import keras", "backend: jax"), ("numpy", "", "KERAS_BACKEND='numpy'"),
     ("numpy", "import keras", "'numpy'")],
)  # fmt: skip
def test_keras_runs_on_jax(backend: str | None, before: str, expected: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    environment |= {"KERAS_HOME": str(tmp_path)} | ({"KERAS_BACKEND": backend} if backend else {})
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(before=before)],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert expected in done.stdout, done.stdout + done.stderr
    if "numpy" in expected:
        assert "error: " in done.stdout and "KERAS_BACKEND=jax" in done.stdout
