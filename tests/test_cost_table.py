"""Buffers, repeated layers, hubs and rematerialisation: the stages between graph and program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard_ilp as autoshard
from autoshard_ilp.check import check_graph
from autoshard_ilp.costs.fold import fold
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.graph import insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.graph.remat import recomputed_layers, rematerialise
from profiles_for_tests import toy

MESH = {"data": 2, "model": 4}


def _graph(function, *args, aliases=None):
    closed = jax.make_jaxpr(function)(*args)
    paths = [f"args/{i}" for i in range(len(closed.in_avals))]
    results = [f"outputs/{i}" for i in range(len(closed.out_avals))]
    return build_graph(closed, argument_paths=paths, result_paths=results, aliases=aliases or {})


def _stored(graph):
    buffers = analyse(graph)
    return [
        (op.primitive, graph.tensors[t].shape)
        for op in graph.ops
        for t in op.outputs
        if buffers.stored[t] and op.primitive != "argument"
    ]


X = jnp.zeros((64, 64))


# -- buffers


def test_an_elementwise_chain_is_one_buffer():
    assert _stored(_graph(lambda x, w: jnp.sum(((x @ w) * 2 + 1) ** 2 - 3), X, X)) == [("dot_general", (64, 64))]


def test_what_a_product_reads_is_written():
    graph = _graph(lambda x, w: (x * 2) @ w, X, X)
    assert _stored(graph) == [("mul", (64, 64)), ("dot_general", (64, 64))]


def test_views_share_their_operands_buffer_and_keep_it_alive():
    graph = _graph(lambda x, w: ((x @ w).reshape(4096), (x * 2) @ w), X, X)
    buffers = analyse(graph)
    dot = next(op for op in graph.ops if op.primitive == "dot_general")
    view = next(op for op in graph.ops if op.primitive == "reshape")
    assert not buffers.stored[view.outputs[0]] and buffers.root[view.outputs[0]] == dot.outputs[0]


def test_cheap_values_are_recomputed_and_dear_ones_kept():
    assert ("exp", (64, 64)) in _stored(_graph(lambda x, w: (lambda y: (y.sum(), (y * x).sum()))(jnp.exp(x @ w)), X, X))
    cheap = _stored(_graph(lambda x, w: (lambda y: (y.sum(), (y * x).sum()))((x @ w) + 1), X, X))
    assert cheap == [("dot_general", (64, 64))]


def test_an_elementwise_chain_behind_a_product_overwrites_it():
    def capped(a, b):
        return jnp.tanh(a @ b / 30.0) * 30.0

    def capped_and_read(a, b):
        y = a @ b
        return jnp.tanh(y / 30.0) * 30.0, y

    ends = []
    for function in (capped, capped_and_read):
        graph = _graph(function, X, X)
        buffers = analyse(graph, "gpu")
        product = next(op for op in graph.ops if op.primitive == "dot_general").outputs[0]
        last = next(op for op in reversed(graph.ops) if op.primitive == "mul").outputs[0]
        ends.append(int(buffers.end[product] - buffers.start[last]))
    assert ends[0] == 0, "the chain's result takes the product's place"
    assert ends[1] > 0


def test_donated_state_is_updated_in_place():
    graph = _graph(lambda w, g: (w - 0.1 * g * g, jnp.sum(w)), X, X, aliases={0: 0})
    assert _stored(graph) == []


def test_a_scan_holds_its_stacked_results_from_its_start():
    def cumulate(c, x):
        c = jnp.tanh(c + x)
        return c, c @ X

    graph = _graph(lambda xs: jax.lax.scan(cumulate, jnp.zeros((64, 64)), xs)[1], jnp.zeros((5, 64, 64)))
    buffers = analyse(graph)
    stack = next(op for op in graph.ops if op.primitive == "loop_stack")
    inside = [op.id for op in graph.ops if op.region]
    assert buffers.start[stack.outputs[0]] <= min(buffers.time[i] for i in inside)
    assert buffers.end[stack.outputs[0]] == buffers.horizon


def test_gradients_of_equal_tables_are_filled_together_on_gpus():
    def loss(tables, ids):
        return jnp.sum(jnp.concatenate([table[i] for table, i in zip(tables, ids, strict=True)], axis=1) ** 2)

    graph = _graph(jax.grad(loss), [jnp.zeros((1000, 32))] * 2 + [jnp.zeros((500, 32))], [jnp.zeros(64, "int32")] * 3)
    for family, together in (("gpu", True), ("tpu", False)):
        buffers = analyse(graph, family)
        tables = [op.outputs[0] for op in graph.ops if op.primitive == "scatter-add"]
        starts = {graph.tensors[t].shape: set() for t in tables}
        for t in tables:
            starts[graph.tensors[t].shape].add(int(buffers.start[t]))
        assert len(starts[1000, 32]) == (1 if together else 2) and len(starts) == 2


def test_a_softmax_does_not_overwrite_the_scores_on_gpus():
    def attention(q, k, v):
        return jax.nn.softmax((q @ k).astype("float32"), axis=-1).astype("bfloat16") @ v

    graph = _graph(attention, *[jnp.zeros((256, 256), "bfloat16")] * 3)
    buffers = analyse(graph, "gpu")
    scores, out = (op for op in graph.ops if op.primitive == "dot_general")
    assert buffers.stored[out.inputs[0]]
    assert buffers.end[scores.outputs[0]] > buffers.start[out.inputs[0]]


def test_stacks_of_equal_shape_are_prepared_together_on_gpus():
    def layer(xs):
        return jax.lax.scan(lambda c, x: (jnp.tanh(c + x),) * 2, jnp.zeros((64, 64)), xs)[1]

    graph = _graph(lambda xs: layer(layer(xs)), jnp.zeros((5, 64, 64)))
    stacks = [op.outputs[0] for op in graph.ops if op.primitive == "loop_stack"]
    starts = {family: [int(analyse(graph, family).start[t]) for t in stacks] for family in ("gpu", "tpu")}
    assert starts["gpu"] == [starts["tpu"][0]] * 2
    assert starts["tpu"][0] < starts["tpu"][1]


# -- repeated layers


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    before=st.lists(st.integers(0, 3), max_size=6),
    layer=st.lists(st.integers(0, 5), min_size=2, max_size=8),
    repeats=st.integers(1, 12),
    window=st.integers(1, 10),
)
def test_folding_ties_equal_windows_only(before, layer, repeats, window):
    codes = [*("head", *before), *layer * repeats, "tail"]
    classes = fold(codes, [window] * len(codes))
    seen: dict[int, tuple] = {}
    for i, c in enumerate(classes):
        around = (i - max(0, i - window), tuple(codes[max(0, i - window) : i + window + 1]))
        assert seen.setdefault(c, around) == around
    assert len(seen) == len(
        {(min(i, window), tuple(codes[max(0, i - window) : i + window + 1])) for i in range(len(codes))}
    )
    assert sorted(set(classes)) == list(range(len(seen)))


def _deep(layers: int):
    def build():
        import keras

        inputs = keras.Input((256,))
        x = inputs
        for _ in range(layers):
            x = x + keras.layers.Dense(256)(
                keras.layers.Dense(1024, activation="gelu")(keras.layers.LayerNormalization()(x))
            )
        model = keras.Model(inputs, keras.layers.Dense(16)(x))
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        return model

    return build


def test_folded_and_free_layers_have_the_same_optimum():
    options = {"hardware": toy(), "batch_size": 64}
    folded = autoshard.optimize(_deep(5), MESH, **options)
    free = autoshard.optimize(_deep(5), MESH, solver=autoshard.SolverOptions(fold_layers=False), **options)
    assert len(folded.trail.program.nodes) < 0.8 * len(free.trail.program.nodes)
    assert folded.status == free.status == "optimal"
    assert folded.cost.total_s == pytest.approx(free.cost.total_s, rel=1e-5)
    assert folded.memory.peak_bytes > 0


@pytest.mark.slow
def test_twice_the_layers_make_no_bigger_program():
    options = {"hardware": toy(), "batch_size": 64, "solver": autoshard.SolverOptions(time_limit=2)}
    small, large = (autoshard.optimize(_deep(n), MESH, **options) for n in (6, 12))
    assert len(large.trail.program.nodes) <= 1.1 * len(small.trail.program.nodes)


def test_cost_is_the_sum_of_its_parts_and_the_solvers_objective():
    plan = autoshard.optimize(_deep(2), MESH, hardware=toy(), batch_size=64)
    communication = sum(c.seconds * c.count for c in plan.collectives)
    assert plan.cost.communication_s == pytest.approx(communication)
    assert plan.cost.total_s == pytest.approx(plan.cost.compute_s + communication)
    assert plan.trail.program.cost(plan.trail.solution.choices) == pytest.approx(plan.cost.total_s, rel=1e-9)
    assert sum(plan.memory.parts.values()) == plan.memory.peak_bytes
    assert plan.trail.program.peak(plan.trail.solution.choices) == plan.memory.peak_bytes


# -- gather once or gather again


def test_a_tight_budget_gathers_again():
    """Weights pinned to shards, large batch: a loose budget keeps the gathered copies, a tight one does not."""
    pins = {r"^sequential[^/]*/dense[^/]*/kernel$": ("all", None)}
    options = {
        "hardware": toy(flops_per_s=1e15, memory_bytes_per_s=1e15),
        "batch_size": 512,
        "pins": pins,
        "remat": "never",
    }
    mesh = {"all": 8}
    loose = autoshard.optimize(_wide(), mesh, **options)
    tight = autoshard.optimize(_wide(), mesh, int(loose.memory.peak_bytes * 0.85), **options)
    gathered = [
        sum(c.count * c.bytes_per_device for c in p.collectives if c.kind == "all-gather") for p in (loose, tight)
    ]
    assert tight.memory.peak_bytes <= 0.85 * loose.memory.peak_bytes
    assert gathered[1] > gathered[0] > 0


def _wide():
    def build():
        import keras

        model = keras.Sequential([keras.Input((1024,)), *(keras.layers.Dense(1024, use_bias=False) for _ in range(6))])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    return build


# -- rematerialisation


def _loss(params, x):
    for w in params:
        x = x + jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1])
    return jnp.sum(x**2)


def _params(layers: int):
    return [(jnp.full((64, 256), 0.01 * (i + 1)), jnp.full((256, 64), 0.02)) for i in range(layers)]


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_rematerialised_graph_computes_the_same_with_less_memory(policy):
    from autoshard_ilp.apply import Decisions, planned_function

    step = jax.value_and_grad(_loss)
    params, x = _params(6), jnp.linspace(0, 1, 64 * 64).reshape(64, 64)
    flat = [*jax.tree.leaves(params), x]
    graph = _graph(step, params, x)
    rewritten = insert_hubs(rematerialise(graph, policy))
    check_graph(rewritten)
    products = sum(op.primitive == "dot_general" for op in rewritten.ops) - sum(
        op.primitive == "dot_general" for op in graph.ops
    )
    assert (products == 0) if policy == "selective" else (products > 0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("all",))
    got = jax.jit(planned_function(rewritten, Decisions(), mesh, ("all",)))(*flat)
    for a, b in zip(got, jax.tree.leaves(step(params, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

    def held(g):
        b = analyse(g)
        delta = np.zeros(b.horizon + 1)
        for t in g.tensors:
            if b.stored[t.id] and g.ops[t.producer].primitive != "argument":
                delta[b.start[t.id]] += t.bytes
                delta[b.end[t.id]] -= t.bytes
        return np.cumsum(delta).max()

    assert held(rewritten) < 0.8 * held(insert_hubs(graph))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_what_the_backward_pass_begins_with_is_not_recomputed(policy):
    """It would be dropped and made again at once: of two layers the last product, and the tanh behind it."""
    rewritten = rematerialise(_graph(jax.value_and_grad(_loss), _params(2), X), policy)
    again = [op.primitive for op in rewritten.ops if op.params.get("recomputed")]
    assert again.count("tanh") == 4 - 1
    assert again.count("dot_general") == (0 if policy == "selective" else 4 - 1)


def test_never_changes_nothing():
    graph = _graph(jax.value_and_grad(_loss), _params(2), X)
    assert rematerialise(graph, "never") is graph
    assert recomputed_layers(graph) == ()


def test_a_budget_below_the_activations_recomputes_them():
    options = {"hardware": toy(), "batch_size": 4096}
    kept = autoshard.optimize(_deep(3), MESH, remat="never", **options)
    budget = int(kept.memory.peak_bytes * 0.65)
    solver = autoshard.SolverOptions(time_limit=12, relative_gap=0.05)
    saved = autoshard.optimize(_deep(3), MESH, budget, solver=solver, **options)
    assert saved.remat_policy != "never" and saved.remat
    assert saved.memory.peak_bytes <= budget
    assert saved.cost.total_s > kept.cost.total_s


# -- buffers by backend


def _loss_of_logits(x, w):
    """A softmax over float32 copies of bfloat16 logits, with its gradient: what a language model ends with."""

    def loss(w):
        logits = (x @ w).astype(jnp.float32)
        return -jax.nn.log_softmax(logits)[:, 0].sum()

    return jax.grad(loss)(w)


def test_gpus_compute_what_is_smaller_to_read_twice():
    x, w = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((64, 4096), jnp.bfloat16)
    graph = _graph(_loss_of_logits, x, w)
    held = {}
    for family in ("gpu", "tpu", "cpu"):
        stored = analyse(graph, family).stored
        held[family] = {
            (op.primitive, graph.tensors[t].dtype) for op in graph.ops for t in op.outputs
            if stored[t] and graph.tensors[t].shape == (64, 4096)
        }  # fmt: skip
    assert ("exp", "float32") in held["cpu"]
    assert ("exp", "float32") not in held["gpu"] | held["tpu"]
    assert ("dot_general", "bfloat16") in held["gpu"]


def test_tpus_compute_operands_inside_products():
    """The input of an activation function is kept, its value is not; nor is a dropout mask. GPUs write both."""

    def loss(w, v, x):
        hidden = jax.nn.gelu(x @ w)
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, hidden.shape)
        return (jnp.where(kept, hidden, 0.0) @ v).sum()

    x, w, v = (
        jnp.zeros((64, 64), jnp.bfloat16),
        jnp.zeros((64, 4096), jnp.bfloat16),
        jnp.zeros((4096, 64), jnp.bfloat16),
    )
    graph = _graph(jax.grad(loss, (0, 1)), w, v, x)
    held = {}
    for family in ("gpu", "tpu"):
        stored = analyse(graph, family).stored
        wide = [t for op in graph.ops for t in op.outputs if stored[t] and graph.tensors[t].shape == (64, 4096)]
        held[family] = {graph.ops[graph.tensors[t].producer].primitive for t in wide} - {"argument"}
    assert held["tpu"] == {"dot_general"} and len(held["gpu"]) > 1


def test_a_sum_of_several_arrays_is_written_once_for_several_kernels():
    def residual(x, a, b, w):
        y = x @ w + a @ w + b @ w
        return y.sum(), (y * y).sum(), (y - 1) @ w

    stored = _stored(_graph(residual, X, X, X, X))
    assert stored.count(("add", (64, 64))) == 1, "the last sum, not those on the way"
    twice = _stored(_graph(lambda x, w: (lambda y: (y.sum(), (y * x).sum()))((x @ w) + 1), X, X))
    assert ("add", (64, 64)) not in twice, "one array to read: computed in both kernels"


def test_random_bits_are_drawn_once_but_for_tpus():
    """XLA:TPU holds no dropout mask of BERT or GPT-2 from the forward to the backward pass."""

    def dropout(key, x):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return (x * kept).sum(), (x * x * kept).max()

    graph = _graph(dropout, jax.random.key(0), X)
    for family in ("gpu", "tpu", "cpu"):
        stored = analyse(graph, family).stored
        drawn = [t.dtype for t in graph.tensors if stored[t.id] and graph.ops[t.producer].primitive != "argument"]
        assert drawn == ([] if family == "tpu" else ["bool"]), family


@pytest.mark.parametrize(
    ("shapes", "dtype", "copies"),
    [
        (((64, 96), (96, 257)), "bfloat16", 96 * 257),
        (((64, 257), (257, 96)), "bfloat16", 64 * 257 + 257 * 96),
        (((64, 96), (96, 256)), "bfloat16", 0),
        (((64, 96), (96, 257)), "float32", 0),
        (((1, 96), (96, 257)), "bfloat16", 0),
    ],
)
def test_operands_of_odd_shapes_are_padded_for_cublas(shapes, dtype, copies):
    from autoshard_ilp.costs.padding import copies_for_tiles
    from autoshard_ilp.rules import rule_for
    from autoshard_ilp.strategies import strategies_of

    graph = _graph(jnp.matmul, *(jnp.zeros(s, dtype) for s in shapes))
    op = next(o for o in graph.ops if o.primitive == "dot_general")
    view = graph.view(op)
    strategies = strategies_of(rule_for(view), view.in_shapes, view.out_shapes, (2,))
    held = copies_for_tiles(graph, op, strategies, (2,))
    assert held[0] == 2 * copies, "the first strategy keeps everything whole"
    assert (held <= held[0]).all()


# -- what XLA:GPU combines


def _trained(widths):
    """One training step of a chain of square products, in bfloat16."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w.astype("bfloat16"))
        return (x * x).sum()

    def step(weights, x):
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]

    weights = [jax.ShapeDtypeStruct((n, n), "float32") for n in widths]
    x = jax.ShapeDtypeStruct((8, widths[0]), "bfloat16")
    return _graph(lambda *a: step(a[:-1], a[-1]), *weights, x, aliases={i: i for i in range(len(widths))})


@pytest.mark.parametrize(("width", "alone"), [(1024, 1), (4096, 4)])
def test_small_weights_are_gathered_and_reduced_together(width, alone):
    from autoshard_ilp.costs.gpu.combining import gathered_together, reduced_together

    graph = _trained([width] * 4)
    buffers = analyse(graph, "gpu")
    gathered, reduced = (f(graph, buffers, "gpu") for f in (gathered_together, reduced_together))
    casts = [op.outputs[0] for op in graph.ops if op.primitive == "convert_element_type" and op.phase == "forward"]
    together = [t for t in casts if t in gathered and graph.tensors[t].dtype == "bfloat16"]
    if alone == 1:
        assert len(together) >= 4 and len({gathered[t] for t in together}) == 1, "2 MB each: one gather for all"
        assert len(reduced) == 4 and len(set(reduced.values())) == 1
        assert set(reduced.values()) == {max(int(buffers.start[t]) for t in reduced)}
    else:
        assert not together and not reduced, "32 MB each are beyond the threshold"
    assert not gathered_together(graph, buffers, "tpu") and not reduced_together(graph, buffers, "cpu")


# -- how often, and what for


def test_what_a_loop_hands_on_or_stacks_is_laid_out_in_every_iteration():
    from autoshard_ilp.costs.table import executions

    def cumulate(c, x):
        return jnp.tanh(c + x), c  # the stack reads the carry itself

    graph = _graph(lambda xs: jax.lax.scan(cumulate, jnp.zeros((64, 64)), xs), jnp.zeros((5, 64, 64)))
    times = {
        (op.primitive, i): executions(graph, op.id, i)
        for op in graph.ops
        for i in range(len(op.inputs))
        if op.primitive.startswith("loop_")
    }
    assert times == {("loop_carry", 0): 1, ("loop_carry", 1): 5, ("loop_slice", 0): 1, ("loop_stack", 0): 5}


def test_a_result_in_another_layout_is_a_copy_that_counts():
    from jax.sharding import PartitionSpec as P

    x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    options = {"hardware": toy(1e13, 1e13), "pins": {"args/0": P(("data", "model"))}, "progress": False}
    at = {"same": P(("data", "model")), "whole": P()}
    peaks = {
        name: autoshard.optimize_fn(
            lambda x: jnp.sort(x, axis=-1),
            (x,),
            MESH,
            **{**options, "pins": {**options["pins"], "outputs": spec}},
        ).memory.peak_bytes
        for name, spec in at.items()
    }
    shard = 4096 * 4096 * 4 // 8
    assert peaks["same"] == 2 * shard
    assert peaks["whole"] >= 9 * shard, "the shard that is gathered, and the whole result"


# -- what a GPU's kernels cost (costs/kernels.py)

GPU = dataclasses.replace(autoshard.profile("h200"), name="gpu")


def _compute_seconds(function, *args, hardware=GPU, primitive):
    """Seconds of one execution of the only operation of a kind, on one device."""
    plan = autoshard.optimize_fn(function, args, {"device": 1}, hardware=hardware, progress=False)
    table = plan.trail.costs
    found = [c for c in table.classes if table.graph.ops[c.members[0]].primitive == primitive]
    assert len(found) == 1
    return float(found[0].compute_seconds[0])


def _zeros(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_few_tiles_leave_processors_idle():
    """128 x 1024 has 8 tiles of 128 x 128 for 132 processors, and a sum of 1024 is not split."""
    seconds = _compute_seconds(jnp.matmul, _zeros((128, 1024)), _zeros((1024, 1024)), primitive="dot_general")
    busy = 2 * 128 * 1024 * 1024 / (GPU.peak_flops_per_s("bfloat16") * 8 / 132)
    assert seconds == pytest.approx(busy + GPU.kernel_launch_seconds)
    split = _compute_seconds(jnp.matmul, _zeros((128, 16384)), _zeros((16384, 1024)), primitive="dot_general")
    assert split < 4 * seconds


def test_products_of_whole_tiles_take_their_operations():
    seconds = _compute_seconds(jnp.matmul, _zeros((8192, 8192)), _zeros((8192, 8192)), primitive="dot_general")
    assert seconds == pytest.approx(2 * 8192**3 / GPU.peak_flops_per_s("bfloat16") + GPU.kernel_launch_seconds)


@pytest.mark.parametrize(("columns", "slower"), [(50264, 1.0), (50257, 1 / GPU.unaligned_efficiency)])
def test_rows_of_odd_length_are_slow(columns, slower):
    seconds = _compute_seconds(jnp.matmul, _zeros((8192, 1024)), _zeros((1024, columns)), primitive="dot_general")
    alone = 2 * 8192 * 1024 * columns / GPU.peak_flops_per_s("bfloat16")
    assert seconds == pytest.approx(alone * slower + GPU.kernel_launch_seconds)


def test_random_bits_are_arithmetic():
    def drawn(x):
        return x + jax.random.bits(jax.random.key(0), x.shape)

    seconds = _compute_seconds(drawn, _zeros((1 << 20, 64), "uint32"), primitive="random_bits")
    assert seconds >= (1 << 26) / GPU.random_words_per_s
    unknown = dataclasses.replace(GPU, random_words_per_s=None)
    assert _compute_seconds(drawn, _zeros((1 << 20, 64), "uint32"), hardware=unknown, primitive="random_bits") < seconds


@pytest.mark.parametrize("window", [2, 3])
def test_gradients_of_poolings_go_through_every_window(window):
    """Measured on an H100: 25.7 million windows of 3 x 3 took 0.88 ms, 29.4 million of 2 x 2 took 0.50 ms."""

    def pooled(x):
        kept = (1, window, window, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, kept, (1, 2, 2, 1), "SAME").sum()

    seconds = _compute_seconds(jax.grad(pooled), _zeros((128, 112, 112, 64)), primitive="select_and_scatter_add")
    measured = {3: 0.88e-3 / 25.7e6, 2: 0.50e-3 / 29.4e6}[window] * 128 * 56 * 56 * 64
    assert seconds == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize("function", ["dilated", "transposed"])
def test_slow_kernel_gradients_are_priced_as_the_products_that_run(function):
    """A product reads strided pieces of its operands once for each element of the kernel."""

    def dilated(x, kernel):
        x = jnp.pad(x, ((0, 0), (8, 0), (0, 0)))
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "VALID", rhs_dilation=(8,), dimension_numbers=("NWC", "WIO", "NWC")
        ).sum()

    def transposed(x, kernel):
        return jax.lax.conv_transpose(x, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")).sum()

    def plain(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")).sum()

    shapes = _zeros((64, 4096, 64)), _zeros((2, 64, 64))
    slow, fast = (
        _compute_seconds(jax.grad(f, 1), *shapes, primitive="conv_general_dilated")
        for f in ({"dilated": dilated, "transposed": transposed}[function], plain)
    )
    assert slow > 2 * fast


def test_batched_products_copy_operands_whose_batch_is_not_in_front():
    def attention(q, k):
        return jnp.einsum("bthd,bshd->bhts", q, k)

    def in_front(q, k):
        return jnp.einsum("bhtd,bhsd->bhts", q, k)

    last = _compute_seconds(attention, *2 * [_zeros((16, 1024, 12, 64))], primitive="dot_general")
    first = _compute_seconds(in_front, *2 * [_zeros((16, 12, 1024, 64))], primitive="dot_general")
    copied = 2 * 2 * 16 * 1024 * 12 * 64 * 2 / (GPU.memory_bytes_per_s * GPU.memory_efficiency)
    assert last - first == pytest.approx(copied)


@pytest.mark.parametrize("hardware", ["h200", "tpu-v5e", "cpu-host"])
def test_a_loop_writes_one_slice_of_its_stack_per_iteration(hardware):
    def stacked(x, length):
        return jax.lax.scan(lambda c, _: (c * 2, c @ c), x, None, length=length)

    short, long = (
        _compute_seconds(lambda x, n=n: stacked(x, n), X, hardware=hardware, primitive="loop_stack") for n in (4, 400)
    )
    assert 0 < short == long


def test_a_kernel_takes_its_launch_on_gpus_only():
    def chain(x):
        return jnp.sum(jnp.tanh(x) * 2)

    for hardware, kernels in ((GPU, 1), (autoshard.profile("tpu-v5e"), 0)):
        dear = dataclasses.replace(hardware, kernel_launch_seconds=1.0)
        plan = autoshard.optimize_fn(chain, (X,), {"device": 1}, hardware=dear, progress=False)
        assert round(plan.cost.compute_s) == kernels
