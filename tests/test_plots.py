"""Figures of a plan: what they show adds up, nothing is cut off, no display is needed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.errors import InputShapeError, PlanFileError
from autoshard_ilp.sharding import divisible_layouts, to_partition_spec
from profiles_for_tests import toy
from test_pictures import some_plan

pytest.importorskip("matplotlib")

from autoshard_ilp.plots import colours
from autoshard_ilp.plots.graph import layer_graph, positions
from autoshard_ilp.plots.mesh import shard_index

FIGURES = {
    "memory": lambda p: p.plot.memory(),
    "communication": lambda p: p.plot.communication(),
    "timeline": lambda p: p.plot.timeline(),
    "mesh": lambda p: p.plot.mesh("block_1/kernel"),
    "mesh of a vector": lambda p: p.plot.mesh("head/bias"),
}


def attention() -> keras.Model:
    inputs = keras.Input((16, 64), name="x")
    x = layers.MultiHeadAttention(4, 16, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(8, name="head")(layers.Add(name="add")([inputs, x])))
    model.compile(optimizer="sgd", loss="mse")
    return model


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.optimize(attention, {"a": 2, "b": 4}, hardware=toy(1e8), batch_size=32, progress=False)


def texts(figure):
    """Every visible text of a figure with its frame in pixels."""
    from matplotlib.text import Text

    beyond = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
            beyond |= {id(t.label1) for t in axis.get_major_ticks() if not low <= t.get_loc() <= high}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in beyond:
            yield text.get_text(), text.get_window_extent()


@pytest.mark.parametrize("budget", [120_000_000, 10**10, None])
@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off(name, budget):
    figure = FIGURES[name](some_plan(budget, prefix="a_rather_long_name_of_a_model/" if "mesh" not in name else ""))
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    shown = dict(texts(figure))
    assert len(shown) > 4
    for text, box in shown.items():
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, (text, box)


def test_a_step_without_operations_has_no_course_to_draw(tmp_path):
    plan = autoshard.optimize_fn(lambda x: x, (np.ones(64, np.float32),), {"data": 2}, progress=False)
    for draw in (plan.plot.timeline, plan.plot.memory, lambda: plan.to_perfetto(tmp_path / "trace.json")):
        with pytest.raises(InputShapeError, match="a step without operations"):
            draw()


def test_the_memory_figure_is_the_course():
    figure = some_plan().plot.memory()
    axes = figure.axes[0]
    stairs = {p.get_label(): p.get_data() for p in axes.patches if not p.get_label().startswith("_")}
    assert stairs["parameters"].values.tolist() == [40_000_000] * 3
    assert stairs["activations"].values.tolist() == [50_000_000, 100_000_000, 60_000_000]
    labels = [line.get_label() for line in axes.lines]
    assert "budget 120.0 MB" in labels and "peak 100.0 MB" in labels
    far = some_plan(10**10).plot.memory().axes[0]
    assert "budget 10.0 GB, 100.0 x the peak" in [line.get_label() for line in far.lines]
    assert far.get_ylim()[1] < 110_000_000


def test_the_communication_figure_adds_up(plan):
    figure = plan.plot.communication()
    for panel in figure.axes[:3]:
        assert sum(bar.get_width() for bar in panel.patches) == pytest.approx(plan.cost.communication_s, rel=1e-9)
    assert "communication" in figure.get_suptitle()
    alone = autoshard.optimize(attention, {"one": 1}, hardware=toy(1e8), batch_size=4, progress=False)
    assert "nothing is communicated" in dict(texts(alone.plot.communication()))


def test_long_paths_of_collectives_keep_what_tells_them_apart(plan):
    from dataclasses import replace

    start = "transformer_layer_*/a_block_inside/feedforward_"
    moved = [f"{start}output_dense/dot_general bfloat16[16,2048,4096]", f"{start}gate_dense/dot_general"]
    dear = [replace(plan.collectives[0], tensor=f"x/{what}", seconds=1 / (1 + i)) for i, what in enumerate(moved)]
    shown = dict(texts(replace(plan, collectives=(*dear, *plan.collectives)).plot.communication()))
    assert "…/feedforward_output_dense/dot_general [16,2048,4096]" in shown
    assert "…/a_block_inside/feedforward_gate_dense/dot_general" in shown


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_shards_lie_where_jax_puts_them(data):
    import jax
    from jax.sharding import Mesh, NamedSharding

    sizes = data.draw(st.sampled_from([(8,), (2, 4), (2, 2, 2), (4, 1, 2)]))
    shape = tuple(data.draw(st.lists(st.sampled_from([8, 16]), min_size=1, max_size=3)))
    layout = data.draw(st.sampled_from(divisible_layouts(shape, sizes)))
    names = tuple(f"a{i}" for i in range(len(sizes)))
    import numpy as np

    devices = np.array(jax.devices()[:8]).reshape(sizes)
    sharding = NamedSharding(Mesh(devices, names), to_partition_spec(layout, len(shape), names))
    where = sharding.devices_indices_map(shape)
    for at in itertools.product(*map(range, sizes)):
        starts = tuple(s.start or 0 for s in where[devices[at]])
        parts = tuple(len({idx[d].start or 0 for idx in where.values()}) for d in range(len(shape)))
        expected = tuple(start * n // size for start, n, size in zip(starts, parts, shape, strict=True))
        assert shard_index(at, layout, len(shape), sizes) == expected


def test_the_mesh_figure_names_the_parts(plan):
    path = "attention/query/kernel"
    figure = plan.plot.mesh(path)
    assert path in figure.get_suptitle() and "8 devices" in figure.axes[0].get_title(loc="left")
    assert len(figure.axes[0].patches) == 8
    with pytest.raises(InputShapeError, match="scalar"):
        plan.plot.mesh("outputs/loss")
    with pytest.raises(InputShapeError, match="Did you mean"):
        plan.plot.mesh("attention/query/kernels")


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_the_graph_of_a_layer(plan):
    figure = plan.plot.graph("attention")
    shown = " ".join(dict(texts(figure)))
    for part in ("dot_general", "query/kernel", "value/kernel", "attention_output/kernel", "attention, forward"):
        assert part in shown
    assert "head/kernel" not in shown
    back = " ".join(dict(texts(plan.plot.graph("attention/query", phase="backward"))))
    assert "attention/query, backward" in back and "value/kernel" not in back
    assert "forward" in " ".join(dict(texts(plan.plot.graph())))


@pytest.mark.parametrize("layer", [None, "attention", "head", "attention/query"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nothing_of_a_graph_is_cut_off(plan, layer, phase):
    figure = plan.plot.graph(layer, phase=phase)
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    shown = dict(texts(figure))
    assert any(f"{phase}, on a=2, b=4" in text for text in shown)
    for text, box in shown.items():
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, (text, box)


def test_without_a_name_the_graph_is_of_the_dearest_layer_of_the_phase(plan):
    seconds = defaultdict(float)
    for s in plan.course.segments:
        if s.phase == "update" and s.layer:
            seconds[s.layer] += s.seconds
    dearest = max(seconds, key=seconds.get)
    assert f"{dearest}, update" in " ".join(dict(texts(plan.plot.graph(phase="update"))))
    with pytest.raises(InputShapeError, match=r"phases.*'forward'.*Received: phase='sideways'"):
        plan.plot.graph(phase="sideways")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_boxes_do_not_overlap_and_edges_lead_down(plan, phase):
    graph = plan.trail.graph
    members = [op for op in graph.ops if op.phase == phase and op.primitive not in ("argument", "constant")]
    boxes, edges, hidden = layer_graph(plan, graph, members)
    at = positions(boxes, edges)
    assert hidden == 0 and len(boxes) > 5 and len(edges) > 5
    for a, b in edges:
        assert at[a][1] < at[b][1]
    for a, b in itertools.combinations(boxes, 2):
        apart_x = abs(at[a][0] - at[b][0]) >= (boxes[a].width + boxes[b].width) / 2 - 1e-9
        apart_y = abs(at[a][1] - at[b][1]) >= (boxes[a].height + boxes[b].height) / 2 - 1e-9
        assert apart_x or apart_y


def test_the_graph_shows_every_collective_of_its_layer(plan):
    graph = plan.trail.graph
    members = [op for op in graph.ops if op.primitive not in ("argument", "constant")]
    boxes, _, hidden = layer_graph(plan, graph, members)
    if hidden:
        pytest.skip("more operations than a figure shows")
    drawn = [line for box in boxes.values() for line in box.lines if " over " in line]
    assert plan.collectives and len(drawn) >= len(plan.collectives)


def test_layers_and_phases_that_do_not_exist(plan, tmp_path):
    with pytest.raises(InputShapeError, match=r"'atention'.*Did you mean attention"):
        plan.plot.graph("atention")
    with pytest.raises(InputShapeError, match=r"phases.*'forward'.*Received: phase='sideways'"):
        plan.plot.graph("attention", phase="sideways")
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    with pytest.raises(InputShapeError, match=r"plan\.bind"):
        loaded.plot.graph("attention")
    assert loaded.plot.memory().axes and loaded.plot.timeline().axes and loaded.plot.communication().axes


# -- traces ------------------------------------------------------------------------------------------------------------


def trace(plan, tmp_path):
    plan.to_perfetto(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_trace_is_the_step(plan, tmp_path, fresh):
    if not fresh:
        plan.save(tmp_path / "plan.json")
        plan = autoshard.load(tmp_path / "plan.json")
    events = trace(plan, tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    lanes = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            lanes[names[e["tid"]]].append((e["ts"], e["dur"]))
    work = {name: sum(d for _, d in spans) for name, spans in lanes.items()}
    assert work["layers"] == pytest.approx(plan.cost.total_s * 1e6, rel=1e-6)
    assert work["compute"] == pytest.approx(plan.cost.compute_s * 1e6, rel=1e-6)
    for axes, seconds in plan.cost.per_axis.items():
        assert work[f"over {axes}"] == pytest.approx(seconds * 1e6, rel=1e-6)
    assert [e.get("ts", -1.0) for e in events] == sorted(e.get("ts", -1.0) for e in events)
    for e in events:
        fields = {"M": set(), "X": {"ts", "dur", "tid"}, "C": {"ts"}}[e["ph"]]
        assert fields <= e.keys() and isinstance(e["pid"], int) and e["name"] and isinstance(e.get("args", {}), dict)
        assert e.get("ts", 0) >= 0 and e.get("dur", 0) >= 0
    for spans in lanes.values():
        for (start, length), (after, _) in itertools.pairwise(sorted(spans)):
            assert start + length <= after + 1e-6
    counters = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(counters) == plan.memory.peak_bytes
    assert fresh == any(e["ph"] == "X" and e["name"] == "dot_general" for e in events)


def test_a_trace_that_cannot_be_written(plan, tmp_path):
    with pytest.raises(PlanFileError, match="can be written"):
        plan.to_perfetto(tmp_path / "absent" / "trace.json")


# -- surroundings ------------------------------------------------------------------------------------------------------


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    path = os.pathsep.join(p for p in (os.path.dirname(__file__), env.get("PYTHONPATH")) if p)
    command = [sys.executable, "-W", "error", "-c", f"from test_pictures import some_plan\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, env={**env, "PYTHONPATH": path, **environment})


def test_no_display_is_needed(tmp_path):
    code = (
        f"some_plan().plot.memory().savefig({str(tmp_path / 'memory.png')!r})\n"
        f"some_plan().plot.timeline().savefig({str(tmp_path / 'timeline.svg')!r})\n"
        "import sys\nassert 'matplotlib.pyplot' not in sys.modules"
    )
    done = run(code, MPLBACKEND="TkAgg", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "timeline.svg").read_text()


def test_without_matplotlib_the_error_says_what_to_install():
    done = run("import sys\nsys.modules['matplotlib'] = None\nsome_plan()._repr_html_()\nsome_plan().plot.memory()")
    assert done.returncode == 1
    assert 'ImportError: plan.plot needs matplotlib: pip install "autoshard-ilp[notebook]"' in done.stderr


def test_a_notebook_shows_a_figure_at_its_size():
    png, size = some_plan().plot.memory()._repr_png_()
    assert png.startswith(b"\x89PNG") and 800 < size["width"] < 1400


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#16181d"])
def test_ink_and_colours_are_legible_on_light_and_dark(ground):
    assert contrast(colours.INK, ground) >= 3.9
    for colour in {*colours.PARTS.values(), *colours.KINDS.values(), *colours.LAYERS, colours.OTHER}:
        assert contrast(colour, ground) >= 2.2, colour
