"""explain, compare, pareto, mesh and sweep on the command line: tables, JSON, files, exit codes, completion."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import explore_models  # noqa: F401  # its folder is on the path under pytest
from autoshard_ilp import api
from autoshard_ilp.cli import explore as cli_explore
from autoshard_ilp.cli.app import app
from autoshard_ilp.explore import sizing

MODEL = "explore_models:mlp"
HARD = ("--hardware", "tpu-v5e", "--batch-size", "512")


def run(*arguments, columns=110, **environment):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(columns), **environment})


def answers(*arguments, **options):
    result = run(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(code, *arguments):
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for name, more in (("best", ()), ("pinned", ("--pin", "wide/kernel=model,data"))):
        answers("plan", MODEL, "--mesh", "data=2,model=2", *HARD, *more, "-o", folder / f"{name}.json")
    return folder


# -- explain and compare -----------------------------------------------------------------------------------------------


def test_explain(plans):
    best = api.load(plans / "best.json")
    text = answers("explain", plans / "best.json", "wide/kernel")
    assert "wide/kernel (float32 1024x4096) lies as" in text and "The next best layout" in text
    data = json.loads(answers("explain", plans / "best.json", "wide/kernel", "--json"))
    assert len(data["alternatives"]) == 9 and data["alternatives"][0]["chosen"]
    assert data["alternatives"][0]["total_s"] == pytest.approx(best.cost.total_s, rel=1e-9)
    pinned = json.loads(answers("explain", plans / "pinned.json", "wide/kernel$", "--json"))
    assert min(a["total_s"] for a in pinned["alternatives"]) == pytest.approx(best.cost.total_s, rel=1e-9)


def test_compare(plans):
    first, second = plans / "best.json", plans / "pinned.json"
    data = json.loads(answers("compare", first, second, "--json"))
    assert "wide/kernel" in [t["tensor"] for t in data["tensors"]]
    totals = data["totals"]["total_s"]
    assert totals["first"] == api.load(first).cost.total_s < totals["second"] == api.load(second).cost.total_s
    text = answers("compare", first, second, "--price", columns=60)
    assert "this alone" in text and max(map(len, text.splitlines())) <= 60
    assert "Every tensor lies the same way" in answers("compare", first, first)


def test_questions_about_files_that_cannot_be_asked(plans, tmp_path):
    assert "must exist" in fails(2, "explain", tmp_path / "none.json", "wide/kernel")
    assert "finds none" in fails(2, "explain", plans / "best.json", "no/such/path")
    assert "damaged" in fails(2, "compare", plans / "best.json", __file__)
    nameless = json.loads((plans / "best.json").read_text())
    nameless["origin"].pop("model")
    (tmp_path / "nameless.json").write_text(json.dumps(nameless))
    assert "--model" in fails(2, "explain", tmp_path / "nameless.json", "wide/kernel")
    assert "wide/kernel" in answers("explain", tmp_path / "nameless.json", "wide/kernel", "--model", MODEL)
    assert "Received" in fails(2, "explain", plans / "best.json", "wide/kernel", "--model", "explore_models:tiny")


# -- pareto and mesh ---------------------------------------------------------------------------------------------------


def test_pareto(tmp_path):
    table, figure = tmp_path / "frontier.csv", tmp_path / "frontier.svg"
    data = json.loads(answers("pareto", MODEL, "--mesh", "data=4", *HARD, "-o", table, "--plot", figure, "--json"))
    assert data["complete"] and len(data["points"]) >= 2
    assert len(table.read_text().splitlines()) == len(data["points"]) + 1 and "<svg" in figure.read_text()
    least = data["minimum_bytes"]
    text = answers("pareto", MODEL, "--mesh", "data=4", *HARD, "--budget", "1GB", "--budget", least - 1)
    assert re.search(r"1\.0 GB.*proved", text) and "infeasible" in text
    assert run("pareto", MODEL, "--mesh", "data=4", *HARD, "--budget", "1kB").exit_code == 1


def test_mesh(tmp_path):
    saved, figure = tmp_path / "best.json", tmp_path / "meshes.png"
    text = answers("mesh", MODEL, "--devices", 4, *HARD, "--save", saved, "--plot", figure)
    assert "data=2, model=2" in text and "optimal" in text and figure.stat().st_size > 1000
    plan = api.load(saved)
    assert plan.mesh.size == 4 and plan.origin["model"] == MODEL
    assert "wide/kernel" in answers("explain", saved, "wide/kernel")
    more = ("--hardware", "h100=2", "--hardware", "tpu-v5e:2x2", "--price", "h100=3", "--price", "tpu-v5e:2x2=1.2")
    data = json.loads(answers("mesh", MODEL, *more, "--batch-size", 512, "--rank", "price", "--max-axes", 1, "--json"))
    assert {(c["hardware"], c["devices"]) for c in data["candidates"]} == {("h100", 2), ("tpu-v5e:2x2", 4)}
    prices = [c["price_per_step"] for c in data["candidates"]]
    assert prices == sorted(prices)


def test_how_small_and_how_large():
    tight = ("--hardware", "h100", "--memory-budget", "20MB")
    small = json.loads(answers("mesh", MODEL, "--smallest", *tight, "--batch-size", 512, "--max-axes", 1, "--json"))
    assert small["proved"] and small["size"] > 1 and small["tried"][-1]["fits"]
    text = answers("mesh", MODEL, "--largest-batch", "--axes", "data=4", *tight, "--multiple-of", 128)
    assert "Largest global batch" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("pareto", MODEL, "--mesh", "data", *HARD),
        ("pareto", MODEL, "--mesh", "data=4", *HARD, "--budget", "16Gb"),
        ("pareto", MODEL, "--mesh", "data=4", *HARD, "--max-points", "1"),
        ("pareto", MODEL, "--mesh", "data=4", "--hardware", "abacus"),
        ("pareto", "explore_models:nothing", "--mesh", "data=4"),
        ("pareto", MODEL, "--mesh", "data=4", "-o", "/no/such/folder/x.csv"),
        ("mesh", MODEL, "--hardware", "tpu-v5e"),
        ("mesh", MODEL, "--hardware", "tpu-v5e=many"),
        ("mesh", MODEL, "--devices", "4", "--price", "free"),
        ("mesh", MODEL, "--devices", "4", "--rank", "price"),
        ("mesh", MODEL, "--smallest", "--largest-batch"),
        ("mesh", MODEL, "--largest-batch"),
        ("mesh", MODEL, "--smallest", "--hardware", "h100", "--hardware", "l4"),
        ("sweep", "/no/such/file.toml"),
        ("pareto", MODEL, "--mesh", "data=4", *HARD, "--budget", "1GB", "-o", "/proc/autoshard.csv"),
        ("mesh", MODEL, "--devices", "2", "--max-axes", "1", "--plot", "figure"),
        ("mesh", MODEL, "--hardware", "h100=" + 5000 * "9"),
        ("mesh", MODEL, "--devices", "2", "--multiple-of", "4"),
        ("mesh", MODEL, "--largest-batch", "--axes", "data=4", "--batch-size", "64"),
        ("mesh", MODEL, "--largest-batch", "--axes", "data=4", "--plot", "batch.svg"),
        ("mesh", MODEL, "--largest-batch", "--axes", "data=4", "--hardware", "h100=8"),
    ],
    ids=lambda a: " ".join(a[:6])[:100] if isinstance(a, tuple) else a,
)
def test_nonsense_exits_with_2(arguments):
    assert "Received" in fails(2, *arguments)


@pytest.mark.parametrize("command", [("pareto", MODEL, "--mesh", "data=4"), ("mesh", MODEL, "--devices", "4")])
def test_a_figure_that_cannot_be_drawn_is_refused_at_once(command, monkeypatch):
    monkeypatch.setattr(cli_explore, "_model", lambda *_: pytest.fail("the model is built"))
    assert "--plot" not in fails(2, *command, "--plot", "frontier.doc")
    monkeypatch.setitem(sys.modules, "autoshard_ilp.plots.base", None)
    assert "pip install" in fails(2, *command, "--plot", "frontier.svg")


def test_an_answer_is_printed_although_its_files_cannot_be_written():
    for command in (("pareto", MODEL, "--mesh", "data=4", *HARD, "--budget", "1GB"), ("mesh", MODEL, "--devices", "1")):
        result = run(*command, "-o", "/dev/full")
        assert result.exit_code == 2 and "No space left" in result.stderr
        assert "data=" in result.stdout


def test_an_interrupted_search_for_a_batch_exits_with_130(monkeypatch):
    asked = []

    def interrupted(*arguments, least=sizing._least):
        asked.append(arguments)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return least(*arguments)

    monkeypatch.setattr(sizing, "_least", interrupted)
    result = run("mesh", "explore_models:tiny", "--largest-batch", "--axes", "data=2", "--memory-budget", "1MB")
    assert result.exit_code == 130 and "interrupted" in result.stdout


# -- sweep -------------------------------------------------------------------------------------------------------------


def test_sweep(tmp_path):
    file, out, report = tmp_path / "sweep.toml", tmp_path / "results.csv", tmp_path / "report.html"
    file.write_text(
        'models = ["explore_models:tiny", "explore_models:failing"]\nmeshes = ["data=2"]\nhardware = ["h100", "l4"]\n'
        "batch_sizes = [64]\n[run]\nworkers = 0\n"
    )
    data = json.loads(answers("sweep", file, "-o", out, "--report", report, "--json"))
    assert data["counts"] == {"optimal": 2, "failed": 2} and data["finished"] == data["total"] == 4
    assert len(out.read_text().splitlines()) == 5 and "<svg" in report.read_text()
    text = answers("sweep", file, "-o", out, columns=60)
    assert "4 of 4 cases finished" in text and max(map(len, text.splitlines())) <= 60
    file.write_text(file.read_text().replace("meshes", "mashes"))
    assert "Did you mean 'meshes'" in fails(2, "sweep", file, "-o", out)
    file.write_text('models = ["explore_models:failing"]\nmeshes = ["data=2"]\n')
    assert run("sweep", file, "--workers", 0).exit_code == 1


def test_ctrl_c_exits_with_130(tmp_path, monkeypatch):
    from autoshard_ilp.explore import runcase

    def interrupted(self, case):
        raise KeyboardInterrupt

    monkeypatch.setattr(runcase.Planner, "__call__", interrupted)
    file = tmp_path / "sweep.toml"
    file.write_text('models = ["explore_models:tiny"]\nmeshes = ["data=2"]\noutput = "r.csv"\n')
    result = run("sweep", file, "--workers", 0)
    assert result.exit_code == 130 and "goes on from there" in result.stderr


# -- the command itself ------------------------------------------------------------------------------------------------


# What takes the time of an import; the time itself is in benchmarks/explore_speed.py.
HEAVY = {"jax", "jaxlib", "keras", "numpy", "scipy", "networkx", "ortools", "numba", "pandas", "pyarrow", "matplotlib"}
HEAVY |= {"jsonschema", "pydantic", "rich"}


def child(*arguments, **environment):
    """The command in a process of its own, which writes the modules that it has loaded to stderr when it ends."""
    code = (
        "import atexit, sys; sys.argv[0] = 'autoshard';"
        "atexit.register(lambda: print('loaded', *{m.partition('.')[0] for m in sys.modules}, file=sys.stderr));"
        "from autoshard_ilp.cli.app import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def loads_nothing_heavy(done, heavy=HEAVY):
    loaded = set(re.findall(r"^loaded (.*)$", done.stderr, re.MULTILINE)[0].split())
    assert {"typer", "autoshard_ilp"} <= loaded and not loaded & heavy, loaded & heavy


@pytest.mark.parametrize("command", ["plan", "explain", "verify", "sweep", "pareto", "mesh", "profiles", "compare"])
def test_help_of_a_command_is_immediate(command):
    done = child(command, "--help")
    assert f"Usage: autoshard {command} " in " ".join(done.stdout.split())
    loads_nothing_heavy(done)


def test_help_is_immediate_and_complete():
    done = child("--help")
    for command in ("plan", "explain", "verify", "sweep", "pareto", "mesh", "profiles", "calibrate", "compare"):
        assert re.search(rf"^\s*[│|]?\s*{command}\b", done.stdout, re.MULTILINE), command
    loads_nothing_heavy(done)


@pytest.mark.parametrize("arguments", [("plan",), ("plan", "--mush", "data=2"), ("sweeep",)])
def test_bad_usage_is_immediate(arguments):
    done = child(*arguments)
    assert done.returncode == 2 and "Usage: autoshard" in done.stderr
    loads_nothing_heavy(done, HEAVY - {"pydantic"})  # typer's own, for the values of options


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell):
    words = {"COMP_WORDS": "autoshard me", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "autoshard me"}
    words |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_AUTOSHARD_COMPLETE": f"complete_{shell}"}
    done = child(**words)
    assert "mesh" in done.stdout and "pareto" not in done.stdout, done.stdout + done.stderr


BASH = """
source <(autoshard --show-completion bash)
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
$(complete -p autoshard | sed 's/.*-F \\([^ ]*\\).*/\\1/') autoshard
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("autoshard pro", "profiles"),
        ("autoshard plan --memory", "--memory-budget"),
        ("autoshard plan m:f --hardware tpu-v5", "tpu-v5e tpu-v5p"),
        ("autoshard pareto m:f --mode pre", "predict"),
        ("autoshard plan m:f --baseline fsdp", "fsdp fsdp+megatron"),
        ("autoshard plan m:f --remat s", "selective"),
    ],
)
def test_bash_completes_commands_options_and_their_values(words, completed, tmp_path):
    command = tmp_path / "autoshard"
    command.write_text(f"#!{sys.executable}\nfrom autoshard_ilp.__main__ import main\nmain()\n")
    command.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    shell = ["bash", "--norc", "-c", BASH.format(words=words)]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == completed, done.stderr


def test_the_completed_baselines_are_those_that_exist():
    from autoshard_ilp import baselines
    from autoshard_ilp.cli import options as cli_options

    assert tuple(baselines.BASELINES) == cli_options.BASELINES
