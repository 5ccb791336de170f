"""What fit runs is the planned program: no collective more, no copy of the state, nothing large comes to the host."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.keras_runtime import programs, runtime
from profiles_for_tests import toy

MESH = {"data": 2, "model": 4}
BATCH, STEPS = 16, 3
COLLECTIVE = re.compile(r" = (\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32,))
    h = layers.LayerNormalization()(layers.Dense(128, activation="relu", name="up")(inputs))
    model = keras.Model(inputs, layers.Dense(16, name="down")(layers.Dropout(0.1)(h)))
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=1.0)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    return model


def collectives(text: str) -> Counter[tuple[str, str]]:
    """Kind and result type of every collective in compiled text, with how often it stands there."""
    return Counter((m[2], m[1]) for m in COLLECTIVE.finditer(text))


class Fitted:
    """One model fitted under a plan, with everything that could be watched."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        x, y = (rng.normal(size=(BATCH * STEPS, n)).astype("float32") for n in (32, 16))
        self.model = build()
        self.plan = autoshard.optimize(self.model, MESH, hardware=toy(1e7), batch_size=BATCH, progress=False)
        self.programs: list[Any] = []
        self.fetched: list[tuple[int, ...]] = []
        self.compiled = 0
        with pytest.MonkeyPatch.context() as patch:
            self._record_programs(patch)
            self.plan.apply(self.model)
            self.model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)  # compiles what Keras itself needs
            self._record_fetches(patch)
            jax.monitoring.register_event_duration_secs_listener(self._count)
            self.before = self.values()
            try:
                self.model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
            finally:
                self.counting = False

    counting = True

    def _count(self, event: str, duration: float, **kwargs: Any) -> None:
        if self.counting and event.endswith("backend_compile_duration"):
            self.compiled += 1

    def _record_programs(self, patch: pytest.MonkeyPatch) -> None:
        original = programs.compiled_program

        def recording(plan: Any) -> Any:
            program = original(plan)
            self.programs.append((plan, program))
            return program

        patch.setattr(programs, "compiled_program", recording)
        assert runtime.programs is programs

    def _record_fetches(self, patch: pytest.MonkeyPatch) -> None:
        kind = type(jax.numpy.zeros(1))
        original = kind._value.fget  # type: ignore[attr-defined]

        def fetch(array: Any) -> Any:
            self.fetched.append(array.shape)
            return original(array)

        patch.setattr(kind, "_value", property(fetch))

    def state(self) -> list[Any]:
        model = self.model
        groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
        return [v for group in (*groups, model.metrics_variables) for v in group]

    def values(self) -> list[Any]:
        return [v._value for v in self.state()]


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return Fitted()


def test_fit_runs_the_collectives_of_plan_jit_and_no_more(fitted: Fitted) -> None:
    assert len(fitted.programs) == 1, "one program for all steps"
    plan, program = fitted.programs[0]
    (compiled,) = [c.cell_contents for c in program.__closure__ if hasattr(c.cell_contents, "as_text")]
    expected = fitted.plan.jit().lower(*fitted.plan.abstract_args()).compile()
    assert plan.fingerprint == fitted.plan.fingerprint
    found, wanted = collectives(compiled.as_text()), collectives(expected.as_text())
    assert found == wanted and sum(wanted.values()) > 3
    a, b = compiled.memory_analysis(), expected.memory_analysis()
    assert a.argument_size_in_bytes == b.argument_size_in_bytes
    assert a.alias_size_in_bytes == b.alias_size_in_bytes > 0


def test_nothing_is_compiled_and_nothing_large_is_fetched_while_it_trains(fitted: Fitted) -> None:
    assert fitted.compiled == 0
    assert fitted.fetched, "the logs are read"
    assert all(shape == () for shape in fitted.fetched), fitted.fetched


def test_the_state_stays_on_its_devices_and_is_never_copied(fitted: Fitted) -> None:
    mesh = fitted.plan.mesh.concrete()
    for leaf, variable in zip(fitted.plan.arguments, fitted.state(), strict=False):
        value = variable._value
        assert value.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(mesh, fitted.plan.specs[leaf.path]), value.ndim
        )
        assert {d.id for d in value.sharding.device_set} == set(range(8))
    large = [v for v in fitted.before if v.size > 64]
    assert len(large) >= 9 and all(v.is_deleted() for v in large), "each step takes over the buffers of the last"
    sharded = [v for v in fitted.values() if not v.sharding.is_fully_replicated]
    assert len(sharded) >= 6
    assert all(shard.data.size < value.size for value in sharded for shard in value.addressable_shards)
