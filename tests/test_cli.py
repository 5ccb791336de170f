"""The command line: results on stdout, messages on stderr, exit codes, no traceback."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.machinery import ExtensionFileLoader

import keras
import pytest
from typer.testing import CliRunner

import cli_models  # noqa: F401  # its folder is on the path under pytest
from autoshard_ilp import api
from autoshard_ilp.cli import app as cli
from autoshard_ilp.cli.app import app
from autoshard_ilp.cli.arguments import parse_pins
from autoshard_ilp.console import FAULT
from autoshard_ilp.display import records
from autoshard_ilp.display.records import grouped, rows
from autoshard_ilp.errors import InputShapeError, PlanFileError
from autoshard_ilp.plan import Plan

PLAN = ("plan", "cli_models:small", "--mesh", "data=2,model=4", "--batch-size", "16")


def run(*arguments, environment=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "110", **(environment or {})})


def fails(code, *arguments):
    """The message of a run that must end with this exit code and print nothing else."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


# -- plan --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    result = run(*PLAN, "--hardware", "tpu-v5e", "--memory-budget", "1GB", "-o", path)
    assert result.exit_code == 0, result.output
    assert "building a model" not in result.stdout
    for part in ("train step on data=2, model=4 (8 x tpu-v5e), global batch 16", "first", "1.0 GB", "optimal: total"):
        assert part in result.stdout
    return path


def test_a_saved_plan_says_how_to_build_its_model(plan_file):
    plan = api.load(plan_file)
    assert plan.status == "optimal"
    assert plan.memory.budget_bytes == 10**9
    expected = {"model": "cli_models:small", "batch_size": 16, "sequence_length": None, "mode": "train"}
    assert {k: plan.origin[k] for k in expected} == expected
    assert plan.origin["hardware"] == "tpu-v5e"


def test_json_is_one_document_and_pins_are_kept():
    result = run(*PLAN, "--json", "--pin", 'first/kernel$=(None, "model")', "--baseline", "data_parallel")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["format"] == "autoshard-ilp plan"
    assert plan["specs"]["first/kernel"] == [None, "model"]
    assert plan["origin"]["model"] == "cli_models:small"
    assert plan["baselines"]["data_parallel"]["cost"]["total_s"] >= plan["cost"]["total_s"] > 0


def test_a_baseline_stands_next_to_the_plan():
    result = run(*PLAN, "--mode", "predict", "--baseline", "data_parallel", environment={"COLUMNS": "60"})
    assert result.exit_code == 0, result.output
    assert re.search(r"this plan.*1\.00 x", result.stdout)
    assert re.search(r"data_parallel.*\d\.\d\d x", result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 60


def test_a_baseline_that_fails_does_not_cost_the_plan(tmp_path, monkeypatch):
    saved = tmp_path / "plan.json"
    result = run(*PLAN, "--baseline", "fsdp", "--baseline", "keras_hub", "-o", saved, "--json")
    assert result.exit_code == 2 and "keras_hub" in result.stderr
    assert "fsdp" in json.loads(result.stdout)["baselines"] and api.load(saved).mesh.size == 8

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_baseline", interrupted)
    result = run(*PLAN, "--baseline", "fsdp", "-o", saved)
    assert result.exit_code == 130 and "train step on" in result.stdout and "written to" in result.stderr


def test_a_plan_is_printed_although_it_cannot_be_saved():
    result = run(*PLAN, "-o", "/dev/full")
    assert result.exit_code == 2 and "No space left" in result.stderr and "train step on" in result.stdout


def test_a_budget_too_small_exits_with_1():
    message = fails(1, *PLAN, "--memory-budget", "1000", "--time-limit", "2")
    assert re.search(r"infeasible: No plan .* Received: (a budget of )?1\.0 kB", message)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--mesh", "data=2;model"), 'A mesh is written as "data=2,model=4"'),
        (("--mesh", "data=\u00b2"), 'A mesh is written as "data=2,model=4"'),
        (("--mesh", "data=" + "9" * 5000), 'A mesh is written as "data=2,model=4"'),
        (("--memory-budget", "9" * 5000), "A size in bytes"),
        (("--hardware", "tpu-v5"), "Did you mean"),
        (("--memory-budget", "16Gb"), "'16Gb'"),
        (("--memory-budget", "0"), "0"),
        (("--mode", "both"), "both"),
        (("--objective", "luck"), "luck"),
        (("--remat", "some"), "'some'"),
        (("--pin", "kernel"), "A pin is REGEX=SPEC"),
        (("--pin", "kernel=(None, 3)"), "mesh axis"),
        (("--pin", "kernel=None,nowhere"), "nowhere"),
        (("--pin", "absent=model"), "matches none"),
        (("--batch-size", "7"), "batch_size=7"),
        (("--batch-size", "0"), "batch_size is a positive integer"),
        (("--output", "absent/plan.json"), "Create the directory"),
        (("--mesh", "data=99999999999999"), "at most"),
        (("--hardware", "h100:4"), "4 and a mesh of 8"),
        (("--baseline", "magic"), "A baseline is one of"),
    ],
)
def test_options_that_make_no_sense_exit_with_2(changed, said):
    message = fails(2, *PLAN, *changed)
    assert "error: " in message
    assert said in message


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("cli_models", "package.module:factory"),
        ("absent_module:small", "absent_module"),
        ("cli_models:absent", "'absent'"),
        ("cli_models:number", "callable"),
        ("cli_models:uncompiled", "compile"),
        ("cli_models:failing", "no such dataset"),
        ("cli_models:leaving", "SystemExit: 3"),
        ("../cli_models:small", "importable"),
        ("hub:llama9", "llama3_8b"),
    ],
)
def test_models_that_cannot_be_built_exit_with_2(model, said):
    assert said in fails(2, "plan", model, "--mesh", "data=2")


@pytest.mark.parametrize(
    "arguments", [("plan",), ("plan", "m:f"), ("plan", "m:f", "--mesh", "a=2", "--seed", "x"), ("absent",)]
)
def test_usage_errors_exit_with_2(arguments):
    fails(2, *arguments)


def test_an_interrupt_exits_with_130(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "optimize", interrupted)
    assert fails(130, *PLAN) == "interrupted"


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_that_leaves_a_plan_is_no_failure(monkeypatch):
    from autoshard_ilp import planning

    solved = planning.attempt

    def interrupted(*arguments, **options):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return solved(*arguments, **options)

    monkeypatch.setattr(planning, "attempt", interrupted)
    result = run(*PLAN)
    assert result.exit_code == 0 and "train step on" in result.stdout


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(130)])
def test_an_interrupted_command_does_not_unwind_a_solver_that_still_runs(error, monkeypatch):
    class Ended(BaseException):
        pass

    def end(code):
        raise Ended(code)

    def app():
        raise error

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(os, "_exit", end)
    release = threading.Event()
    solver = threading.Thread(target=release.wait, daemon=True)
    solver.start()
    try:
        with pytest.raises(Ended, match="130"):
            cli.main()
    finally:
        release.set()
        solver.join()


def test_an_interrupt_while_the_command_line_loads_is_quiet(tmp_path):
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = [sys.executable, "-c", "from autoshard_ilp.__main__ import main; main()"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_while_arguments_are_parsed_is_quiet():
    code = (
        "import signal, sys\nfrom typer.core import TyperGroup\nfrom autoshard_ilp.__main__ import main\n"
        "def parse(*_, **__):\n    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt as error:\n        raise RuntimeError from error\n"
        "TyperGroup.parse_args = parse\nsys.argv = ['autoshard', 'profiles']\nmain()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
def test_a_closed_standard_error_is_no_fault(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    command = f'"{sys.executable}" -m autoshard_ilp compare broken.json broken.json 2>&-'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, shell=True, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stdout) == (2, b"")


def test_an_interrupt_that_a_library_turns_into_an_error_of_its_own(monkeypatch):
    def interrupted(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            sys.excepthook(type(error), error, error.__traceback__)  # what PyErr_Print calls
            raise ImportError("error while initializing the extension") from error

    monkeypatch.setattr(api, "optimize", interrupted)
    assert fails(130, *PLAN) == "interrupted"


def test_a_preset_does_not_load_tensorflow():
    """Which KerasHub would do, for seconds and for nothing; whoever wants it afterwards gets it."""
    pytest.importorskip("keras_hub")
    code = (
        "import sys; from autoshard_ilp.console import prepare; prepare()\n"
        "from autoshard_ilp.cli.arguments import factory_of\n"
        "build = factory_of('hub:gpt2_small?layers=1', 16)\n"
        "import keras_hub; print('tensorflow' in sys.modules, keras_hub.models.GPT2Backbone.__name__, callable(build))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "GPT2Backbone", "True"]


def test_an_interrupt_that_python_drops_comes_again(monkeypatch):
    class Dropping:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def interrupted(*_, **__):
        Dropping()
        time.sleep(20)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(api, "optimize", interrupted)
    began = time.monotonic()
    assert fails(130, *PLAN) == "interrupted"
    assert time.monotonic() - began < 15, "the wait was not interrupted"


def test_an_interrupt_waits_until_an_extension_is_loaded(monkeypatch):
    loaded = []

    class Extension(ExtensionFileLoader):
        def exec_module(self, module):
            signal.raise_signal(signal.SIGINT)
            loaded.append("whole")

    def interrupted(*_, **__):
        Extension("extension", "extension.so").exec_module(None)
        time.sleep(20)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(api, "optimize", interrupted)
    began = time.monotonic()
    assert fails(130, *PLAN) == "interrupted"
    assert loaded == ["whole"] and time.monotonic() - began < 15, "the wait was not interrupted"


def test_a_fault_of_the_program_is_one_line(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(api, "optimize", broken)
    assert fails(FAULT, *PLAN).startswith("unexpected ZeroDivisionError: oops Set AUTOSHARD_TRACEBACK=1")


# -- pins --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ('a/kernel=(None, "model")', {"a/kernel": (None, "model")}),
        ("a/kernel=None,model", {"a/kernel": (None, "model")}),
        ("a/kernel=(-, data+model)", {"a/kernel": (None, ("data", "model"))}),
        ("a/kernel=[['data', 'model'], None]", {"a/kernel": (("data", "model"), None)}),
        ("bias=model", {"bias": ("model",)}),
        ("bias=(model,)", {"bias": ("model",)}),
        ("bias='model'", {"bias": ("model",)}),
        ("bias=None", {"bias": (None,)}),
        ("scale=()", {"scale": ()}),
        ("(?=x)=None", {"(?=x)": (None,)}),
    ],
)
def test_pins_are_read(text, pins):
    assert parse_pins([text]) == pins


@pytest.mark.parametrize(
    "texts", [["kernel"], ["=model"], ["k="], ["k=(3,)"], ["k=model,,None"], ["k=a,None", "k=None,a"], ["k={'a': 1}"]]
)
def test_wrong_pins_are_refused(texts):
    with pytest.raises(InputShapeError, match="Received"):
        parse_pins(texts)


# -- verify and profiles -----------------------------------------------------------------------------------------------


def test_verify_builds_the_model_again_and_compiles(plan_file):
    result = run("verify", plan_file, "--target", "cpu:8", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["target"] == "cpu:8"
    assert found["compiled_peak_bytes"] > 0
    assert found["compiled_flops"] == pytest.approx(found["predicted_flops"], rel=0.2)


def test_verify_prints_the_comparison(plan_file, tmp_path):
    narrow = {"COLUMNS": "70"}
    result = run("verify", plan_file, "--target", "cpu", "--hlo", tmp_path / "step.txt", environment=narrow)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 70
    assert "Compiled for cpu:8" in result.stdout
    assert "peak memory" in result.stdout
    assert (tmp_path / "step.txt").read_text().startswith("HloModule")


def test_verify_refuses_other_models_and_files(plan_file, tmp_path):
    assert "tpu-v99" in fails(2, "verify", plan_file, "--target", "tpu-v99:4x4")
    assert "cpu:4" in fails(2, "verify", plan_file, "--target", "cpu:4")
    assert "Plan again" in fails(2, "verify", plan_file, "--target", "cpu:8", "--model", "cli_models:other")
    assert "absent.json" in fails(2, "verify", tmp_path / "absent.json")
    damaged = tmp_path / "damaged.json"
    damaged.write_text(plan_file.read_text()[:-10])
    assert "damaged" in fails(2, "verify", damaged)
    nameless = json.loads(plan_file.read_text()) | {"origin": {}}
    damaged.write_text(json.dumps(nameless))
    assert "--model" in fails(2, "verify", damaged)


def test_a_step_without_room_on_the_target_exits_with_1(plan_file, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 27.6G of 15.75G.")

    monkeypatch.setattr(Plan, "verify", full)
    message = fails(1, "verify", plan_file, "--target", "cpu:8")
    assert "Used 27.6G of 15.75G. Plan again" in message


def test_profiles_are_listed():
    result = run("profiles")
    assert result.exit_code == 0
    assert re.search(r"tpu-v5e +197 TFLOP/s +17\.2 GB +819 GB/s +2D torus, 45 GB/s +256", result.stdout)
    listed = json.loads(run("profiles", "--json").stdout)
    assert {"tpu-v5e", "h100"} <= {p["name"] for p in listed}
    assert all(p["memory_bytes"] >= p["usable_memory_bytes"] > 0 for p in listed)


def test_narrow_and_ascii_terminals_are_served():
    done = subprocess.run(
        [sys.executable, "-m", "autoshard_ilp", "profiles"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "60"},
        capture_output=True,
        check=True,
    )
    lines = done.stdout.decode("ascii").splitlines()
    assert max(map(len, lines)) <= 60
    assert done.stderr == b""


# -- summaries ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep_plan():
    """A stack of equal blocks, with an optimizer whose slots the plan may lay out apart from their variable."""

    def build():
        inputs = keras.Input((64,), name="features")
        x = inputs
        for i in range(4):
            x = keras.layers.Dense(64, name=f"block_{i}_projection_with_a_long_name", use_bias=False)(x)
        model = keras.Model(inputs, x)
        model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
        return model

    return api.optimize(build, {"data": 2, "model": 4}, "1GB", hardware="h100", batch_size=16)


def test_repeated_layers_and_their_slots_are_one_line(deep_plan):
    found = {row["path"]: row for row in grouped(deep_plan) if row["role"] == "parameter"}
    (kernel,) = found.values()
    assert kernel["path"] == "block_*_projection_with_a_long_name/kernel"
    assert (kernel["count"], kernel["shape"]) == (4, (64, 64))
    every = [row for row in rows(deep_plan) if row["shape"] == (64, 64)]
    slots = [row for row in grouped(deep_plan) if row["path"].endswith(" slots")]
    merged = [kernel, *slots]
    assert sum(row["count"] * (1 + row["slots"]) for row in merged) == len(every) == 12
    assert sum(row["bytes_per_device"] for row in merged) == sum(row["bytes_per_device"] for row in every)


def test_slots_apart_from_their_variable_follow_it(deep_plan):
    apart = tuple(
        dataclasses.replace(leaf, layout=(1, 0)) if leaf.path.endswith("kernel_momentum") else leaf
        for leaf in deep_plan.arguments
    )
    paths = [row["path"] for row in grouped(dataclasses.replace(deep_plan, arguments=apart))]
    kernel = "block_*_projection_with_a_long_name/kernel"
    assert paths.index(f"{kernel} slots") == paths.index(kernel) + 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_summaries_fit_and_hide_no_path(deep_plan, width):
    text = deep_plan.summary(width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    for part in ("block_*_projection_with_a_", "long_name", "kernel", "inputs/features"):
        assert part in text
    for part in ("Predicted step", "ollectives", "Memory per device at the peak", "optimal: total"):
        assert part in text


def test_long_tables_name_what_they_leave_out(deep_plan, monkeypatch):
    monkeypatch.setattr(records, "MAX_LAYOUTS", 1)
    hidden = re.search(r"(\d+) small variables are not shown", " ".join(deep_plan.summary().split()))
    assert hidden is not None
    assert int(hidden[1]) == len(rows(deep_plan)) - 12


# -- quickness and quiet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"], ["plan", "m:f"], ["profiles"]])
def test_simple_commands_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom autoshard_ilp.cli.app import main\nsys.argv = ['autoshard', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'jax', 'keras', 'ortools', 'scipy', 'pandas', 'tensorflow'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr


def test_native_logs_are_dropped_and_messages_passed_on(capfd):
    with cli.quiet_native_logs():
        os.write(2, b"I0000 00:00:1.2 33 stub.cc:31] Could not find drivers.\n")
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(2, b"F0000 00:00:1.2 33 core.cc:1] broken\nyour own words\n")
    assert capfd.readouterr().err == "F0000 00:00:1.2 33 core.cc:1] broken\nyour own words\n"


def _printing_to(stdout):
    command = [sys.executable, "-m", "autoshard_ilp", "profiles", "--json"]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_reader_that_has_seen_enough_is_no_error():
    with _printing_to(subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_stdout_that_takes_nothing_exits_with_2():
    with open("/dev/full", "w") as full, _printing_to(full) as process:
        message = process.stderr.read()
    assert message.startswith("error: Results go to stdout")
    assert process.returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [("explain", "no.json", "kernel"), ("nosuch",)])
def test_stderr_that_takes_nothing_leaves_the_exit_code(arguments):
    with open("/dev/full", "w") as full:
        found = subprocess.run([sys.executable, "-m", "autoshard_ilp", *arguments], stderr=full, stdout=full)
    assert found.returncode == 2


def test_jax_platforms_that_do_not_exist_exit_with_2():
    environment = {**os.environ, "JAX_PLATFORMS": "abacus"}
    command = [sys.executable, "-m", "autoshard_ilp", *PLAN]
    found = subprocess.run(command, env=environment, cwd=os.path.dirname(__file__), capture_output=True, text=True)
    assert found.returncode == 2
    assert "JAX_PLATFORMS='abacus'" in found.stderr and "Traceback" not in found.stderr


def test_a_compiled_program_goes_to_a_folder_that_exists(plan_file, tmp_path):
    assert "--hlo" in fails(2, "verify", plan_file, "--hlo", tmp_path / "absent" / "step.txt")


def test_output_that_is_a_directory_is_refused(tmp_path):
    with pytest.raises(PlanFileError, match="directory"):
        cli._check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    cli._check_writable(tmp_path / "plan.json")
