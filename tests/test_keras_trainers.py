"""Trainers, models and callbacks that are not the usual ones, under a plan and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
import keras_cases as cases
from autoshard_ilp import keras_integration as ki
from keras_cases import BATCH, CLASSES, assert_close, assert_on_plan, features, fitted, mlp, plan_for, seeded, values

pytestmark = pytest.mark.usefixtures("quick_code")

X, Y = features()
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Gan(keras.Model):
    """Two networks, each with an optimizer of its own, trained in turn on losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = keras.Sequential([keras.Input((8,)), layers.Dense(32, "relu"), layers.Dense(16)], name="maker")
        self.judge = keras.Sequential([keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(1)], name="judge")
        self.seeds = keras.random.SeedGenerator(3)
        self.of_maker, self.of_judge = keras.metrics.Mean(name="of_maker"), keras.metrics.Mean(name="of_judge")

    def call(self, x: Any) -> Any:
        return self.maker(x)

    @property
    def metrics(self) -> list[Any]:
        return [self.of_maker, self.of_judge]

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        real = data[0] if isinstance(data, tuple) else data
        n = len(self.maker.trainable_variables)
        seed = next(i for i, v in enumerate(self.non_trainable_variables) if v is self.seeds.state)
        with keras.StatelessScope(state_mapping=[(self.seeds.state, non_trainable[seed])]) as scope:
            noise = keras.random.normal((len(real), 8), seed=self.seeds)
        non_trainable = [*non_trainable]
        non_trainable[seed] = scope.get_current_value(self.seeds.state)

        def judged(maker: Any, judge: Any) -> tuple[Any, Any]:
            made, _ = self.maker.stateless_call(maker, [], noise)
            of_made, _ = self.judge.stateless_call(judge, [], made)
            of_real, _ = self.judge.stateless_call(judge, [], real)
            soft = jax.nn.softplus
            return (soft(of_made) + soft(-of_real)).mean(), soft(-of_made).mean()

        maker, judge = trainable[:n], trainable[n:]
        loss_judge, grads_judge = jax.value_and_grad(lambda judge: judged(maker, judge)[0])(judge)
        loss_maker, grads_maker = jax.value_and_grad(lambda maker: judged(maker, judge)[1])(maker)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, [*grads_maker, *grads_judge], trainable)
        held = self.of_maker.stateless_update_state(metrics[:2], loss_maker)
        held = [*held, *self.of_judge.stateless_update_state(metrics[2:], loss_judge)]
        logs = {"maker": self.of_maker.stateless_result(held[:2]), "judge": self.of_judge.stateless_result(held[2:])}
        return logs, (trainable, non_trainable, optimizer, held)


def gan() -> keras.Model:
    model = Gan()
    model.build((None, 8))
    optimizers = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.05, momentum=0.5), {"judge/.*": keras.optimizers.Adam(0.01, epsilon=1e-3)}
    )
    model.compile(optimizer=keras.optimizers.MultiOptimizer(optimizers))
    return model


class Tree(keras.Model):
    """Layers in lists of lists and in a dict; one of them used three times; losses and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [[layers.Dense(16, "tanh"), layers.Dropout(0.1, seed=i)] for i in range(2)]
        self.heads = {"label": layers.Dense(CLASSES), "score": layers.Dense(1, activity_regularizer="l2")}
        self.shared = layers.Dense(16, kernel_regularizer=keras.regularizers.L2(0.01))
        self.largest = Largest(name="largest")

    def call(self, x: Any, training: bool = False) -> Any:
        for dense, drop in self.blocks:
            x = self.shared(drop(dense(x), training=training))
        x = self.shared(x)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        return {name: head(x) for name, head in self.heads.items()}


class Largest(keras.metrics.Metric):
    """The largest prediction so far, and a histogram: state that is neither a sum nor a mean."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.most = self.add_variable((), "zeros", name="most")
        self.counts = self.add_variable((8,), "zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del sample_weight
        self.most.assign(keras.ops.maximum(self.most, keras.ops.cast(keras.ops.max(y_pred), self.most.dtype)))
        bins = keras.ops.cast(keras.ops.clip(keras.ops.reshape(y_pred, (-1,)) * 2 + 4, 0, 7), "int32")
        self.counts.assign(self.counts + keras.ops.sum(keras.ops.one_hot(bins, 8), axis=0))

    def result(self) -> Any:
        return self.most + keras.ops.std(self.counts)


def tree() -> keras.Model:
    model = Tree()
    model(X[:1])
    model.compile(
        keras.optimizers.SGD(0.02),
        {"label": LOGITS, "score": "mae"},
        loss_weights={"label": 1.0, "score": 0.3},
        metrics={"label": ["accuracy"], "score": [Largest(name="most")]},
        weighted_metrics={"label": [Largest(name="weighted")]},
    )
    return model


class OwnLoss(keras.Model):
    """``compute_loss`` and ``compute_metrics`` of its own, and a test step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(32, "relu"), layers.Dense(16)
        self.norm = layers.BatchNormalization()
        self.tracker = keras.metrics.Mean(name="distance")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.second(self.norm(self.first(x), training=training))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        loss = keras.ops.mean(keras.ops.square(y_pred - x)) + sum(self.losses)
        self.tracker.update_state(loss)
        return loss

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"distance": self.tracker.result(), "largest": keras.ops.max(y_pred)}


def own_loss() -> keras.Model:
    model = OwnLoss()
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.05))
    return model


def trained(*names: str, y: Any = Y, **options: Any) -> Callable[[keras.Model], Any]:
    """Two epochs, then an evaluation."""

    def run(model: keras.Model) -> Any:
        history = fitted(model, X, y, **options)
        scores = model.evaluate(X, y, batch_size=BATCH, verbose=0, return_dict=True)
        return [history[k] for k in sorted(history)], scores, [history[n] for n in names]

    return run


def test_two_networks_with_an_optimizer_each() -> None:
    def run(model: keras.Model) -> Any:
        history = fitted(model, X, None)
        return history["maker"], history["judge"]

    cases.same_as_one_device(gan, (X,), run, rtol=1e-3)


def test_nested_lists_shared_layers_added_losses_and_own_metrics() -> None:
    targets = {"label": Y, "score": X[:, :1]}
    cases.same_as_one_device(tree, (X, targets), trained(y=targets))


class TakesAllForOld(set[int]):
    """The losses that a layer remembers of earlier calls, at every address that a new one could have."""

    forgotten = False

    def __contains__(self, loss: object) -> bool:
        return not self.forgotten or super().__contains__(loss)

    def clear(self) -> None:
        self.forgotten = True
        super().clear()


def test_no_loss_is_taken_for_one_of_an_earlier_call() -> None:
    """Every loss counts once, also where its address is one that Keras remembers of an earlier trace."""
    model = seeded(tree)
    batch = X[:BATCH], {"label": Y[:BATCH], "score": X[:BATCH, :1]}
    step = plan_for(model, batch, mesh={"x": 1}).executable.traced.fn
    state = [[jnp.asarray(v.value) for v in group] for group in ki.state_variables(model, "train")]
    _, expected = step(state, batch)
    for layer in model._flatten_layers():
        object.__setattr__(layer, "_loss_ids", TakesAllForOld())
    _, found = step(state, batch)
    assert found["loss"] == expected["loss"]
    assert not any(layer._loss_ids for layer in model._flatten_layers())


@pytest.mark.slow
def test_a_loss_and_metrics_of_the_models_own() -> None:
    cases.same_as_one_device(own_loss, (X,), trained("distance", "largest", y=None))


# -- callbacks that change what trains


def _by_schedule() -> Any:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.5 if epoch else 1.0))


class Freezes(keras.callbacks.Callback):
    """Overwrites a weight, the optimizer's iterations and a metric between epochs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        kernel = self.model.trainable_variables[0]
        kernel.assign(0.5 * kernel.value)
        self.model.optimizer.iterations.assign(0)
        self.model.set_weights([0.9 * w for w in self.model.get_weights()] if epoch else self.model.get_weights())


CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "LearningRateScheduler": lambda: [_by_schedule()],
    "ReduceLROnPlateau": lambda: [keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=0, min_delta=1e9)],
    "assignments": lambda: [Freezes()],
    "SwapEMAWeights": lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    "TerminateOnNaN": lambda: [keras.callbacks.TerminateOnNaN()],
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "assignments")) for n in CALLBACKS])
def test_callbacks_that_change_what_trains(name: str) -> None:
    ema = {"use_ema": True, "ema_momentum": 0.7} if name == "SwapEMAWeights" else {}

    def run(model: keras.Model) -> Any:
        history = fitted(model, X, Y, epochs=3, callbacks=CALLBACKS[name](), validation_data=(X, Y))
        return [history[k] for k in sorted(history)], float(model.optimizer.learning_rate)

    cases.same_as_one_device(lambda: mlp(keras.optimizers.SGD(0.05, momentum=0.9, **ema)), (X, Y), run)


# -- what changes after planning


def snapshot(model: keras.Model) -> list[tuple[Any, np.ndarray]]:
    variables = [*model.variables, *model.optimizer.variables]
    return [(v, np.asarray(v.value)) for v in variables]


def assert_untouched(before: list[tuple[Any, np.ndarray]]) -> None:
    for variable, value in before:
        assert variable._value is not None and not variable._value.is_deleted()
        np.testing.assert_array_equal(np.asarray(variable.value), value, err_msg=variable.path)


def test_trainable_is_changed_after_planning() -> None:
    """As on one device: frozen, the step is another one; thawed again, it is the planned one."""
    model, alone = seeded(mlp), seeded(mlp)
    plan = plan_for(model, (X, Y))
    plan.apply(model)
    for m in (model, alone):
        fitted(m, X, Y)
        m.layers[1].trainable = False
    before = snapshot(model)
    for train in (lambda: fitted(model, X, Y), lambda: plan.apply(model), lambda: fitted(model, X, Y)):
        with pytest.raises(autoshard.PlanMismatchError, match=r"kernel' is no longer trainable"):
            train()
        assert_untouched(before)
    assert_close(model.predict(X, verbose=0), alone.predict(X, verbose=0))
    for m in (model, alone):
        m.layers[1].trainable = True
    assert_close(fitted(model, X, Y)["loss"], fitted(alone, X, Y)["loss"])
    assert_close(values(model), values(alone))
    assert_on_plan(model, plan)


def test_a_learning_rate_becomes_a_schedule() -> None:
    """The optimizer has a variable less then; a schedule in place of another one is followed."""
    decays = [keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.5) for rate in (0.1, 0.01)]
    model = seeded(mlp)
    plan_for(model, (X, Y)).apply(model)
    fitted(model, X, Y)
    before = snapshot(model)
    model.optimizer.learning_rate = decays[0]
    with pytest.raises(autoshard.PlanMismatchError, match="optimizer variables instead of"):
        fitted(model, X, Y)
    assert_untouched(before)
    model, alone = seeded(mlp), seeded(mlp)
    for m in (model, alone):
        cases.compiled(m, keras.optimizers.SGD(decays[0]))
    plan_for(model, (X, Y)).apply(model)
    for m in (model, alone):
        fitted(m, X, Y)
        m.optimizer.learning_rate = decays[1]
    alone.make_train_function(force=True)  # Keras itself would go on with the rates that it has compiled
    assert_close(fitted(model, X, Y)["loss"], fitted(alone, X, Y)["loss"])
    assert_close(values(model), values(alone))


@pytest.mark.slow
def test_compiled_again_with_other_options_of_the_same_step() -> None:
    model, alone = seeded(mlp), seeded(mlp)
    plan = plan_for(model, (X, Y))
    plan.apply(model)
    for m in (model, alone):
        fitted(m, X, Y)
        cases.compiled(m, keras.optimizers.SGD(0.01, momentum=0.9), steps_per_execution=2)
    assert_close(fitted(model, X, Y)["loss"], fitted(alone, X, Y)["loss"])
    for m in (model, alone):
        cases.compiled(m, keras.optimizers.SGD(0.01, momentum=0.9), jit_compile=False)
    assert_close(fitted(model, X, Y)["loss"], fitted(alone, X, Y)["loss"])
    assert_on_plan(model, plan)


def test_a_batch_that_does_not_fit_is_described() -> None:
    model = seeded(mlp)
    plan_for(model, (X, Y)).apply(model)
    before = snapshot(model)
    for batch, parts in [
        ((X[:8, :3], Y[:8]), (r"inputs \(8, 3\) float32; targets \(8,\) int32", r"inputs/features \(8, 16\) float32")),
        ((X[:8],), (r"Received: inputs \(8, 16\) float32\.",)),
        ((X[:8], np.zeros((8, 7), "int32")), (r"targets \(8, 7\) int32",)),
    ]:
        for part in parts:
            with pytest.raises(autoshard.PlanMismatchError, match=part):
                model.fit(*batch, batch_size=BATCH, verbose=0)
        assert_untouched(before)
    with pytest.raises(autoshard.PlanMismatchError, match=r"predict step.*Received: inputs \(4, 3\)"):
        model.predict(X[:4, :3], verbose=0)
    assert_untouched(before)
