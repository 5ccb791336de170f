"""What Keras users do, each under a plan and on one device: equal results, and every variable still on its layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
import keras_cases as cases
from keras_cases import (
    BATCH,
    HARDWARE,
    MESH,
    assert_close,
    features,
    fitted,
    mlp,
    plan_for,
    same_as_one_device,
    seeded,
    tokens,
    values,
)

pytestmark = pytest.mark.usefixtures("quick_code")

X, Y = features()


@dataclass(frozen=True)
class Feature:
    """A model, its data, what is done with it, and options of the plan and of the comparison."""

    build: Callable[[], keras.Model]
    run: Callable[[keras.Model], Any] = lambda model: fitted(model, X, Y)["loss"]
    batch: Any = (X, Y)
    options: dict[str, Any] = field(default_factory=dict)
    slow: bool = True


def _optimizer(name: str, **options: Any) -> Feature:
    return Feature(lambda: mlp(getattr(keras.optimizers, name)(**options)), options={"rtol": 1e-3, "atol": 1e-4})


def _sequences(samples: int = 16) -> Any:
    rng = np.random.default_rng(2)
    return rng.normal(size=(samples, cases.LENGTH, cases.FEATURES)).astype("float32"), Y[:samples]


def _subclassed(own_step: bool) -> keras.Model:
    model = cases.Nested(own_step)
    model(X[:1])  # built
    return cases.compiled(model)


def _weighted(model: keras.Model) -> Any:
    weights = np.linspace(0.1, 2.0, len(X)).astype("float32")
    losses = fitted(model, X, Y, sample_weight=weights)
    return losses["loss"], model.evaluate(X, Y, sample_weight=weights, batch_size=BATCH, verbose=0)


def _class_weighted(model: keras.Model) -> Any:
    by_class = fitted(model, X, Y, class_weight={0: 1.0, 1: 0.5, 2: 2.0, 3: 0.0})["loss"]
    return by_class, model.train_on_batch(X[:BATCH], Y[:BATCH], class_weight={0: 3.0, 1: 1.0, 2: 1.0, 3: 1.0})


def _validated(model: keras.Model) -> Any:
    history = fitted(model, X, Y, validation_data=(X[:12], Y[:12]), validation_freq=1)
    split = fitted(model, X, Y, validation_split=0.25, epochs=1)
    return [history[k] for k in sorted(history)], [split[k] for k in sorted(split)]


def _stateful(model: keras.Model) -> Any:
    x, y = _sequences()
    losses, outputs = fitted(model, x, y)["loss"], model.predict(x, batch_size=BATCH, verbose=0)
    # Only what runs eagerly carries the state on: Keras's trainer does not track it.
    first, again = np.asarray(model(x[:BATCH])), np.asarray(model(x[:BATCH]))
    assert np.abs(first - again).max() > 1e-4
    return losses, outputs, first, again


def _several(model: keras.Model) -> Any:
    x, y = cases.several_data()
    history = fitted(model, x, y)
    scores = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return [history[k] for k in sorted(history)], scores, model.predict(x, batch_size=BATCH, verbose=0)


def _lora_after(model: keras.Model) -> Any:
    cases.enable_lora(model)
    cases.compiled(model)
    return fitted(model, X, Y)["loss"]


def _generator(model: keras.Model) -> Any:
    def batches() -> Any:
        for _ in range(2):
            for i in range(0, len(X), BATCH):
                yield X[i : i + BATCH], Y[i : i + BATCH]

    return model.fit(batches(), steps_per_epoch=3, epochs=2, shuffle=False, verbose=0).history["loss"]


def _odd_dtypes(model: keras.Model) -> Any:
    return fitted(model, X.astype("float64"), Y.astype("int64"))["loss"]


def _labels_as_columns(model: keras.Model) -> Any:
    return fitted(model, X, Y[:, None])["loss"]


FEATURES: dict[str, Feature] = {
    "adam": _optimizer("Adam", learning_rate=0.01, epsilon=1e-3),
    "adamw": _optimizer("AdamW", learning_rate=0.01, epsilon=1e-3, weight_decay=0.02),
    "adafactor": _optimizer("Adafactor", learning_rate=0.01),
    "lion": Feature(lambda: mlp(keras.optimizers.Lion(1e-3)), options={"rtol": 2e-3, "atol": 5e-4}),
    "muon": _optimizer("Muon", learning_rate=0.01),
    "rmsprop": _optimizer("RMSprop", learning_rate=0.01, epsilon=1e-3),
    "schedule": _optimizer("SGD", learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 10)),
    "accumulation": Feature(lambda: mlp(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)), slow=False),
    "ema": Feature(lambda: mlp(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2))),
    "clip norm": Feature(lambda: mlp(keras.optimizers.SGD(0.05, global_clipnorm=0.1))),
    "clip value": Feature(lambda: mlp(keras.optimizers.SGD(0.05, clipvalue=0.01))),
    "bfloat16": Feature(lambda: mlp(dtype="mixed_bfloat16"), options={"rtol": 3e-2, "atol": 2e-2}),
    "float16 with loss scaling": Feature(
        lambda: mlp(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)), dtype="mixed_float16"),
        options={"rtol": 5e-3, "atol": 5e-3},
        slow=False,
    ),
    "sample weights": Feature(lambda: mlp(weighted_metrics=["accuracy"]), _weighted, slow=False),
    "class weights": Feature(mlp, _class_weighted),
    "several inputs, outputs, losses": Feature(cases.several, _several, cases.several_data(), slow=False),
    "validation": Feature(mlp, _validated),
    "steps_per_execution": Feature(lambda: mlp(steps_per_execution=2)),
    "jit_compile=False": Feature(lambda: mlp(jit_compile=False), slow=False),
    "run_eagerly": Feature(lambda: mlp(run_eagerly=True)),
    "stateful RNN": Feature(cases.stateful, _stateful, _sequences()),
    "masking": Feature(cases.recurrent, lambda m: fitted(m, *tokens())["loss"], tokens()),
    "subclassed and nested": Feature(lambda: _subclassed(False)),
    "custom train_step": Feature(lambda: _subclassed(True)),
    "tied embeddings": Feature(
        cases.tied, lambda m: fitted(m, *_language())["loss"], (tokens()[0], np.roll(tokens()[0], 1, 1))
    ),
    "LoRA before planning": Feature(cases.with_lora, slow=False),
    "generator": Feature(mlp, _generator),
    "other dtypes": Feature(mlp, _odd_dtypes),
    "labels of another rank": Feature(mlp, _labels_as_columns),
}


def _language() -> Any:
    ids, _ = tokens()
    return ids, np.roll(ids, 1, 1)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * f.slow) for n, f in FEATURES.items()])
def test_a_feature_under_a_plan(name: str) -> None:
    feature = FEATURES[name]
    same_as_one_device(feature.build, feature.batch, feature.run, **feature.options)


def test_lora_after_planning() -> None:
    alone, model = seeded(mlp), seeded(mlp)
    plan = plan_for(model, (X, Y))
    plan.apply(model)
    expected = _lora_after(alone)
    with pytest.warns(UserWarning, match="4 LoRA variables are new"):
        found = _lora_after(model)
    assert_close(found, expected)
    assert_close(values(model), values(alone))
    kernels = [v for v in model.non_trainable_variables if v.path.endswith("/kernel")]
    planned = [x for x in plan.arguments if x.path.endswith("/kernel")]
    for v, leaf in zip(kernels, planned, strict=True):  # the base weights are where the plan has put them
        assert tuple(v.value.sharding.spec) == tuple(plan.specs[leaf.path])


def test_int8_predicts_before_and_after_planning() -> None:
    alone, before, after = seeded(mlp), seeded(mlp), seeded(mlp)
    plan_for(after, (X, Y)).apply(after)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of layers that have nothing to quantise
        for model in (alone, before, after):
            model.quantize("int8")
    plan = plan_for(before, (X, Y), mode="predict")
    plan.apply(before)
    expected = alone.predict(X, batch_size=BATCH, verbose=0)
    assert_close(before.predict(X, batch_size=BATCH, verbose=0), expected)
    assert_close(after.predict(X, batch_size=BATCH, verbose=0), expected)
    assert any(v.dtype == "int8" for v in before.variables)


class Halves(keras.callbacks.Callback):
    """Changes the learning rate and reads a weight while an epoch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)
        self.seen.append(float(np.abs(self.model.get_weights()[0]).sum()))


def test_callbacks(tmp_path: Path) -> None:
    def run(model: keras.Model) -> Any:
        folder = tmp_path / model.name
        folder.mkdir()
        halves = Halves()
        history = fitted(
            model,
            X,
            Y,
            epochs=4,
            validation_data=(X, Y),
            callbacks=[
                keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
                keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
                keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
                keras.callbacks.CSVLogger(folder / "log.csv"),
                keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
                keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=1e9),
                halves,
            ],
        )
        best = keras.saving.load_model(folder / "best.keras")
        assert_close(best.predict(X, verbose=0), model.predict(X, verbose=0))
        model.load_weights(folder / "1.weights.h5")
        assert (folder / "log.csv").read_text().startswith("epoch,accuracy,")
        return history["loss"], history["val_loss"], halves.seen, model.get_weights()

    same_as_one_device(mlp, (X, Y), run)


def test_tf_data_and_torch() -> None:
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)

    def run(model: keras.Model) -> Any:
        losses = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history["loss"]
        return losses, model.evaluate(dataset, verbose=0), model.predict(dataset, verbose=0)

    same_as_one_device(mlp, (X, Y), run)


@pytest.mark.slow
def test_torch_data_loader() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    same_as_one_device(mlp, (X, Y), lambda m: m.fit(loader, epochs=2, shuffle=False, verbose=0).history["loss"])


def _two_inputs() -> keras.Model:
    a, b = keras.Input((16,), name="a"), keras.Input((16,), name="b")
    x = layers.Concatenate()([layers.Dense(16, activation="relu")(b), a])
    return cases.compiled(keras.Model([a, b], layers.Dense(cases.CLASSES)(x)))


@pytest.mark.slow
def test_another_structure_of_the_same_inputs() -> None:
    """A tuple and a dict where the plan saw a list of inputs."""
    x, y = cases.several_data()
    pair = [x["a"], x["b"]]

    def run(model: keras.Model) -> Any:
        return [fitted(model, form, y["label"])["loss"] for form in (tuple(pair), {"b": x["b"], "a": x["a"]})]

    same_as_one_device(_two_inputs, (pair, y["label"]), run)


class _Sum(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(cases.CLASSES)

    def call(self, a: Any, b: Any = None) -> Any:
        return self.dense(a if b is None else a + b)


def _optional_input() -> keras.Model:
    a, b = keras.Input(X.shape[1:], name="a"), keras.Input(X.shape[1:], name="b", optional=True)
    return cases.compiled(keras.Model({"a": a, "b": b}, _Sum()(a, b)))


@pytest.mark.parametrize("planned", [None, X], ids=["planned without", "planned with"])
def test_an_optional_input_may_be_absent(planned: Any) -> None:
    def run(model: keras.Model) -> Any:
        return [fitted(model, {"a": X, "b": b}, Y)["loss"] for b in (None, X)]

    same_as_one_device(_optional_input, ({"a": X, "b": planned}, Y), run)


@pytest.mark.slow
def test_shared_layers_and_several_models() -> None:
    """An encoder with a model of its own: both run on the variables that the plan has laid out."""
    alone, planned = seeded(mlp), seeded(mlp)
    plan_for(planned, (X, Y)).apply(planned)
    outputs = []
    for model in (alone, planned):
        fitted(model, X, Y)
        encoder = keras.Model(model.inputs, model.layers[1].output)
        outputs.append(encoder.predict(X, batch_size=BATCH, verbose=0))
        outputs.append(np.asarray(model(X[:3])))
        assert layers.Dense is type(model.layers[1])
    assert_close(outputs[2:], outputs[:2])


class Graphs(keras.Model):
    """Sums what edges bring to nodes, and nodes to graphs."""

    def __init__(self, n_graphs: int) -> None:
        super().__init__()
        self.n_graphs = n_graphs
        self.node, self.head = layers.Dense(10, activation="relu"), layers.Dense(4)

    def call(self, inputs: Any) -> Any:
        x = self.node(inputs["nodes"])
        x = x + keras.ops.segment_sum(keras.ops.take(x, inputs["source"], 0), inputs["target"], x.shape[0])
        return self.head(keras.ops.segment_sum(x, inputs["graph"], self.n_graphs))


def test_a_batch_of_graphs_has_as_many_targets_as_graphs() -> None:
    rng = np.random.default_rng(0)
    ends = {name: np.sort(rng.integers(0, 24, 60)).astype("int32") for name in ("source", "target")}
    graph = np.sort(rng.integers(0, 6, 24)).astype("int32")
    inputs = {"nodes": rng.normal(size=(24, 7)).astype("float32"), "graph": graph, **ends}
    targets = rng.normal(size=(6, 4)).astype("float32")

    def build() -> keras.Model:
        model = Graphs(6)
        model.compile("sgd", "mse")
        return model

    alone, planned = seeded(build), seeded(build)
    options: dict[str, Any] = {"hardware": HARDWARE, "batch_size": 24, "progress": False}
    autoshard.optimize(planned, MESH, inputs=inputs, targets=targets, **options).apply(planned)
    losses = [[float(m.train_on_batch(inputs, targets)) for _ in range(3)] for m in (alone, planned)]
    assert_close(*losses)
    assert_close(planned.get_weights(), alone.get_weights())
    with pytest.raises(autoshard.InputShapeError, match="first dimension of all targets"):
        autoshard.optimize(seeded(mlp), MESH, inputs=features(8)[0], targets=features(6)[1], progress=False)
