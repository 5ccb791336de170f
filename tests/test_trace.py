"""Tracing: the traced step is the model's own step, its arguments are named, and nothing is allocated."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import jax
import keras
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import layers

from autoshard_ilp import keras_integration as ki
from autoshard_ilp.errors import AutoshardError, InputShapeError, PlanMismatchError, UnsupportedModelError
from autoshard_ilp.models import load_model_factory
from autoshard_ilp.trace import trace_model
from autoshard_ilp.traced import TracedStep
from zoo import BATCH_SIZE, ZOO, Case


def _trace(case: Case, model=None, **options) -> TracedStep:
    batch = case.make_batch(np.random.default_rng(0))
    if case.needs_inputs:
        options.setdefault("inputs", batch[0])
    return trace_model(model or case.build, batch_size=BATCH_SIZE, sequence_length=case.sequence_length, **options)


def _net(loss="mse", optimizer="adam", **options):
    def build():
        x = keras.Input((16,), name="x")
        h = layers.Dense(32, name="a")(x)
        model = keras.Model(x, layers.Dense(4, name="b")(h))
        model.compile(optimizer() if callable(optimizer) else optimizer, loss=loss, **options)
        return model

    return build


def _paths(traced, role):
    return [a.path for a in traced.arguments if a.role == role]


# --- the traced step is the model's step --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param("mlp_accumulation_ema", marks=pytest.mark.slow), "mlp_loss_scaling", "custom_train_step"],
)
def test_jaxpr_computes_what_keras_computes(name):
    """Evaluating the jaxpr of an abstract build equals train_step of an eager build with the same seed."""
    case = ZOO[name]
    batch = case.make_batch(np.random.default_rng(1))
    traced = _trace(case)
    state = ki.initial_state(traced)
    flat = jax.jit(jaxpr_as_fun(traced.closed_jaxpr))(*jax.tree.leaves((state, batch)))
    new_state, logs = jax.tree.unflatten(traced.out_tree, flat)

    model = case.build()
    model._symbolic_build(data_batch=batch)
    expected_logs, expected_state = jax.jit(model.train_step)(ki.compiled_state(model), batch)
    assert logs.keys() == expected_logs.keys()
    for got, expected in zip(
        jax.tree.leaves((new_state, logs)), jax.tree.leaves((expected_state, expected_logs)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_zoo_member_traces_with_the_shapes_of_its_real_batch(name):
    case = ZOO[name]
    traced = _trace(case)
    real = jax.tree.map(lambda a: (a.shape, str(a.dtype)), case.make_batch(np.random.default_rng(0)))
    assert jax.tree.map(lambda s: (s.shape, str(s.dtype)), traced.batch) == real
    assert all(v._value is None for v in [*traced.model.trainable_variables, *traced.model.non_trainable_variables])
    assert set(traced.aliases) == set(range(len(jax.tree.leaves(traced.state))))

    flat = [(tuple(s.shape), str(s.dtype)) for s in jax.tree.leaves((traced.state, traced.batch))]
    assert [(a.shape, a.dtype) for a in traced.arguments] == flat
    assert [(tuple(v.aval.shape), str(v.aval.dtype)) for v in traced.closed_jaxpr.jaxpr.invars] == flat
    assert [(tuple(v.aval.shape), str(v.aval.dtype)) for v in traced.closed_jaxpr.jaxpr.outvars] == [
        (r.shape, r.dtype) for r in traced.results
    ]
    for infos in (traced.arguments, traced.results):
        assert len({i.path for i in infos}) == len(infos)
    for argument in traced.arguments:
        if argument.role == "optimizer" and argument.shape:
            parameter = traced.arguments[argument.reference]
            assert parameter.role == "parameter"
            if name != "mlp_adafactor":
                assert parameter.shape == argument.shape


def test_paths_and_roles_of_a_plain_model():
    traced = trace_model(_net(metrics=["mae"]), sample_weight=np.ones(40), batch_size=40)
    assert _paths(traced, "parameter") == ["a/kernel", "a/bias", "b/kernel", "b/bias"]
    assert _paths(traced, "input") == ["inputs/x"]
    assert _paths(traced, "target") == ["targets/b"]
    assert _paths(traced, "sample_weight") == ["sample_weight"]
    assert [r.path for r in traced.results if r.role == "output"] == ["outputs/loss", "outputs/mae"]
    references = [a.reference for a in traced.arguments if a.role == "optimizer"]
    assert references == [None, None, 0, 0, 1, 1, 2, 2, 3, 3]  # iteration, learning rate, then Adam's pairs
    assert traced.batch_size == 40


def test_seeds_and_metrics_are_state():
    traced = _trace(ZOO["mlp"])
    (seed,) = [a for a in traced.arguments if a.role == "seed"]
    assert (seed.shape, seed.dtype) == ((2,), "uint32")
    assert "loss/total" in _paths(traced, "metric")


def test_repeated_paths_are_told_apart():
    class Twins(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers.Dense(4, name="twin"), layers.Dense(4, name="twin")

        def call(self, x):
            return self.second(self.first(x))

    traced = trace_model(Twins, mode="predict", inputs=np.zeros((8, 4), "float32"))
    kernels = [p for p in _paths(traced, "parameter") if "kernel" in p]
    assert len(kernels) == 2 and kernels[1] == f"{kernels[0]}#2"


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Muon(1e-3),
        lambda: keras.optimizers.Adafactor(1e-3),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3, use_ema=True)),
        lambda: keras.optimizers.SGD(1e-3, momentum=0.9, gradient_accumulation_steps=2),
        lambda: keras.optimizers.Ftrl(1e-3),
    ],
)
def test_slot_references_by_alignment_equal_the_recorded_ones(make):
    """A live optimizer, built before tracing, has recorded nothing; its own lists must tell the same."""
    abstract = trace_model(_net(optimizer=make))
    live = _net(optimizer=make)()
    live.optimizer.build(live.trainable_variables)
    traced = trace_model(live)
    references = [a.reference for a in traced.arguments]
    assert references == [a.reference for a in abstract.arguments]
    slots = [a for a in traced.arguments if a.role == "optimizer" and a.shape]
    assert slots and all(a.reference is not None for a in slots)


def test_slot_references_do_not_depend_on_names():
    model = _net()()
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:
        variable._name = variable._path = "anonymous"
    references = ki.optimizer_slot_reference(model.optimizer, model.trainable_variables)
    assert references == [None, None, 0, 0, 1, 1, 2, 2, 3, 3]


def test_predict_mode():
    case = ZOO["multi_input_output"]
    traced = _trace(case, mode="predict")
    inputs, _ = case.make_batch(np.random.default_rng(0))
    state = ki.initial_state(traced)
    new_state, outputs = traced.fn(state, (inputs,))
    expected = case.build().predict(inputs, batch_size=BATCH_SIZE, verbose=0)
    np.testing.assert_allclose(outputs["label"], expected["label"], rtol=1e-4, atol=1e-5)
    assert [r.path for r in traced.results if r.role == "output"] == ["outputs/label", "outputs/score"]
    assert jax.tree.structure(new_state) == jax.tree.structure(traced.state)
    assert not _paths(traced, "optimizer") and not _paths(traced, "target")


def test_compile_options_do_not_change_the_trace():
    plain = trace_model(_net(optimizer="sgd"))
    eager = trace_model(_net(optimizer="sgd", run_eagerly=True))
    other = trace_model(_net(optimizer="sgd", jit_compile=False, steps_per_execution=4))
    lines = [[e.primitive.name for e in t.closed_jaxpr.eqns] for t in (plain, eager, other)]
    assert lines[0] == lines[1] == lines[2]


def test_an_active_distribution_leaves_no_constraint_and_comes_back():
    distribution = keras.distribution.DataParallel()
    keras.distribution.set_distribution(distribution)
    try:
        traced = trace_model(_net())
        assert keras.distribution.distribution() is distribution
    finally:
        keras.distribution.set_distribution(None)
    assert "sharding_constraint" not in str(traced.closed_jaxpr)
    assert all(v._layout is None for v in traced.model.variables)


# --- state --------------------------------------------------------------------------------------------------------


def _shardings(traced):
    """Every even first dimension over eight devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def sharding(spec):
        rows = spec.shape and spec.shape[0] % 8 == 0
        return NamedSharding(mesh, PartitionSpec("x") if rows else PartitionSpec())

    return jax.tree.map(sharding, traced.state)


@pytest.mark.parametrize("live", [False, True])
def test_initial_state_is_sharded_and_equals_an_eager_build(live):
    case = ZOO["mlp"]
    model = case.build() if live else None
    traced = _trace(case, model)
    shardings = _shardings(traced)
    state = ki.initial_state(traced, shardings)
    assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), state, shardings))
    reference = case.build()
    reference.optimizer.build(reference.trainable_variables)
    for got, variables in zip(
        state[:3],
        (reference.trainable_variables, reference.non_trainable_variables, reference.optimizer.variables),
        strict=True,
    ):
        for array, variable in zip(got, variables, strict=True):
            np.testing.assert_allclose(array, variable.numpy(), rtol=1e-6)


def test_initial_state_with_a_seed_repeats_keras_set_random_seed():
    traced = trace_model(_net())
    state = ki.initial_state(traced, seed=3)
    keras.utils.set_random_seed(3)
    expected = _net()()
    for array, variable in zip(state[0], expected.trainable_variables, strict=True):
        np.testing.assert_array_equal(array, variable.numpy())
    other = ki.initial_state(traced, seed=4)
    assert not np.array_equal(state[0][0], other[0][0])


def test_initial_state_does_not_disturb_random_generators():
    import random

    traced = trace_model(_net())
    before = random.getstate(), np.random.get_state()[1].tolist()
    ki.initial_state(traced, seed=3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_initial_state_refuses_another_model_the_second_time():
    widths = iter([8, 16])

    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(next(widths))])
        model.compile("sgd", "mse")
        return model

    traced = trace_model(build)
    with pytest.raises(PlanMismatchError, match="same variables"):
        ki.initial_state(traced, seed=0)


def test_donating_the_state_of_a_live_model_leaves_the_model_alone():
    model = _net()()
    traced = trace_model(model)
    before = [v.numpy() for v in model.trainable_variables]
    state = ki.initial_state(traced, _shardings(traced))
    batch = (np.ones((32, 16), "float32"), np.ones((32, 4), "float32"))
    jax.jit(traced.fn, donate_argnums=0)(state, batch)
    for old, variable in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())


def test_written_state_trains_on():
    """State into an abstract model, then Keras's own fit: the losses go on where the pure step stopped."""
    case = ZOO["mlp_adafactor"]
    batch = case.make_batch(np.random.default_rng(0))
    traced = _trace(case)
    state, _ = jax.jit(traced.fn)(ki.initial_state(traced), batch)
    expected, _ = jax.jit(traced.fn)(state, batch)
    ki.write_state(traced.model, state)
    traced.model.fit(*batch, batch_size=BATCH_SIZE, verbose=0, shuffle=False)
    for variable, array in zip(traced.model.trainable_variables, expected[0], strict=True):
        np.testing.assert_allclose(variable.numpy(), array, rtol=1e-5, atol=1e-6)


def test_write_state_names_what_does_not_fit():
    traced = trace_model(_net())
    state = ki.initial_state(traced)
    with pytest.raises(PlanMismatchError, match="a/kernel"):
        ki.write_state(traced.model, ([state[0][1], *state[0][1:]], *state[1:]))
    with pytest.raises(PlanMismatchError, match="3 arrays for 4 variables"):
        ki.write_state(traced.model, (state[0][1:], *state[1:]))


def test_a_live_model_still_trains_after_tracing():
    """The optimizer's slots have no value yet; Keras makes them from their initializers."""
    model = _net()()
    trace_model(model)
    assert all(v._value is None for v in model.optimizer.variables[2:])
    history = model.fit(np.ones((8, 16), "float32"), np.ones((8, 4), "float32"), epochs=3, verbose=0).history["loss"]
    assert history[2] < history[0]


def test_initializers_that_draw_from_one_generator_stay_pure():
    def build():
        generator = keras.random.SeedGenerator(5)
        initializer = keras.initializers.RandomNormal(seed=generator)
        model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, kernel_initializer=initializer) for _ in "ab")])
        model.compile("sgd", "mse")
        return model

    state = ki.initial_state(trace_model(build))
    expected = build()
    np.testing.assert_allclose(state[0][0], expected.trainable_variables[0].numpy(), rtol=1e-6)
    np.testing.assert_allclose(state[0][2], expected.trainable_variables[2].numpy(), rtol=1e-6)
    assert not np.array_equal(state[0][0], state[0][2])


class Scaled(layers.Layer):
    """Its initializers return what a tensor can be made of."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer=lambda *args, **keywords: 2.5, name="scale")
        self.shift = self.add_weight(shape=(4,), initializer=lambda shape, dtype: np.arange(4.0), name="shift")

    def call(self, x):
        return x * keras.ops.exp(self.scale) + self.shift


def test_initializers_may_return_numbers_and_numpy_arrays():
    def build():
        model = keras.Sequential([keras.Input((4,)), Scaled()])
        model.compile("sgd", "mse")
        return model

    traced = trace_model(build)
    state, expected = ki.initial_state(traced), build()
    for found, variable in zip(state[0], expected.trainable_variables, strict=True):
        assert found.dtype == variable.value.dtype
        np.testing.assert_array_equal(found, variable.value)
    x, y = np.ones((2, 4), "float32"), np.zeros((2, 4), "float32")
    assert float(jax.jit(traced.fn)(state, (x, y))[1]["loss"]) == pytest.approx(expected.evaluate(x, y, verbose=0))


# --- abstract construction ------------------------------------------------------------------------------------------


def test_patches_are_undone_even_after_an_error():
    from keras.src.backend.jax.core import JaxVariable
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    names = {
        JaxVariable: ("_initialize_with_initializer", "_deferred_initialize"),
        BaseOptimizer: ("add_variable_from_reference",),
    }
    before = {owner: {n: vars(owner).get(n) for n in own} for owner, own in names.items()}

    def fail():
        layers.Dense(3).build((2, 2))
        raise RuntimeError("from the builder")

    with pytest.raises(RuntimeError, match="from the builder"):
        trace_model(fail)
    assert {owner: {n: vars(owner).get(n) for n in own} for owner, own in names.items()} == before
    assert keras.Variable("ones", shape=(2,))._value is not None


def test_a_huge_model_traces_in_the_memory_of_a_small_one():
    """Two kernels of 1 TiB each would not fit."""

    def build():
        side = 2**19
        model = keras.Sequential([keras.Input((side,)), layers.Dense(side), layers.Dense(side)])
        model.compile("adam", "mse")
        return model

    traced = trace_model(build)
    assert sum(a.shape == (2**19, 2**19) for a in traced.arguments) == 6


def test_llama3_8b_traces_quickly_and_holds_no_values():
    start = time.process_time()
    traced = trace_model(load_model_factory("hub:llama3_8b"), batch_size=8, sequence_length=2048)
    assert time.process_time() - start < 15
    assert sum(math.prod(a.shape) for a in traced.arguments if a.role == "parameter") == 8_030_261_248
    assert all(v._value is None for v in traced.model.variables)
    # What the optimizer made from concrete numbers: its iteration and its learning rate.
    assert sum(v._value is not None for v in traced.model.optimizer.variables) == 2
    assert all(np.size(c) < 10_000 for c in traced.closed_jaxpr.consts)


_MEASURE = """
import math, sys
from autoshard_ilp.models import load_model_factory
from autoshard_ilp.trace import trace_model
traced = trace_model(load_model_factory(sys.argv[1]), batch_size=8, sequence_length=2048)
print(sum(math.prod(a.shape) for a in traced.arguments if a.role == "parameter"))
with open("/proc/self/status") as file:  # not ru_maxrss, which begins at the peak of the process that started this one
    print(1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16", "float32"])
def test_llama3_70b_traces_under_two_gigabytes(dtype):
    command = [sys.executable, "-c", _MEASURE, f"hub:llama3_70b?dtype={dtype}"]
    run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    parameters, peak_bytes = map(int, run.stdout.split()[-2:])
    assert parameters == 70_553_706_496
    assert peak_bytes < 2e9


# --- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device_count", "expected"), [(1, 32), (8, 32), (24, 48), (256, 256)])
def test_default_batch_size(device_count, expected):
    assert trace_model(_net(), device_count=device_count).batch_size == expected


def test_given_inputs_fix_the_batch_and_are_canonicalised():
    traced = trace_model(_net(), inputs=np.zeros((6, 16)), targets=keras.KerasTensor((None, 4)))
    assert traced.batch_size == 6
    assert [(a.shape, a.dtype) for a in traced.arguments[-2:]] == [((6, 16), "float32"), ((6, 4), "float32")]


def test_nested_inputs_of_a_subclassed_model():
    class Nested(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.table = layers.Dense(4), layers.Embedding(10, 4)

        def call(self, inputs):
            first, second = inputs["ids"]
            return self.dense(inputs["x"]) + self.table(first) + self.table(second)

    def build():
        model = Nested()
        model.compile("adam", "mse")
        return model

    ids = jax.ShapeDtypeStruct((8,), "int32")
    traced = trace_model(build, inputs={"x": np.zeros((8, 16)), "ids": (ids, ids)})
    assert _paths(traced, "input") == ["inputs/ids/0", "inputs/ids/1", "inputs/x"]
    assert _paths(traced, "target") == ["targets/0"]


def test_a_model_that_trains_on_its_own_loss_takes_no_targets():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(16)

        def call(self, x):
            y = self.dense(x)
            self.add_loss(keras.ops.mean(keras.ops.square(y - x)))
            return y

    def build():
        model = Own()
        model.compile("adam")
        return model

    traced = trace_model(build, inputs=np.zeros((8, 16), "float32"))
    assert len(traced.batch) == 1 and not _paths(traced, "target")


def _two_outputs(loss):
    def build():
        x = keras.Input((4,), name="x")
        model = keras.Model(x, [layers.Dense(3, name="p")(x), layers.Dense(1, name="q")(x)])
        model.compile("sgd", loss=loss)
        return model

    return build


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (["sparse_categorical_crossentropy", "mse"], [((32,), "int32"), ((32, 1), "float32")]),
        ({"p": keras.losses.SparseCategoricalCrossentropy(), "q": "mse"}, [((32,), "int32"), ((32, 1), "float32")]),
        ("mse", [((32, 3), "float32"), ((32, 1), "float32")]),
        (["categorical_crossentropy", None], [((32, 3), "float32"), ((32, 1), "float32")]),
    ],
)
def test_targets_of_several_outputs(loss, expected):
    traced = trace_model(_two_outputs(loss))
    assert _paths(traced, "target") == ["targets/p", "targets/q"]
    assert [(a.shape, a.dtype) for a in traced.arguments if a.role == "target"] == expected


def _unknown(shape):
    def build():
        x = keras.Input(shape, name="x")
        model = keras.Model(x, layers.Dense(3)(x))
        model.compile("sgd", "mse")
        return model

    return build


def _live_unbuilt():
    model = keras.Sequential([layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({}, _unknown((None, 3)), r"inputs/x of shape \(None, None, 3\), whose dimension 1 is None.*sequence_length"),
        ({"sequence_length": 5}, _unknown((None, None, 3)), "dimension 1 is None.*Give inputs="),
        ({}, _live_unbuilt, "not known.*Give inputs="),
        ({"inputs": np.zeros((6, 16)), "batch_size": 8}, _net(), r"global batch, 8. Received: {'inputs/x': \(6, 16\)}"),
        ({"inputs": np.zeros((6, 17))}, _net(), "expected shape"),
        ({"targets": np.zeros((16, 4))}, _net(), "first dimension of all targets"),
        ({"targets": np.zeros((32, 7))}, _net(), "Check that targets="),
        ({"inputs": np.array([["text"]])}, _net(), "numbers or booleans"),
        ({"inputs": [[1.0, 2.0]]}, _net(), "need a shape"),
        ({}, _net(loss="crossentropy"), "integer labels or one-hot.*targets="),
        ({"batch_size": 0}, _net(), "positive integer"),
        ({"mode": "evaluate"}, _net(), "mode must be"),
    ],
)
def test_shape_errors_say_what_to_give(options, model, message):
    with pytest.raises(InputShapeError, match=f"(?s){message}"):
        trace_model(model, **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]), r"must be compiled.*model\.compile\("),
        (3, "must be a keras.Model, or a callable"),
        (lambda width: width, "no arguments"),
        (lambda: "model", "must return a keras.Model"),
    ],
)
def test_unsupported_models_say_what_to_do(model, message):
    with pytest.raises(UnsupportedModelError, match=f"(?s){message}"):
        trace_model(model)


def _table(first=None):
    """A table of three rows beside a batch."""
    rows, x = keras.Input(batch_shape=(3, 5), name="rows"), keras.Input(batch_shape=(first, 5), name="x")
    model = keras.Model([rows, x], keras.ops.matmul(layers.Dense(5)(x), keras.ops.transpose(layers.Dense(5)(rows))))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("first", "options", "size"),
    [
        (None, {}, 32),
        (None, {"batch_size": 16}, 16),
        (None, {"inputs": [np.zeros((3, 5)), np.zeros((8, 5))]}, 8),
        (8, {"batch_size": 8}, 8),
    ],
)
def test_an_input_with_a_first_dimension_of_its_own_is_not_the_batch(first, options, size):
    traced = trace_model(lambda: _table(first), **options)
    assert traced.batch_size == size
    assert [tuple(x.shape) for x in traced.batch[0]] == [(3, 5), (size, 5)]
    assert traced.batch[1].shape == (size, 3)


def test_inputs_of_fixed_batches_stay_the_batch():
    fixed, free = keras.Input(batch_shape=(8, 5)), keras.Input((5,))
    model = keras.Model([fixed, free], layers.Dense(2)(layers.Concatenate()([fixed, free])))
    model.compile("sgd", "mse")
    assert trace_model(model).batch_size == 8


def test_an_untraceable_step_is_reported_with_its_cause():
    class Broken(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)

        def call(self, x):
            return self.dense(x)

        def train_step(self, state, data):
            raise KeyError("missing key")

    def build():
        model = Broken()
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match=r"traced.*KeyError.*missing key"):
        trace_model(build, inputs=np.zeros((8, 4), "float32"))


@pytest.mark.parametrize(("configured", "expected"), [(None, "jax"), ("jax", "jax"), ("torch", None)])
def test_the_backend_is_chosen_before_keras_is_imported(monkeypatch, configured, expected):
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.delenv("KERAS_BACKEND")
    if configured:
        monkeypatch.setenv("KERAS_BACKEND", configured)
    if expected:
        ki.ensure_jax_backend()
        assert os.environ["KERAS_BACKEND"] == expected
        return
    with pytest.raises(UnsupportedModelError, match=r"KERAS_BACKEND='torch'.*Set the environment variable"):
        ki.ensure_jax_backend()


def test_an_imported_keras_on_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(UnsupportedModelError, match=r"'tensorflow'.*KERAS_BACKEND=jax"):
        trace_model(_net())


def test_what_keras_says_in_colours_is_repeated_without_them():
    class Refusing(keras.Model):
        def call(self, x):
            raise ValueError("no such thing")

    model = Refusing()
    model.compile(optimizer="sgd", loss="mse")
    spec = keras.KerasTensor((8, 4), "float32")
    with pytest.raises(AutoshardError, match="no such thing") as raised:
        trace_model(model, mode="train", inputs=spec, targets=spec)
    assert "\x1b" in str(raised.value.__cause__) and "\x1b" not in str(raised.value)


def test_a_step_that_cannot_be_traced_names_layers_that_keras_does_not_compile():
    inputs = keras.Input((16, 16, 3))
    outputs = layers.GlobalAveragePooling2D()(layers.RandomCrop(8, 8, name="crop")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(UnsupportedModelError, match=r"(?s)could not be traced.*supports_jit is False\): crop\. .*data"):
        trace_model(model, mode="train", batch_size=8)
