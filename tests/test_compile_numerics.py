"""What ``compile`` takes and layers are made with, under a plan of random strategies: the numbers of one device.

Every loss, metric, optimizer, schedule, dtype policy, regulariser, constraint and initialiser of Keras, in the smallest
model that has a use for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, metrics, optimizers

import layer_cases as lc
from layer_cases import BATCH, assert_same_numbers

pytestmark = [
    pytest.mark.usefixtures("quick_code"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64"),  # of Keras's metrics, always
]
MESH = {"data": 2, "model": 4}
FEATURES, CLASSES, STEPS = 16, 8, 3
RNG = np.random.default_rng(3)


def model(activation: Any = None, hidden: dict[str, Any] | None = None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((FEATURES,), name="x")
    x = layers.Dense(8, name="hidden", **{"activation": "tanh", **(hidden or {})})(inputs)
    made = keras.Model(inputs, layers.Dense(CLASSES, activation=activation, name="head")(x))
    made.compile(**{"optimizer": optimizers.SGD(0.01, momentum=0.9), "loss": "mse", **options})
    return made


def batches(target: Callable[[], Any], shape: tuple[int, ...] = (BATCH, FEATURES)) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=shape).astype("float32"), target()) for _ in range(STEPS)]


# -- targets


def numbers() -> np.ndarray:
    return RNG.normal(size=(BATCH, CLASSES)).astype("float32")


def positive() -> np.ndarray:
    return RNG.uniform(0.1, 2.0, (BATCH, CLASSES)).astype("float32")


def bits() -> np.ndarray:
    return RNG.integers(0, 2, (BATCH, CLASSES)).astype("float32")


def signs() -> np.ndarray:
    return 2 * bits() - 1


def one_hot() -> np.ndarray:
    return np.eye(CLASSES, dtype="float32")[RNG.integers(0, CLASSES, BATCH)]


def labels() -> np.ndarray:
    return RNG.integers(0, CLASSES, (BATCH,)).astype("int32")


LOSSES: dict[str, tuple[Callable[[], Any], Any, Callable[[], Any]]] = {
    "BinaryCrossentropy": (lambda: losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), None, bits),
    "BinaryFocalCrossentropy": (lambda: losses.BinaryFocalCrossentropy(apply_class_balancing=True), "sigmoid", bits),
    "CategoricalCrossentropy": (lambda: losses.CategoricalCrossentropy(label_smoothing=0.1), "softmax", one_hot),
    "CategoricalFocalCrossentropy": (losses.CategoricalFocalCrossentropy, "softmax", one_hot),
    "CategoricalGeneralizedCrossEntropy": (losses.CategoricalGeneralizedCrossEntropy, "softmax", labels),
    "CategoricalHinge": (losses.CategoricalHinge, None, one_hot),
    "Circle": (lambda: losses.Circle(gamma=4.0), keras.ops.normalize, labels),  # of embeddings of length one
    "CosineSimilarity": (losses.CosineSimilarity, None, numbers),
    "Dice": (losses.Dice, "sigmoid", bits),
    "Hinge": (losses.Hinge, "tanh", signs),
    "Huber": (lambda: losses.Huber(0.5), None, numbers),
    "KLDivergence": (losses.KLDivergence, "softmax", one_hot),
    "LogCosh": (losses.LogCosh, None, numbers),
    "MeanAbsoluteError": (losses.MeanAbsoluteError, None, numbers),
    "MeanAbsolutePercentageError": (lambda: losses.MeanAbsolutePercentageError(reduction="mean"), None, positive),
    "MeanSquaredError": (lambda: losses.MeanSquaredError(reduction="sum"), None, numbers),
    "MeanSquaredLogarithmicError": (losses.MeanSquaredLogarithmicError, "softplus", positive),
    "Poisson": (losses.Poisson, "softplus", positive),
    "SparseCategoricalCrossentropy": (
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2),
        None,
        labels,
    ),
    "SquaredHinge": (losses.SquaredHinge, "tanh", signs),
    "Tversky": (lambda: losses.Tversky(0.3, 0.7), "sigmoid", bits),
}


def _ctc() -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((12, 8))
    made = keras.Model(inputs, layers.Dense(CLASSES)(layers.Dense(8, activation="tanh")(inputs)))
    made.compile(optimizers.SGD(0.01), losses.CTC())
    return made


def test_every_loss_of_keras_has_a_case() -> None:
    classes = {n for n, c in vars(losses).items() if inspect.isclass(c)}
    assert classes - {*LOSSES, "CTC", "Loss"} == set()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "Tversky")) for n in LOSSES])
def test_a_loss(name: str) -> None:
    loss, activation, target = LOSSES[name]
    assert_same_numbers(lambda: model(activation, loss=loss()), batches(target), MESH)


@pytest.mark.slow
def test_connectionist_temporal_classification() -> None:
    rng = np.random.default_rng(0)
    assert_same_numbers(
        _ctc, batches(lambda: rng.integers(1, CLASSES, (BATCH, 4)).astype("int32"), (BATCH, 12, 8)), MESH
    )


# -- metrics, several at a time

m = metrics
METRICS: dict[str, tuple[Callable[[], list[Any]], str | None, Callable[[], Any]]] = {
    "of numbers": (
        lambda: [
            m.MeanAbsoluteError(), m.MeanSquaredError(), m.RootMeanSquaredError(), m.CosineSimilarity(),
            m.LogCoshError(), m.R2Score(), m.PearsonCorrelation(), m.ConcordanceCorrelation(),
            m.MeanAbsolutePercentageError(), m.MeanMetricWrapper(keras.losses.huber, name="wrapped"),
        ],
        None, numbers,
    ),
    "of positive numbers": (
        lambda: [m.MeanSquaredLogarithmicError(), m.Poisson(), m.KLDivergence()], "softplus", positive
    ),
    "of signs": (lambda: [m.Hinge(), m.SquaredHinge(), m.Accuracy()], "tanh", signs),
    "of bits": (
        lambda: [
            m.BinaryAccuracy(), m.BinaryCrossentropy(), m.BinaryIoU(), m.AUC(num_thresholds=20), m.Precision(),
            m.AUC(num_thresholds=20, multi_label=True, num_labels=CLASSES, curve="PR", name="auc_of_labels"),
            m.Recall(thresholds=[0.3, 0.7]), m.TruePositives(), m.TrueNegatives(), m.FalsePositives(),
            m.FalseNegatives(), m.PrecisionAtRecall(0.5, 20), m.RecallAtPrecision(0.5, 20),
            m.SensitivityAtSpecificity(0.5, 20), m.SpecificityAtSensitivity(0.5, 20),
            m.F1Score(average="macro", threshold=0.5), m.FBetaScore(average="micro", beta=2.0, threshold=0.5),
        ],
        "sigmoid", bits,
    ),
    "of classes": (
        lambda: [
            m.CategoricalAccuracy(), m.CategoricalCrossentropy(), m.CategoricalHinge(), m.TopKCategoricalAccuracy(3),
            m.OneHotIoU(CLASSES, [0, 2]), m.OneHotMeanIoU(CLASSES), m.F1Score(), m.Precision(top_k=2),
        ],
        "softmax", one_hot,
    ),
    "of labels": (
        lambda: [
            m.SparseCategoricalAccuracy(), m.SparseCategoricalCrossentropy(), m.SparseTopKCategoricalAccuracy(3),
            m.MeanIoU(CLASSES, sparse_y_pred=False), m.IoU(CLASSES, [1, 3], sparse_y_pred=False, name="iou"),
        ],
        "softmax", labels,
    ),
}  # fmt: skip


def test_every_metric_of_keras_has_a_case() -> None:
    classes = {c for c in vars(metrics).values() if inspect.isclass(c)}
    made = {type(x) for make, _, _ in METRICS.values() for x in make()}
    assert classes - made == {metrics.Metric, metrics.Mean, metrics.Sum}  # in every loss; not of targets


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "of classes")) for k in METRICS])
def test_metrics(kind: str) -> None:
    make, activation, target = METRICS[kind]
    loss = "sparse_categorical_crossentropy" if kind == "of labels" else "mse"
    assert_same_numbers(lambda: model(activation, loss=loss, metrics=make()), batches(target), MESH)


# -- optimizers

o = optimizers
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adadelta": lambda: o.Adadelta(0.1),
    "Adafactor": lambda: o.Adafactor(0.01),
    "Adagrad": lambda: o.Adagrad(0.01),
    "Adam": lambda: o.Adam(0.001, amsgrad=True, epsilon=1e-3),
    "AdamW": lambda: o.AdamW(0.001, epsilon=1e-3, weight_decay=0.02),
    "Adamax": lambda: o.Adamax(0.001, epsilon=1e-3),
    "Ftrl": lambda: o.Ftrl(0.01, l1_regularization_strength=0.01, l2_regularization_strength=0.01),
    "Lamb": lambda: o.Lamb(0.001, epsilon=1e-3),
    "Lion": lambda: o.Lion(0.001),
    "LossScaleOptimizer": lambda: o.LossScaleOptimizer(o.SGD(0.01), dynamic_growth_steps=2),
    "MultiOptimizer": lambda: _several_optimizers(),
    "Muon": lambda: o.Muon(0.001),
    "Nadam": lambda: o.Nadam(0.001, epsilon=1e-3),
    "RMSprop": lambda: o.RMSprop(0.001, epsilon=1e-3, centered=True, momentum=0.5),
    "SGD": lambda: o.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "ScheduleFreeAdamW": lambda: o.ScheduleFreeAdamW(0.001, epsilon=1e-3),
}
SCHEDULES: dict[str, Callable[[], Any]] = {
    "CosineDecay": lambda: o.schedules.CosineDecay(0.0, 10, warmup_target=0.1, warmup_steps=2),
    "CosineDecayRestarts": lambda: o.schedules.CosineDecayRestarts(0.1, 2),
    "ExponentialDecay": lambda: o.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: o.schedules.InverseTimeDecay(0.1, 2, 0.5),
    "PiecewiseConstantDecay": lambda: o.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.05, 0.01]),
    "PolynomialDecay": lambda: o.schedules.PolynomialDecay(0.1, 3, cycle=True),
}
COMMON: dict[str, dict[str, Any]] = {
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "moving average": {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "global clipnorm": {"global_clipnorm": 0.1},
    "loss scale": {"loss_scale_factor": 4.0},
}


def _several_optimizers() -> Any:
    return o.MultiOptimizer(o.OptimizerMap(o.SGD(0.01, momentum=0.9), {"hidden/.*": o.Adam(0.001, epsilon=1e-3)}))


def test_every_optimizer_of_keras_has_a_case() -> None:
    classes = {n for n, c in vars(optimizers).items() if inspect.isclass(c)}
    assert classes - {*OPTIMIZERS, "Optimizer", "OptimizerMap"} == set()
    of_schedules = {n for n, c in vars(optimizers.schedules).items() if inspect.isclass(c)}
    assert of_schedules - {*SCHEDULES, "LearningRateSchedule"} == set()


def optimized(make: Callable[[], Any]) -> None:
    assert_same_numbers(lambda: model(optimizer=make()), batches(numbers), MESH)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "Lamb")) for n in OPTIMIZERS])
def test_an_optimizer(name: str) -> None:
    optimized(OPTIMIZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule(name: str) -> None:
    optimized(lambda: o.SGD(SCHEDULES[name]()))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMON)
def test_what_all_optimizers_can_do(name: str) -> None:
    optimized(lambda: o.Adam(0.001, epsilon=1e-3, **COMMON[name]))


# -- dtype policies: sums in another order differ by the rounding of the type

POLICIES = {"float16": 4e-3, "bfloat16": 3e-2, "mixed_float16": 4e-3, "mixed_bfloat16": 3e-2, "int8": 1e-5}


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=[pytest.mark.slow] * (p != "mixed_float16")) for p in POLICIES]
)
def test_a_dtype_policy(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lc, "TOLERANCE", POLICIES[policy])
    made = "int8_from_float32" if policy == "int8" else policy

    def build() -> keras.Model:
        return model(hidden={"dtype": made}, optimizer="sgd")

    assert_same_numbers(build, batches(numbers), MESH)


# -- what variables are made and held with


def _held(**changes: Any) -> Callable[[], keras.Model]:
    return lambda: model(hidden=changes)


HELD: dict[str, Callable[[], dict[str, Any]]] = {
    "L1": lambda: {"kernel_regularizer": keras.regularizers.L1(0.01)},
    "L2": lambda: {"bias_regularizer": keras.regularizers.L2(0.01), "activity_regularizer": "l1"},
    "L1L2": lambda: {"kernel_regularizer": keras.regularizers.L1L2(0.01, 0.02)},
    "OrthogonalRegularizer": lambda: {"kernel_regularizer": keras.regularizers.OrthogonalRegularizer()},
    "MaxNorm": lambda: {"kernel_constraint": keras.constraints.MaxNorm(0.5)},
    "MinMaxNorm": lambda: {"kernel_constraint": keras.constraints.MinMaxNorm(0.2, 0.5, rate=0.9)},
    "NonNeg": lambda: {"kernel_constraint": "non_neg", "bias_constraint": "non_neg"},
    "UnitNorm": lambda: {"kernel_constraint": keras.constraints.UnitNorm(axis=1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_a_regularizer_or_a_constraint(name: str) -> None:
    assert_same_numbers(lambda: model(hidden=HELD[name]()), batches(numbers), MESH)


INITIALIZERS = keras.initializers
MADE: dict[str, Callable[[], Any]] = {
    "Constant": lambda: INITIALIZERS.Constant(0.1),
    "GlorotNormal": INITIALIZERS.GlorotNormal,
    "GlorotUniform": INITIALIZERS.GlorotUniform,
    "HeNormal": lambda: INITIALIZERS.HeNormal(seed=4),
    "HeUniform": INITIALIZERS.HeUniform,
    "Identity": INITIALIZERS.Identity,
    "LecunNormal": INITIALIZERS.LecunNormal,
    "LecunUniform": lambda: INITIALIZERS.LecunUniform(seed=keras.random.SeedGenerator(7)),
    "Ones": INITIALIZERS.Ones,
    "Orthogonal": INITIALIZERS.Orthogonal,
    "RandomNormal": INITIALIZERS.RandomNormal,
    "RandomUniform": INITIALIZERS.RandomUniform,
    "TruncatedNormal": INITIALIZERS.TruncatedNormal,
    "VarianceScaling": lambda: INITIALIZERS.VarianceScaling(2.0, "fan_avg"),
    "Zeros": INITIALIZERS.Zeros,
}


def _made_with_every_initializer() -> keras.Model:
    keras.utils.set_random_seed(5)
    x = inputs = keras.Input((FEATURES,))
    for name, make in MADE.items():
        x = layers.Dense(FEATURES, kernel_initializer=make(), name=name)(x)
    made = keras.Model(inputs, x)
    made.compile("sgd", "mse")
    return made


def test_every_initializer_in_a_scope() -> None:
    """Born sharded, each with the values of an eager build."""
    classes = {c for c in vars(INITIALIZERS).values() if inspect.isclass(c)}
    named = {getattr(INITIALIZERS, name) for name in (*MADE, "Initializer", "STFT")}  # STFT: of spectrograms alone
    assert classes - named == set()
    x = np.zeros((BATCH, FEATURES), "float32")
    plan = lc.plan_of(_made_with_every_initializer, (x, x), MESH, seed=0)
    with plan.scope():
        sharded = _made_with_every_initializer()
    for a, b in zip(sharded.trainable_variables, _made_with_every_initializer().trainable_variables, strict=True):
        lc.assert_equal(a.value, b.value, a.path)
