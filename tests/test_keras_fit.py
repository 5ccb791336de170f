"""fit, evaluate, predict and train_on_batch under a plan, against the same model on one device."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
import keras_cases as cases
from autoshard_ilp.calling import keeps_meaning
from keras_cases import BATCH, MESH, assert_close, assert_on_plan, features, fitted, mlp, plan_for, seeded, values
from profiles_for_tests import toy

pytestmark = pytest.mark.usefixtures("quick_code")

KINDS: dict[str, Any] = {
    "dense": (mlp, features),
    "einsum and normalisations": (cases.normalised, features),
    "convolutions": (cases.convolutions, cases.images),
    "embedding, attention, LSTM": (cases.recurrent, cases.tokens),
}


def everything(x: Any, y: Any) -> Any:
    """What a user calls, one after the other, with batches that do not divide."""

    def run(model: keras.Model) -> Any:
        losses = fitted(model, x, y)["loss"]
        one = model.train_on_batch(x[:BATCH], y[:BATCH], return_dict=True)["loss"]
        scores = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        tested = model.test_on_batch(x[:5], y[:5], return_dict=True)
        outputs = model.predict(x, batch_size=BATCH, verbose=0)
        assert outputs.shape[0] == len(x)
        return losses, one, scores, tested, outputs, model.predict_on_batch(x[:3])

    return run


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "dense")) for k in KINDS])
def test_all_that_a_trainer_does_equals_one_device(kind: str) -> None:
    build, data = KINDS[kind]
    x, y = data()
    cases.same_as_one_device(build, (x, y), everything(x, y))


class Counted(layers.Layer):
    """Counts its calls in an integer of 64 bits, and passes on what it gets."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1)
        return x


def counted() -> keras.Model:
    hidden = [keras.Input((cases.FEATURES,)), Counted(), layers.Dense(64, dtype="float64")]
    return cases.compiled(keras.Sequential([*hidden, layers.Dense(cases.CLASSES)]))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_variables_may_be_declared_wider_than_arrays_are() -> None:
    """Without JAX's mode for 64 bits they hold arrays of 32, on one device and under a plan."""
    x, y = features()
    cases.same_as_one_device(counted, (x, y), lambda model: fitted(model, x, y)["loss"])


def test_one_compilation_and_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features(40)
    model = seeded(mlp)
    plan = plan_for(model, (x, y))
    traced: list[Any] = []
    own_step = model.train_step
    monkeypatch.setattr(model, "train_step", lambda *args: traced.append(args) or own_step(*args))
    plan.apply(model)
    assert len(traced) == 1  # compared with the plan, and compiled before fit takes the variables
    for _ in range(2):
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
        model.train_on_batch(x[:BATCH], y[:BATCH])
        assert_on_plan(model, plan)
    assert len(traced) == 1


def test_fit_runs_the_program_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that fit runs is plan.jit(): compiled once, constraints and shardings included."""
    x, y = features()
    model = seeded(mlp)
    plan = plan_for(model, (x, y))
    made = []
    jit = autoshard.Plan.jit

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(self)
        return jit(self, *args, **kwargs)

    monkeypatch.setattr(autoshard.Plan, "jit", recorded)
    plan.apply(model)
    model.fit(x[:16], y[:16], batch_size=BATCH, epochs=3, verbose=0)
    assert len(made) == 1
    assert made[0].placement == plan.placement
    text = plan.jit().lower(*plan.abstract_args()).as_text()
    assert "sdy.sharding_constraint" in text
    fitted(model, x, y)  # a last batch of 4: the same decisions at other shapes
    assert len(made) == 3
    assert made[2].placement.of_op == plan.placement.of_op
    assert_on_plan(model, plan)


def test_a_last_batch_that_does_not_divide_keeps_statistics_exact() -> None:
    """5 samples over a data axis of 2: batch statistics, losses and metrics see 5 samples, not 6 and not 4."""
    x, y = features(13)

    def run(model: keras.Model) -> Any:
        history = fitted(model, x, y, epochs=1)
        return history["loss"], history["accuracy"], model.predict(x, batch_size=BATCH, verbose=0)

    cases.same_as_one_device(cases.normalised, (x, y), run, mesh={"data": 2})


def test_another_batch_size_than_planned() -> None:
    x, y = features(48)
    cases.same_as_one_device(mlp, (x, y), lambda m: fitted(m, x, y, batch_size=16)["loss"])


def test_a_predict_plan_predicts_and_does_not_train() -> None:
    x, y = features()
    model, alone = seeded(mlp), seeded(mlp)
    plan = plan_for(model, (x, y), mode="predict")
    plan.apply(model)
    assert_close(model.predict(x, batch_size=BATCH, verbose=0), alone.predict(x, verbose=0))
    assert_close(model.evaluate(x, y, batch_size=BATCH, verbose=0), alone.evaluate(x, y, batch_size=BATCH, verbose=0))
    before = values(model)
    with pytest.raises(autoshard.PlanMismatchError, match=r"predict.*fit or train_on_batch"):
        model.fit(x, y, verbose=0)
    assert_close(values(model), before, 0, 0)
    assert_on_plan(model, plan)


def test_apply_fails_before_it_touches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features()
    model, alone = seeded(mlp), seeded(mlp)
    plan = plan_for(model, (x, y))
    before = [(v, v._value, v._layout) for v in [*model.variables, *model.optimizer.variables]]

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the compiler gave up")

    with monkeypatch.context() as patched:
        patched.setattr(autoshard.Plan, "jit", fails)
        with pytest.raises(RuntimeError, match="gave up"):
            plan.apply(model)
    assert all(v._value is value and v._layout is layout for v, value, layout in before)
    assert "make_train_function" not in vars(model)
    assert_close(fitted(model, x, y)["loss"], fitted(alone, x, y)["loss"], 1e-6)


class Interrupts(keras.callbacks.Callback):
    """Raises in the middle of an epoch."""

    def __init__(self, what: BaseException) -> None:
        super().__init__()
        self.what = what

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            raise self.what

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_end(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_end(batch)


def test_variables_survive_every_failure() -> None:
    x, y = features()
    model, alone = seeded(mlp), seeded(mlp)
    plan_for(model, (x, y)).apply(model)
    start = values(model)

    def no_data() -> Any:
        raise OSError("disk")
        yield

    def bad_data() -> Any:
        yield x[:BATCH, :3], y[:BATCH]

    for data in (no_data(), bad_data()):
        with pytest.raises((OSError, ValueError)):
            model.fit(data, shuffle=False, verbose=0)
    assert_close(values(model), start, 0, 0)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Interrupts(KeyboardInterrupt())])
    for part in (model.predict, lambda x, **options: model.evaluate(x, y, **options)):
        with pytest.raises(ZeroDivisionError):
            part(x, batch_size=BATCH, verbose=0, callbacks=[Interrupts(ZeroDivisionError())])
    assert all(v._value is not None and not v._value.is_deleted() for v in model.variables)
    for i in (0, 8):
        alone.train_on_batch(x[i : i + BATCH], y[i : i + BATCH])
    assert_close(values(model), values(alone))


def test_without_jit_a_plan_is_the_same_and_its_steps_run_operation_by_operation() -> None:
    x, y = features(BATCH)

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input(x.shape[1:]), layers.Dropout(0.2, seed=3), layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    alone, model = seeded(build), seeded(build)
    expected = alone.train_on_batch(x, y)
    options: dict[str, Any] = {"mesh": {"x": 2}, "pins": {"kernel": ("x", None)}}
    plan = plan_for(model, (x, y), **options)
    with jax.disable_jit():
        assert plan_for(model, (x, y), **options).specs == plan.specs
        assert jax.tree.map(lambda v: v.sharding, plan.init_state()) == plan.in_shardings[0]
        plan.apply(model)
        assert_close(model.train_on_batch(x, y), expected)
    assert_close(values(model), values(alone))
    assert_on_plan(model, plan)


def test_an_array_that_a_step_has_consumed_is_refused() -> None:
    """Best weights kept without copying them: the first step after that took their buffers. jaxlib 0.10 crashes."""
    x, y = features()
    model = seeded(mlp)
    plan = plan_for(model, (x, y))
    plan.apply(model)
    kept, copies = ([make(v.value) for v in model.variables] for make in (lambda x: x, np.array))
    model.train_on_batch(x[:BATCH], y[:BATCH])

    class Restores(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for variable, value in zip(self.model.variables, kept, strict=True):
                variable.assign(value)

    restores = Restores()
    restores.set_model(model)
    restores.on_train_batch_end(0)
    iterations = int(model.optimizer.iterations.numpy())
    for run in (
        lambda: model.predict(x, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.fit(x, y, verbose=0),
        lambda: plan.apply(model),
    ):
        with pytest.raises(autoshard.PlanMismatchError, match="kernel', which was assigned an array that a training"):
            run()
    assert int(model.optimizer.iterations.numpy()) == iterations
    for variable, value in zip(model.variables, copies, strict=True):
        variable.assign(value)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    with pytest.raises(autoshard.PlanMismatchError, match="Keep copies of values"):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[restores])
    assert int(model.optimizer.iterations.numpy()) == iterations + 2


def test_set_weights_and_learning_rate_stay_on_plan() -> None:
    x, y = features()
    model = seeded(mlp)
    plan = plan_for(model, (x, y))
    plan.apply(model)
    weights = [np.asarray(w) * 0.5 for w in model.get_weights()]
    model.set_weights(weights)
    model.optimizer.learning_rate = 0.01
    assert_on_plan(model, plan)
    assert_close(model.get_weights(), weights, 0, 0)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    assert_on_plan(model, plan)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)


@pytest.mark.slow
def test_a_second_plan_and_another_mesh() -> None:
    x, y = features()
    model, alone = seeded(mlp), seeded(mlp)
    for mesh in (MESH, {"data": 4, "model": 2}, {"d": 8}):
        plan = plan_for(model, (x, y), mesh=mesh)
        plan.apply(model)
        assert_close(fitted(model, x, y)["loss"], fitted(alone, x, y)["loss"])
        assert_on_plan(model, plan)


def test_apply_during_fit() -> None:
    x, y = features(32)
    model, alone = seeded(mlp), seeded(mlp)
    plan = plan_for(model, (x, y))

    class Applies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                plan.apply(self.model)

    losses = fitted(model, x, y, callbacks=[Applies()])["loss"]
    assert_close(losses, fitted(alone, x, y)["loss"])
    assert_on_plan(model, plan)


@pytest.mark.slow
def test_clear_session_in_between() -> None:
    x, y = features()
    alone = seeded(mlp)
    plan = plan_for(seeded(mlp), (x, y))
    keras.backend.clear_session()
    model = seeded(mlp)
    plan.apply(model)
    keras.backend.clear_session()
    assert_close(fitted(model, x, y)["loss"], fitted(alone, x, y)["loss"])
    assert_on_plan(model, plan)


# -- a model that changed


def changed(how: str) -> keras.Model:
    if how == "optimizer":
        return seeded(lambda: mlp(keras.optimizers.Adam(0.01)))
    if how == "policy":
        return seeded(lambda: mlp(dtype="mixed_bfloat16"))
    if how == "frozen":
        model = seeded(mlp)
        model.layers[1].trainable = False
        return cases.compiled(model)
    if how == "layer":
        inputs = keras.Input((16,))
        x = layers.Dense(32, activation="relu")(inputs)
        x = layers.Dense(32)(layers.Dropout(0.2, seed=3)(x))
        return cases.compiled(keras.Model(inputs, layers.Dense(4)(x)))
    if how == "loss":
        return seeded(lambda: mlp(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=False)))
    return seeded(lambda: mlp(hidden=64))


CHANGES = {
    "optimizer": "optimizer is 'adam' instead of 'sgd'",
    "policy": "bfloat16",
    "frozen": r"dense[_0-9]*/kernel' is no longer trainable",
    "layer": r"6 trainable variables instead of 4, new: .*\(32, 32\)",
    "loss": "computes",
    "width": r"has shape \(16, 64\) instead of \(16, 32\)",
}


@pytest.fixture(scope="module")
def planned() -> autoshard.Plan:
    return plan_for(seeded(mlp), features())


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_model_is_refused_with_what_changed(planned: autoshard.Plan, how: str) -> None:
    model = changed(how)
    before = model.get_weights()
    with pytest.raises(autoshard.PlanMismatchError, match=CHANGES[how]):
        planned.apply(model)
    assert_close(model.get_weights(), before, 0, 0)
    assert len(model.trainable_variables[0].value.sharding.device_set) == 1
    assert np.isfinite(model.train_on_batch(*(v[:BATCH] for v in features()))[0])


def test_a_model_that_changes_under_its_plan() -> None:
    x, y = features()
    model, alone = seeded(mlp), seeded(mlp)
    plan = plan_for(model, (x, y))
    plan.apply(model)
    for m in (model, alone):
        fitted(m, x, y)
        cases.compiled(m)  # again, the same: the plan holds
    assert_close(fitted(model, x, y)["loss"], fitted(alone, x, y)["loss"])
    assert_on_plan(model, plan)
    before = values(model)
    cases.compiled(model, keras.optimizers.Adam(0.01))
    assert_close(model.predict(x, batch_size=BATCH, verbose=0), alone.predict(x, verbose=0))
    for train in (lambda: model.fit(x, y, verbose=0), lambda: model.train_on_batch(x[:8], y[:8])):
        with pytest.raises(autoshard.PlanMismatchError, match="optimizer is 'adam' instead of 'sgd'"):
            train()
    assert_close([np.asarray(v) for v in model.trainable_variables], before[: len(model.trainable_variables)], 0, 0)
    assert_close(model.predict(x, verbose=0), alone.predict(x, verbose=0))


def test_plans_that_do_not_apply() -> None:
    fn = autoshard.optimize_fn(lambda w: w * 2, (np.ones((8, 8), "float32"),), MESH, progress=False)
    with pytest.raises(autoshard.PlanMismatchError, match="plain JAX function"):
        fn.apply(seeded(mlp))
    plan = plan_for(seeded(mlp), features())
    with pytest.raises(autoshard.PlanMismatchError, match="16 devices"):
        dataclasses.replace(plan, mesh=dataclasses.replace(plan.mesh, axis_sizes=(4, 4))).apply(seeded(mlp))


class _NoBatches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


def test_data_without_a_sample_are_refused() -> None:
    """Keras fails on them with whatever its loops meet first."""
    model = mlp()
    plan_for(model, features(8)).apply(model)
    x, y = features(8)
    before = [v.numpy() for v in model.trainable_variables]
    actions: list[Any] = [
        lambda: model.fit(x[:0], y[:0], verbose=0),
        lambda: model.fit({"features": x[:0]}, y[:0], verbose=0),
        lambda: model.fit([], [], verbose=0),
        lambda: model.evaluate(x[:0], y[:0], verbose=0),
        lambda: model.predict(x=x[:0], verbose=0),
    ]
    for action in actions:
        with pytest.raises(autoshard.InputShapeError, match="at least one sample"):
            action()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras: the data ran out
        with pytest.raises(autoshard.InputShapeError, match="Received: _NoBatches"):
            model.fit(_NoBatches(), verbose=0)
        for a, b in zip(before, model.trainable_variables, strict=True):
            np.testing.assert_array_equal(a, b.numpy())
        model.fit(x, y, validation_data=(x[:0], y[:0]), verbose=0)  # as Keras has it


def test_a_method_that_the_user_has_put_on_the_model_stays() -> None:
    model = mlp()
    model.predict = lambda x: "mine"
    plan = plan_for(model, features(8))
    for _ in range(2):
        plan.apply(model)
        assert model.predict(0) == "mine"
        assert model.fit.__doc__ == type(model).fit.__doc__


def test_a_metric_that_counts_samples_does_not_count_the_padding_of_a_last_batch() -> None:
    """``AUC`` scatters samples into buckets; five of them over the devices are padded, and padding is no sample."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(13, 16)).astype("float32"), rng.integers(0, 2, 13).astype("float32")

    def build() -> keras.Model:
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((16,)), layers.Dense(8, "relu"), layers.Dense(1, "sigmoid")])
        model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(num_thresholds=20)])
        return model

    alone, planned = build(), build()
    options: dict[str, Any] = {"hardware": toy(1e8, 1e8), "inputs": x[:8], "targets": y[:8], "progress": False}
    autoshard.optimize(planned, MESH, **options).apply(planned)
    for model in (alone, planned):
        model.train_on_batch(x[:8], y[:8])
        model.evaluate(x[:8], y[:8], batch_size=8, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
    counts = [[np.asarray(v) for v in model.metrics_variables if v.shape] for model in (alone, planned)]
    assert len(counts[0]) == 4
    for expected, found in zip(*counts, strict=True):
        np.testing.assert_array_equal(found, expected)


DTYPES = [
    ("bool", "int8", True),
    ("int8", "int32", True),
    ("int32", "int8", False),
    ("uint8", "int8", False),
    ("uint8", "int16", True),
    ("int8", "uint8", False),
    ("int32", "float32", True),
    ("int8", "bfloat16", True),
    ("int16", "bfloat16", False),
    ("bfloat16", "float32", True),
    ("float32", "bfloat16", False),
    ("float16", "bfloat16", False),
    ("float32", "int32", False),
    ("float32", "complex64", True),
]


@pytest.mark.parametrize(("found", "wanted", "kept"), DTYPES)
def test_what_is_converted_keeps_its_meaning(found: str, wanted: str, kept: bool) -> None:
    assert keeps_meaning(found, wanted) is kept


def test_labels_of_more_bits_than_planned_are_not_cut_off() -> None:
    """A batch of another dtype gets a program of its own, where the known one would wrap its numbers around."""

    def classifier() -> keras.Model:
        inputs = keras.Input((16,))
        return cases.compiled(keras.Model(inputs, keras.layers.Dense(300)(inputs)), "sgd")

    x, y = cases.features(cases.BATCH)
    wide = (y + 256).astype("int32")
    model, on_one_device = cases.seeded(classifier), cases.seeded(classifier)
    plan = cases.plan_for(model, (x, y.astype("uint8")))
    plan.apply(model)
    expected = on_one_device.evaluate(x, wide, batch_size=cases.BATCH, verbose=0, return_dict=True)
    found = model.evaluate(x, wide, batch_size=cases.BATCH, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    found, expected = (m.train_on_batch(x, wide, return_dict=True)["loss"] for m in (model, on_one_device))
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(autoshard.PlanMismatchError, match="of dtype int32 instead of uint8"):
        plan.jit()(plan.init_state(), (x, wide))
