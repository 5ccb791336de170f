"""Several processes of one job on this machine: one plan, the losses of one process, and no hanging."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoshard_ilp as autoshard

pytest.importorskip("orbax.checkpoint")
HERE = Path(__file__).parent
SECONDS = 420  # for all processes of a job together


def run_job(count: int, folder: Path, devices: int) -> list[dict[str, Any]]:
    """What every process of the script found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "process_script.py"), str(count)]
    logs = [(folder / f"out{count}.{i}").open("w+") for i in range(count)]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(port), str(folder), str(devices)], env=environment, stdout=log, stderr=log
        )
        for i, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read())
        log.close()
    assert [p.returncode for p in processes] == [0] * count, "\n".join(text[-3000:] for text in texts)
    return [json.loads(text.split("RESULT ")[1].splitlines()[0]) for text in texts]


def check_equal(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """All processes have one plan, that of one process, and its losses."""
    first = found[0]["training"]
    assert {r["training"]["fingerprint"] for r in found} == {alone["training"]["fingerprint"]}
    assert [r["training"]["planned here"] for r in found] == [True] + [False] * (len(found) - 1)
    assert "up/kernel" in first["sharded"] and len(first["devices"]) == len(alone["training"]["devices"])
    assert {r["bare"]["of function"] for r in found} == {alone["bare"]["of function"]}
    for result in found:
        for name, values in alone["training"]["history"].items():
            np.testing.assert_allclose(result["training"]["history"][name], values, rtol=1e-4, err_msg=name)
        for part in ("evaluate", "predict"):
            np.testing.assert_allclose(result["training"][part], alone["training"][part], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(result["bare"]["losses"], alone["bare"]["losses"], rtol=1e-5)
        np.testing.assert_allclose(result["bare"]["function"], alone["bare"]["function"], rtol=1e-5)
        np.testing.assert_allclose(result["shared"], alone["bare"]["losses"], rtol=1e-5)
        np.testing.assert_allclose(result["parts"]["losses"], alone["parts"]["losses"], rtol=1e-4)
        np.testing.assert_allclose(result["parts"]["predicted"], alone["parts"]["predicted"], rtol=1e-3, atol=1e-4)
        for a, b in zip(result["parts"]["on batch"], alone["parts"]["on batch"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        assert result["training"]["history"] == first["history"]


def check_checkpoints(folder: Path, count: int) -> None:
    """What several processes have saved together, this process reads: the weights of one process."""
    import jax

    arrays = []
    for n in (1, count):
        saved = folder / f"checkpoint{n}"
        entries = json.loads((saved / "checkpoint.json").read_text())["entries"]
        kept = [e for e in entries if e["kind"] == "parameter"]
        state = tuple(
            [jax.ShapeDtypeStruct(tuple(e["shape"]), e["dtype"]) for e in entries if e["kind"] == kind]
            for kind in ("parameter", "non_trainable", "optimizer", "metric")
        )
        assert len(kept) == 6
        arrays.append(jax.tree.leaves(autoshard.restore_checkpoint(saved, state)))
    for a, b in zip(*arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_job(1, folder, 4)[0], run_job(2, folder, 4)


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_two_processes_equal_one(pair: Any) -> None:
    folder, alone, found = pair
    check_equal(found, alone)
    check_checkpoints(folder, 2)


@pytest.mark.slow
def test_two_processes_that_disagree_stop_with_one_message(pair: Any) -> None:
    messages = [result["disagreements"] for result in pair[2]]
    both = {
        "model": ("PlanMismatchError", "at planning", "(16, 64)", "(16, 96)"),
        "options": ("PlanMismatchError", "the memory budget is 2000000000 in process 0 and 1000000000 in process 1"),
        "seed": ("PlanMismatchError", "up/kernel", "checksum", "set_random_seed"),
        "infeasible": ("InfeasibleError", "No plan fits"),
        "batch": ("PlanMismatchError", "the first batch of train", "array 0"),
        "plan": ("PlanMismatchError", "the plan is", "in process 1"),
    }
    for name, parts in both.items():
        assert messages[0][name] == messages[1][name], name
        for part in parts:
            assert part in messages[0][name], messages[0][name]
    assert "jax.make_array_from_process_local_data" in messages[0]["batch"]
    assert "process 1 stopped with" in messages[0]["failure"] and "no such layer" in messages[0]["failure"]
    assert "no such layer" in messages[1]["failure"]
    assert "process 1 at plan.apply while process 0 is at planning" in messages[0]["place"]
    assert "process 0 at planning while process 1 is at plan.apply" in messages[1]["place"]
    assert messages[0]["after"] == messages[1]["after"] and np.isfinite(float(messages[0]["after"]))
    assert "no answer of process 1 within 4 s" in messages[0]["absent"]
    assert "process 1 stopped with the end of its script" in messages[0]["ended"]


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_four_processes_equal_one(tmp_path: Path) -> None:
    alone, found = run_job(1, tmp_path, 8)[0], run_job(4, tmp_path, 8)
    check_equal(found, alone)
    check_checkpoints(tmp_path, 4)
