"""Sweeps: every case once, whatever happens in between; every whole row of a damaged file; nonsense plans nothing."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autoshard_ilp as autoshard
import explore_models
from autoshard_ilp.explore import pool, results, runcase
from autoshard_ilp.explore import sweep as sweep_module
from autoshard_ilp.explore.cases import read_sweep, work_of
from autoshard_ilp.explore.sweep import load_sweep, sweep

pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")

AXES = {
    "models": ["explore_models:tiny"],
    "meshes": ["data=2", {"data": 2, "model": 2}, "data=4"],
    "hardware": ["tpu-v5e", "h100"],
    "batch_sizes": [64],
}
KINDS = (".csv", ".parquet")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Six finished cases in both formats."""
    folder = tmp_path_factory.mktemp("sweeps")
    return {kind: sweep(**AXES, output=folder / f"results{kind}", workers=0) for kind in KINDS}


@pytest.fixture
def counted(monkeypatch):
    """Keys of the cases that are planned from here on."""
    planned = []
    original = runcase.Planner.__call__

    def call(self, case):
        planned.append(case.key)
        return original(self, case)

    monkeypatch.setattr(runcase.Planner, "__call__", call)
    return planned


def copied(path, folder):
    """The results file and its journal in another folder."""
    for name in {path.name, results.journal_of(path).name}:
        (folder / name).write_bytes((path.parent / name).read_bytes())
    return folder / path.name


def same_rows(a, b):
    timing = ("trace_s", "build_s", "solve_s", "wall_s", "finished_at")
    strip = [[{k: v for k, v in r.items() if k not in timing} for r in rows] for rows in (a, b)]
    assert sorted(strip[0], key=str) == sorted(strip[1], key=str)


# -- what a sweep finds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_is_what_optimize_says(done, kind):
    found = done[kind]
    assert len(found) == found.total == 6 and not found.interrupted and found.counts == {"optimal": 6}
    for row in found:
        mesh = dict(part.split("=") for part in row["mesh"].split(","))
        mesh = {k: int(v) for k, v in mesh.items()}
        plan = autoshard.optimize(explore_models.tiny, mesh, hardware=row["hardware"], batch_size=64)
        assert row["total_s"] == pytest.approx(plan.cost.total_s) and row["status"] == plan.status
        assert row["peak_bytes"] == plan.memory.peak_bytes and row["devices"] == plan.mesh.size
        assert row["jax"] and row["autoshard_ilp"] == autoshard.__version__ and len(row["profile_hash"]) == 12
        assert row["program_hash"] == plan.placement.fingerprint[:16]
    same_rows(done[".csv"].rows, done[".parquet"].rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_a_tidy_table(done, kind):
    path = done[kind].path
    frame = pandas.read_csv(path) if kind == ".csv" else pandas.read_parquet(path)
    assert list(frame.columns) == list(results.COLUMNS) and len(frame) == 6 and frame["case"].is_unique
    assert frame["total_s"].tolist() == [r["total_s"] for r in load_sweep(path)]
    assert list(done[kind].to_dataframe().columns) == list(results.COLUMNS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_sweep_plans_nothing(done, kind, counted, tmp_path):
    path = copied(done[kind].path, tmp_path)
    again = sweep(**AXES, output=path, workers=0)
    assert not counted and again.rows == done[kind].rows
    more = sweep(**{**AXES, "meshes": [*AXES["meshes"], "data=8"]}, output=path, workers=0)
    assert len(counted) == 2 and len(more) == 8 and len(load_sweep(path)) == 8


def test_a_failed_case_stops_nothing_and_can_be_tried_again(tmp_path, counted, monkeypatch):
    axes = {**AXES, "models": ["explore_models:tiny", "explore_models:failing"], "hardware": ["h100"]}
    axes |= {"strategies": ["optimal", "keras_hub"], "meshes": ["data=2"]}
    found = sweep(**axes, output=tmp_path / "r.csv", workers=0)
    assert len(found) == 4 and found.counts == {"optimal": 1, "failed": 3}
    assert {r["error_type"] for r in found.failed} == {"RuntimeError", "UnsupportedModelError"}
    assert "no such dataset" in found.text()
    counted.clear()
    assert len(sweep(**axes, output=tmp_path / "r.csv", workers=0)) == 4 and not counted
    monkeypatch.setattr(explore_models, "failing", explore_models.tiny)
    healed = sweep(**axes, output=tmp_path / "r.csv", workers=0, retry_failed=True)
    assert len(counted) == 3 and healed.counts == {"optimal": 2, "failed": 2}
    assert len(load_sweep(tmp_path / "r.csv")) == 4


def test_a_budget_too_small_is_a_result():
    axes = {**AXES, "meshes": ["data=2"], "hardware": ["h100"], "budgets": ["1kB"], "remat": ["never"]}
    row = sweep(**axes, workers=0).rows[0]
    assert row["status"] == "infeasible" and row["minimum_budget_bytes"] > 1000 and row["total_s"] is None


def test_builders_models_and_profiles_of_this_process():
    here = sweep(models={"mine": lambda: explore_models.tiny()}, meshes=[{"data": 2}], batch_sizes=[64], workers=4)
    assert here.rows[0]["model"] == "mine" and here.rows[0]["status"] == "optimal"
    profile = autoshard.profile("h100")
    both = sweep(models=[explore_models.tiny], meshes={"data": 2}, hardware=[profile, "tpu-v5e"], batch_sizes=64)
    assert [r["hardware"] for r in both] == ["h100", "tpu-v5e"] and both.rows[0]["model"] == "tiny"
    assert not work_of({"models": [explore_models.tiny], "meshes": ["data=2"], "hardware": profile}, {}).portable
    work = work_of({"models": [explore_models.tiny], "meshes": ["data=2"]}, {})
    assert work.portable and work.models == {"tiny": "explore_models:tiny"}


def test_a_key_depends_on_all_that_decides(monkeypatch):
    base = {"models": ["explore_models:tiny"], "meshes": ["data=2"]}
    changes = [{}, {"meshes": ["data=4"]}, {"hardware": ["h100"]}, {"budgets": ["1GB"]}, {"batch_sizes": [8]}]
    changes += [
        {"modes": ["predict"]},
        {"objectives": ["communication"]},
        {"remat": ["full"]},
        {"strategies": ["fsdp"]},
    ]
    keys = [work_of({**base, **change}, {}).cases[0].key for change in changes]
    keys.append(work_of(base, {"time_limit": 5.0}).cases[0].key)
    assert len(set(keys)) == len(keys)
    assert work_of(base, {"workers": 3}).cases[0].key == keys[0]
    both = work_of({**base, "meshes": ["data=2", {"data": 2}]}, {})
    assert len(both.cases) == 1


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_is_finished(tmp_path, monkeypatch, counted):
    original = runcase.Planner.__call__

    def call(self, case):
        if len(counted) == 2:
            raise KeyboardInterrupt
        return original(self, case)

    monkeypatch.setattr(runcase.Planner, "__call__", call)
    first = sweep(**AXES, output=tmp_path / "r.parquet", workers=0)
    assert first.interrupted and len(first) == 2 and first.total == 6 and "Interrupted" in first.text()
    assert len(pandas.read_parquet(tmp_path / "r.parquet")) == 2
    monkeypatch.setattr(runcase.Planner, "__call__", original)
    rest = sweep(**AXES, output=tmp_path / "r.parquet", workers=0)
    assert len(rest) == 6 and len(counted) == len(set(counted)) == 6


def test_ctrl_c_that_a_library_swallows_ends_the_sweep_after_its_case(monkeypatch, counted):
    monkeypatch.setattr("autoshard_ilp.console.was_interrupted", lambda: len(counted) == 2)
    found = sweep(**AXES, workers=0)
    assert found.interrupted and len(found) == len(counted) == 2


def test_a_worker_is_ended_by_two_threads_at_once():
    worker = pool.Worker({})

    class Process:
        pid, stdin, stdout = 0, None, None

        def poll(self):
            worker.process = None  # as the other thread does when it is done
            return 0

        wait = poll

    worker.process = Process()
    assert worker._end() == 0 and worker._end() is None


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment(tmp_path, workers):
    """A real process is killed; a second one finishes; each case was finished once."""
    (tmp_path / "sweep.toml").write_text(
        'models = ["explore_models:tiny", "explore_models:failing"]\n'
        'meshes = ["data=2", "data=4", {data = 2, model = 2}]\n'
        f'hardware = ["tpu-v5e"]\nbatch_sizes = [64]\noutput = "r.csv"\n[run]\nworkers = {workers}\n'
    )
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}
    command = [sys.executable, "-c", "import sys, autoshard_ilp; autoshard_ilp.sweep(sys.argv[1])"]
    command.append(str(tmp_path / "sweep.toml"))
    results_file = tmp_path / "r.csv"
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while first.poll() is None and time.monotonic() < deadline:
        if results_file.exists() and results_file.read_bytes().count(b"\n") >= 2:
            first.send_signal(signal.SIGKILL)
            break
        time.sleep(0.05)
    first.wait(timeout=60)
    kept = load_sweep(results_file).rows
    assert kept
    with results_file.open("ab") as file:
        file.write(b"half a ro")
    subprocess.run(command, env=environment, check=True, timeout=240, stderr=subprocess.DEVNULL)
    found = load_sweep(results_file)
    assert len(found) == 6 and found.counts == {"optimal": 3, "failed": 3}
    assert results_file.read_text().count("\n") == 7  # a header, and every case once
    assert [r for r in found if r["case"] in {k["case"] for k in kept}] == list(kept)


def test_worker_processes(done):
    axes = {**AXES, "models": ["explore_models:tiny", "explore_models:failing"], "meshes": ["data=2"]}
    found = sweep(**axes, workers=1)
    assert found.counts == {"optimal": 2, "failed": 2} and "no such dataset" in found.failed[0]["error"]
    same_rows([r for r in found if r["status"] == "optimal"], [r for r in done[".csv"] if r["mesh"] == "data=2"])


def test_a_worker_that_dies_or_hangs_costs_its_case(monkeypatch):
    case = work_of({"models": ["explore_models:tiny"], "meshes": ["data=2"]}, {}).cases[0]
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    worker = pool.Worker({})
    late = worker.run(case, 0.05)
    assert late["status"] == "failed" and late["error_type"] == "Timeout" and late["case"] == case.key
    real = pool.subprocess.Popen

    def dying(command, **options):
        return real([sys.executable, "-c", "import sys; sys.stderr.write('so long\\n'); sys.exit(7)"], **options)

    monkeypatch.setattr(pool.subprocess, "Popen", dying)
    died = worker.run(case, 60.0)
    assert died["error_type"] == "WorkerDied" and "exit code 7. so long" in died["error"]
    assert worker.stop() is None


# -- damage ------------------------------------------------------------------------------------------------------------


def whole_rows(data):
    """Rows of a CSV file whose line is complete."""
    return max(0, data.count(b"\n") - 1)


def test_a_csv_cut_anywhere_keeps_its_whole_rows(done, tmp_path):
    data = done[".csv"].path.read_bytes()
    cut = tmp_path / "r.csv"
    header = data.index(b"\n") + 1
    for size in [*range(header, len(data), 211), len(data) - 1, len(data)]:
        cut.write_bytes(data[:size])
        assert len(load_sweep(cut)) == whole_rows(data[:size])
    for garbage in (b"\x00\xff\xfe\n", b"a,b,c\n", b"\n", b"\xff" * 40):
        cut.write_bytes(data + garbage)
        assert load_sweep(cut).rows == done[".csv"].rows


def test_a_damaged_end_is_cut_off_and_planned_again(done, tmp_path, counted):
    path = copied(done[".csv"].path, tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    again = sweep(**AXES, output=path, workers=0)
    assert len(counted) == 1 and len(again) == 6
    assert path.read_bytes().count(b"\n") == 7 and len(pandas.read_csv(path)) == 6


@pytest.mark.parametrize("damage", ["cut", "zeros", "gone"])
def test_a_damaged_parquet_comes_back_from_its_journal(done, tmp_path, damage, counted):
    path = copied(done[".parquet"].path, tmp_path)
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else bytes(len(data)))
    journal = results.journal_of(path)
    journal.write_bytes(journal.read_bytes() + b'{"case": "half')
    assert load_sweep(path).rows == done[".parquet"].rows
    assert len(sweep(**AXES, output=path, workers=0)) == 6 and not counted
    assert len(pandas.read_parquet(path)) == 6
    path.write_bytes(b"PAR1 no")
    journal.unlink()
    with pytest.raises(autoshard.SweepFileError, match="no journal"):
        load_sweep(path)


def test_a_lost_journal_is_written_again(done, tmp_path, counted):
    path = copied(done[".parquet"].path, tmp_path)
    results.journal_of(path).unlink()
    assert len(sweep(**AXES, output=path, workers=0)) == 6 and not counted
    path.unlink()
    assert len(load_sweep(path)) == 6


def test_other_versions(done, tmp_path, counted):
    path = copied(done[".csv"].path, tmp_path)
    own = runcase.versions()["jax"]
    path.write_text(path.read_text().replace(f",{own},", ",0.0.1,"))
    with pytest.raises(autoshard.SweepFileError, match=r"jax 0\.0\.1"):
        sweep(**AXES, output=path, workers=0)
    assert {r["jax"] for r in sweep(**AXES, output=path, workers=0, other_versions="keep")} == {"0.0.1"}
    assert not counted
    assert {r["jax"] for r in sweep(**AXES, output=path, workers=0, other_versions="redo")} == {own}
    assert len(counted) == 6 and len(load_sweep(path)) == 6
    with pytest.raises(autoshard.InputShapeError):
        sweep(**AXES, other_versions="maybe")


def test_files_that_are_not_results(done, tmp_path):
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("name,value\nx,1\n")
    with pytest.raises(autoshard.SweepFileError, match="lacks the columns"):
        sweep(**AXES, output=foreign, workers=0)
    assert foreign.read_text() == "name,value\nx,1\n"
    pandas.DataFrame({"a": [1]}).to_parquet(tmp_path / "foreign.parquet")
    with pytest.raises(autoshard.SweepFileError, match="lacks the columns"):
        load_sweep(tmp_path / "foreign.parquet")
    newer = copied(done[".csv"].path, tmp_path)
    newer.write_text(
        "\n".join(line[:-1] + "9" if line.endswith(",1") else line for line in newer.read_text().split("\n"))
    )
    with pytest.raises(autoshard.SweepFileError, match="format 9"):
        load_sweep(newer)
    for name in ("results.txt", "no/such/folder/r.csv"):
        with pytest.raises(autoshard.SweepFileError):
            sweep(**AXES, output=tmp_path / name, workers=0)
    with pytest.raises(autoshard.SweepFileError, match="must exist"):
        load_sweep(tmp_path / "none.csv")


def test_two_sweeps_do_not_share_a_file(done, tmp_path):
    pytest.importorskip("fcntl")
    path = copied(done[".csv"].path, tmp_path)
    store = results.Store(path)
    with pytest.raises(autoshard.SweepFileError, match="another process is writing"):
        sweep(**AXES, output=path, workers=0)
    store.close()
    assert len(sweep(**AXES, output=path, workers=0)) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_sweep_adds_just_before_it_lets_go_stays(kind, tmp_path, monkeypatch):
    path = tmp_path / f"results{kind}"

    def row(case):
        return {"case": case, "status": "optimal", "total_s": 1.0}

    first = results.Store(path)
    first.add(row("a"))
    lock = results._lock

    def late(file, of):
        monkeypatch.setattr(results, "_lock", lock)
        first.add(row("b"))
        first.close()
        lock(file, of)

    monkeypatch.setattr(results, "_lock", late)
    second = results.Store(path)
    second.add(row("c"))
    second.close()
    assert [r["case"] for r in results.read(path)] == ["a", "b", "c"]
    for no_path in (None, 3):
        with pytest.raises(autoshard.InputShapeError, match="named by its path"):
            load_sweep(no_path)


# -- sweep files -------------------------------------------------------------------------------------------------------

GOOD = 'models = ["explore_models:tiny"]\nmeshes = ["data=2"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "batchsizes = [32]\n", "unknown key 'batchsizes'. Did you mean 'batch_sizes'"),
        (GOOD + "[solver]\nspeed = 3\n", "solver has the unknown key 'speed'"),
        (GOOD + "budgets = []\n", "budgets is empty"),
        ("models = []\nmeshes = ['data=2']\n", "models is empty"),
        ("models = ['explore_models:tiny']\n", "lacks 'meshes'"),
        (GOOD + "batch_sizes = ['many']\n", "batch_sizes.0 is of type integer"),
        (GOOD + "modes = ['test']\n", "modes.0 is one of"),
        (GOOD + "output = 'results.xls'\n", "output does not match"),
        ("models = [", "is TOML"),
        ("\x00", "is TOML"),
    ],
)
def test_sweep_files_that_make_no_sense(tmp_path, text, message):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(autoshard.SweepFileError, match=message.replace("(", r"\(")) as caught:
        sweep(path)
    assert "Received" in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "error"),
    [
        ({"models": ["hub:nonsense"]}, autoshard.InputShapeError),
        ({"models": ["no_such_module:factory"]}, autoshard.UnsupportedModelError),
        ({"models": ["explore_models:nothing"]}, autoshard.UnsupportedModelError),
        ({"models": []}, autoshard.InputShapeError),
        ({"models": [3]}, autoshard.InputShapeError),
        ({"meshes": []}, autoshard.InputShapeError),
        ({"meshes": ["data"]}, autoshard.InputShapeError),
        ({"meshes": None}, autoshard.InputShapeError),
        ({"hardware": ["abacus"]}, autoshard.ProfileError),
        ({"hardware": []}, autoshard.InputShapeError),
        ({"budgets": ["16 bananas"]}, autoshard.InputShapeError),
        ({"budgets": [5000 * "9"]}, autoshard.InputShapeError),
        ({"batch_sizes": [0]}, autoshard.InputShapeError),
        ({"batch_sizes": [True]}, autoshard.InputShapeError),
        ({"modes": ["test"]}, autoshard.InputShapeError),
        ({"remat": ["sometimes"]}, autoshard.InputShapeError),
        ({"strategies": ["luck"]}, autoshard.InputShapeError),
        ({"workers": -1}, autoshard.InputShapeError),
        ({"case_time_limit": 0}, autoshard.InputShapeError),
        ({"solver": {"speed": 1}}, autoshard.InputShapeError),
        ({"solver": {"relative_gap": float("nan")}}, autoshard.InputShapeError),
    ],
    ids=lambda value: str(value)[:80],
)
def test_axes_that_make_no_sense_plan_nothing(axes, error, counted, tmp_path):
    with pytest.raises(error):
        sweep(**{**AXES, "output": tmp_path / "r.csv", **axes})
    assert not counted and not (tmp_path / "r.csv").exists()


def test_a_sweep_file_and_arguments_beside_it(tmp_path, counted):
    path = tmp_path / "sweep.toml"
    path.write_text(
        GOOD + 'output = "r.csv"\nbudgets = ["hardware", 1000000000]\n[solver]\ntime_limit = 7\n[run]\nworkers = 0\n'
    )
    found = sweep(path, batch_sizes=[64, 128])
    assert len(found) == 4 and found.path == tmp_path / "r.csv"
    assert {r["time_limit_s"] for r in found} == {7.0} and {r["batch_size"] for r in found} == {64, 128}
    assert {r["memory_budget"] for r in found} == {"hardware", "1000000000"}
    assert read_sweep(path)["output"] == "r.csv"


# -- showing -----------------------------------------------------------------------------------------------------------


def test_progress_says_how_long(counted):
    told = []
    sweep(**{**AXES, "hardware": ["h100"]}, workers=0, progress=told.append)
    news = [n for n in told if n["stage"] == "sweep"]
    assert [n["done"] for n in news] == [1, 2, 3] and {n["total"] for n in news} == {3}
    assert all(n["seconds_left"] >= 0 for n in news) and news[-1]["seconds_left"] == 0
    assert sweep_module.Bar(False, 1, 0)._draw is False


def test_results_read_well(done, tmp_path):
    found = done[".csv"]
    for width in (60, 110):
        text = found.text(width, only_ascii=True)
        assert text.isascii() and max(map(len, text.splitlines())) <= width
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["counts"] == {"optimal": 6}
    assert "<pre" in found._repr_html_() and found.varying() == ["mesh", "devices", "hardware"]
    assert found.default_axes() == ("mesh", "hardware")
    pytest.importorskip("matplotlib")
    for x, y in ((None, "total_s"), ("devices", "peak_bytes"), ("hardware", "gap")):
        assert found.plot(x=x, y=y).axes
    with pytest.raises(autoshard.InputShapeError):
        found.plot(x="colour")
    with pytest.raises(autoshard.InputShapeError):
        found.plot(y="model")
    page = found.report(tmp_path / "report.html").read_text()
    assert "<svg" in page and "<script" not in page and "src=" not in page and page.count("<tr") == 7
    assert autoshard.__version__ in page
    with pytest.raises(autoshard.SweepFileError):
        found.report(tmp_path / "no" / "report.html")


def test_a_report_names_an_error_once_and_what_a_bar_is_the_least_of(done, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{**r, "status": "failed", "error_type": "E", "error": "<no> disk"} for r in done[".csv"].rows]
    page = sweep_module.Sweep(tuple(rows[:4]), 6).report(tmp_path / "report.html").read_text()
    assert page.count("E: &lt;no&gt; disk") == 1 and "(4 x)" in page
    budgets = [{**r, "memory_budget": b} for r in done[".csv"].rows for b in ("1GB", "2GB")]
    figure = sweep_module.Sweep(tuple(budgets), 12).plot()
    assert figure.axes[0].get_title(loc="left") == "least over memory budget"
    assert not done[".csv"].plot().axes[0].get_title(loc="left")


@pytest.mark.parametrize("path", [None, 3])
def test_a_report_is_written_to_a_path(done, path):
    with pytest.raises(autoshard.InputShapeError, match="named by its path"):
        done[KINDS[0]].report(path)


def test_an_empty_sweep_reads_well():
    nothing = sweep_module.Sweep((), 3)
    assert "0 of 3" in nothing.text() and math.isnan(nothing.to_dataframe()["total_s"].mean())


def test_what_is_no_model():
    with pytest.raises(autoshard.InputShapeError, match=r"is text .* Received: 3 of type int"):
        sweep(models=[3], meshes=[{"data": 2}])
