"""Ctrl-C where Python would forget it (a callback of its collector), and where a model would lose its variables."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autoshard_ilp import interrupts
from autoshard_ilp.interrupts import dropped_come_again
from autoshard_ilp.progress import Progress
from keras_cases import BATCH, assert_close, features, mlp, plan_for, seeded, values


@pytest.fixture
def interrupted_collector() -> Iterator[None]:
    """The next collection is interrupted, once."""
    left = [1]

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and left:
            left.pop()
            raise KeyboardInterrupt

    gc.callbacks.append(callback)
    yield
    gc.callbacks.remove(callback)


def test_an_interrupt_that_python_drops_comes_again(interrupted_collector: None) -> None:
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), Progress(False).running():
        gc.collect()
        time.sleep(10)
    assert sys.unraisablehook is before


def test_other_dropped_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda event: seen.append(event.exc_type))

    class Fails:
        def __del__(self) -> None:
            raise ZeroDivisionError

    with dropped_come_again():
        one = Fails()
        del one
        gc.collect()
    assert seen == [ZeroDivisionError]


def test_other_threads_leave_the_hook_alone() -> None:
    found, before = list[Any](), sys.unraisablehook

    def run() -> None:
        with dropped_come_again():
            found.append(sys.unraisablehook)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def test_an_interrupt_waits_until_it_is_released() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts.hold()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert signal.getsignal(signal.SIGINT) is before
    interrupts.release()


def test_a_second_interrupt_does_not_wait() -> None:
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()


def test_other_threads_hold_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupts.hold)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("pressed", "steps"), [(1, 0), (2, 1), (3, 1), (6, 3)])
def test_a_model_keeps_its_variables(monkeypatch: pytest.MonkeyPatch, pressed: int, steps: int) -> None:
    """Pressed once Keras has detached them (1, 3), or once a program has taken them over (2, 6)."""
    x, y = features(4 * BATCH)
    model = seeded(mlp)
    plan_for(model, (x, y)).apply(model)
    hold, calls = interrupts.hold, [0]

    def hold_and_press() -> None:
        hold()
        calls[0] += 1
        if calls[0] == pressed:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(interrupts, "hold", hold_and_press)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    monkeypatch.undo()
    assert int(model.optimizer.iterations) == steps
    on_one_device = seeded(mlp)
    if steps:
        on_one_device.fit(x[: steps * BATCH], y[: steps * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    trained = len(model.trainable_variables)
    assert_close(values(model)[:trained], values(on_one_device)[:trained])
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert int(model.optimizer.iterations) == steps + 4
