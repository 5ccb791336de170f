"""What belongs to the backward pass stays there in the compiled program: on CPU, and on GPU without one."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.costs.gpu.combining import known_from_the_start
from autoshard_ilp.enforce import order, ties
from autoshard_ilp.enforce.ties import anchors, beside, is_even, never, tied
from autoshard_ilp.graph import insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.graph.remat import rematerialise
from autoshard_ilp.verify import compile_only_mesh, parse_target
from compiled import needs_cuda, needs_tpu

ROWS, WIDTH, LAYERS = 8192, 256, 6


def loss(params: Any, x: Any) -> Any:
    for up, down in params:
        x = x + jnp.tanh(jax.nn.gelu(x @ up) @ down)
    return jnp.sum(x**2)


def step(params: Any, x: Any) -> Any:
    return jax.value_and_grad(loss)(params, x)


def shapes() -> Any:
    weights = [
        (jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), "float32"), jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), "float32"))
    ]
    return weights * LAYERS, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


def graph_of(policy: str) -> Any:
    jaxpr = jax.make_jaxpr(step)(*shapes())
    n_results = len(jaxpr.jaxpr.outvars)
    paths = [f"w{i}" for i in range(2 * LAYERS)] + ["x"]
    graph = build_graph(jaxpr, argument_paths=paths, result_paths=[f"r{i}" for i in range(n_results)])
    return insert_hubs(rematerialise(graph, policy))


def test_nothing_waits_for_a_weight_which_is_there_from_the_start() -> None:
    """A product of an activation and a cast weight: the weight may wait for the activation, not the other way round."""

    def product(w: Any, x: Any) -> Any:
        return jnp.tanh(x).astype("bfloat16") @ w.astype("bfloat16") @ w.astype("bfloat16")

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    graph = build_graph(jax.make_jaxpr(product)(square, square), argument_paths=["w", "x"], result_paths=["r"])
    known = known_from_the_start(graph)
    first, second = (op for op in graph.ops if op.primitive == "dot_general")
    assert beside(graph, second, 1, known) == first.outputs[0]
    assert beside(graph, second, 0, known) is None
    assert beside(graph, first, 0, known) is None


def compiled(policy: str, mesh: Mesh, options: dict[str, Any]) -> Any:
    """The step, batch sharded over the mesh, under a policy."""
    graph = graph_of(policy)
    layouts = {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            shape = graph.tensors[t].shape
            layouts[op.id, j] = (0,) if shape[:1] == (ROWS,) else (-1,)
    run = planned_function(graph, Decisions(results=layouts), mesh, ("data",))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(run, in_shardings=(*[whole] * (2 * LAYERS), rows))
    return jitted.lower(*jax.tree.leaves(shapes())).compile(compiler_options=options)


def meshes() -> list[Any]:
    return [
        pytest.param("cpu", {}, id="cpu"),
        pytest.param("h100:8", {"xla_gpu_autotune_level": 0}, id="gpu", marks=needs_cuda),
    ]


@pytest.mark.parametrize(("target", "options"), meshes())
def test_recomputed_activations_are_not_held(target: str, options: dict[str, Any]) -> None:
    """Kept: nine arrays per layer or so of a device's share of the batch. Recomputed: those of about one layer."""
    if target == "cpu":
        mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    else:
        mesh = compile_only_mesh(parse_target(target), ("data",), (8,))
    held = {p: compiled(p, mesh, options).memory_analysis().temp_size_in_bytes for p in ("never", "full")}
    layer = ROWS // 8 * (4 * WIDTH) * 4  # one activation of the wide layer, bytes per device
    assert held["never"] - held["full"] > (LAYERS - 2) * layer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_a_tie_changes_no_bit_and_outlives_the_compiler(dtype: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def run(value: Any, gradient: Any) -> Any:
        return tied(value, never(gradient, spec, mesh))

    value = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 8)), dtype)
    for g in (0.0, 1.5, np.nan, np.inf):
        gradient = jnp.full((4, 2), g, "float32")
        got = jax.jit(run, in_shardings=(None, NamedSharding(mesh, spec)))(value, gradient)
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(value))
    text = jax.jit(run, in_shardings=(None, NamedSharding(mesh, spec))).lower(value, gradient).compile().as_text()
    assert re.search(r"\bselect\(", text), "the dependency was folded away"
    assert not re.search(r"all-(gather|reduce)|collective-permute", text), "a tie sends nothing"


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_what_is_known_from_the_start_waits_as_well(constant: float) -> None:
    """The cotangent that a backward pass begins with is often one of these."""
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")
    run = jax.jit(lambda g: tied(jnp.full((4, 8), constant), never(g, spec, mesh)))
    text = run.lower(jax.ShapeDtypeStruct((4, 2), "float32", sharding=NamedSharding(mesh, spec))).compile().as_text()
    assert re.search(r"\bselect\(", text), "the dependency was folded away"


def test_anchors_are_gradients_of_the_layer_above() -> None:
    graph = graph_of("full")
    found = anchors(graph)
    waiting = [op for op in graph.ops if op.primitive == "recompute"]
    assert len(waiting) >= LAYERS - 1
    tied_to = {found[op.id] for op in waiting if op.id in found}
    assert len(tied_to) >= LAYERS - 1, "every layer waits for its own gradient"
    for t in tied_to:
        producer = graph.ops[graph.tensors[t].producer]
        assert producer.phase == "backward" and not producer.params.get("recomputed")
        assert graph.tensors[t].shape[0] == ROWS, "the gradient of an activation, not one that waits for a collective"


def test_an_anchor_is_what_can_be_looked_at() -> None:
    """The gradient of logits over an odd vocabulary is no equal part; what the softmax sums up over it is."""

    def loss(w: Any, x: Any, labels: Any) -> Any:
        logits = (jnp.tanh(x) @ w).astype("float32")
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(ROWS), labels])

    args = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((64, 1025), "bfloat16"), ((ROWS, 64), "bfloat16"), ((ROWS,), "int32"))
    ]
    closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args)
    graph = insert_hubs(build_graph(closed, argument_paths=("w", "x", "labels"), result_paths=("dw", "dx")))
    products = [op.id for op in graph.ops if op.primitive == "dot_general" and op.phase == "backward"]
    assert len(products) == 2

    def anchored(platform: str, even: bool) -> set[tuple[int, ...]]:
        found = anchors(graph, platform, lambda t: not even or 1025 not in graph.tensors[t].shape)
        return {graph.tensors[found[p]].shape for p in products[:1]}

    assert anchored("gpu", False) == {(ROWS, 1025)}
    assert anchored("gpu", True) == {(ROWS,)}
    assert anchored("tpu", False) == {(ROWS,)}, "XLA:TPU computes that gradient inside the products, and would write it"


def test_only_even_layouts_are_looked_at_device_by_device() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    assert is_even(NamedSharding(mesh, PartitionSpec("data")), (8, 3))
    assert not is_even(NamedSharding(mesh, PartitionSpec(None, "data")), (8, 3))


def test_what_a_backward_loop_reads_waits_for_the_loop_before_it() -> None:
    """Residuals of the first loop may only be gathered once the second loop's backward pass has run."""

    def loss(w: Any, xs: Any) -> Any:
        def layer(ys: Any) -> Any:
            return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x),) * 2, jnp.zeros((16, 16)), ys)[1]

        return (layer(layer(xs)) ** 2).sum()

    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 16), (8, 16, 16))]
    closed = jax.make_jaxpr(lambda w, xs: jax.grad(loss)(w, xs))(*args)
    graph = build_graph(closed, argument_paths=("w", "xs"), result_paths=("g",))
    found = anchors(graph)
    slices = [op for op in graph.ops if op.primitive == "loop_slice" and op.phase == "backward"]
    regions = list(dict.fromkeys(op.region for op in slices))
    assert len(regions) == 2
    last = [op for op in slices if op.region == regions[1] and op.id in found]
    assert last
    for op in last:
        producer = graph.ops[graph.tensors[found[op.id]].producer]
        assert producer.region == regions[0] or producer.id > max(o.id for o in graph.ops if o.region == regions[0])


def chain(width: int, n_layers: int, transposed: bool = False) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """Graph of products that each read a weight of their own, and its arguments."""

    def run(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ (w.T if transposed else w))
        return x

    args = [jax.ShapeDtypeStruct((n, width), "float32") for n in (1024, *[width] * n_layers)]
    paths = ["x", *(f"w{i}" for i in range(n_layers))]
    return build_graph(jax.make_jaxpr(run)(*args), argument_paths=paths, result_paths=["y"]), args


def gathering(graph: Any, mesh: Mesh, waits: bool) -> Any:
    """The chain with its weights stored in rows and gathered whole; jitted."""
    layouts = {(op.id, j): (0,) for op in graph.ops for j in range(len(op.outputs))}
    products = [op for op in graph.ops if op.primitive == "dot_general"]
    operands = {(op.id, 1): (-1,) for op in products}
    transposes = {(op.id, 0): (-1,) for op in graph.ops if op.primitive == "transpose"}
    late = frozenset(transposes or operands) if waits else frozenset()
    layouts, operands = layouts | transposes, operands | transposes
    run = planned_function(graph, Decisions(operands, layouts, waits=late), mesh, ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(run, in_shardings=(rows,) * len(graph.arguments), out_shardings=[rows])


@needs_cuda
@pytest.mark.parametrize("transposed", [False, True])
def test_gathers_that_wait_for_their_readers_are_not_made_early(transposed: bool) -> None:
    width, n_layers = 4096, 6
    graph, args = chain(width, n_layers, transposed)
    mesh = compile_only_mesh(parse_target("h100:8"), ("data",), (8,))
    held = {}
    for waits in (False, True):
        compiled = gathering(graph, mesh, waits).lower(*args).compile(compiler_options={"xla_gpu_autotune_level": 0})
        held[waits] = compiled.memory_analysis().temp_size_in_bytes
    copy = 4 * width * width
    assert held[True] < 2 * copy < held[False]


@pytest.mark.parametrize("transposed", [False, True])
def test_gathers_that_wait_change_no_value(transposed: bool) -> None:
    graph, args = chain(16, 3, transposed)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    values = [random.normal(size=a.shape).astype("float32") for a in args]
    early, late = (gathering(graph, mesh, waits)(*values)[0] for waits in (False, True))
    np.testing.assert_array_equal(np.asarray(early), np.asarray(late))


GROUPED = (128, 48, 48, 128)


@jax.custom_vjp
def grouped(x: Any, kernel: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", (1, 1), (1, 1), numbers, 4)


def grouped_backward(kept: Any, gradient: Any) -> Any:
    """A gradient of one product per position of the kernel, each of another piece of the image."""
    x, kernel = kept
    (n, h, w, _), taps = x.shape, kernel.shape[:2]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    by_group = gradient.reshape(n, h, w, 4, -1)
    pieces = [padded[:, i : i + h, j : j + w].reshape(n, h, w, 4, -1) for i, j in np.ndindex(*taps)]
    products = [jnp.einsum("nhwgc,nhwgo->cgo", piece, by_group) for piece in pieces]
    image = jax.vjp(lambda x: grouped.fun(x, kernel), x)[1](gradient)[0]
    return image, jnp.stack(products).reshape(kernel.shape)


grouped.defvjp(lambda x, kernel: (grouped.fun(x, kernel), (x, kernel)), grouped_backward)


def grouped_step(kernels: Any, x: Any) -> Any:
    """One step of three grouped convolutions with gradients of pieces."""

    def loss(kernels: Any) -> Any:
        y = x
        for k in kernels:
            y = jnp.tanh(grouped(y, k))
        return jnp.sum(y.astype("float32") ** 2)

    return [k - 1e-3 * g for k, g in zip(kernels, jax.grad(loss)(kernels), strict=True)]


def grouped_program(target: str, shape: tuple[int, ...]) -> Any:
    kernels = [jax.ShapeDtypeStruct((3, 3, shape[-1] // 4, shape[-1]), "bfloat16")] * 3
    args = kernels, jax.ShapeDtypeStruct(shape, "bfloat16")
    names = [f"a{i}" for i in range(4)]
    graph = insert_hubs(build_graph(jax.make_jaxpr(grouped_step)(*args), argument_paths=names, result_paths=names[:3]))
    mesh = compile_only_mesh(parse_target(target), ("data",), (8,))
    layouts = {
        (op.id, j): (0,) if graph.tensors[t].shape[:1] == shape[:1] else (-1,)
        for op in graph.ops
        for j, t in enumerate(op.outputs)
    }
    run = planned_function(graph, Decisions(results=layouts), mesh, ("data",))
    whole, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(run, in_shardings=(whole, whole, whole, by_row)).lower(*kernels, args[1]).compile()


@pytest.mark.slow
@needs_tpu
@pytest.mark.tpu
def test_pieces_of_activations_are_not_made_in_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PLATFORMS", frozenset())  # gradients in their place alone have the same effect here
    held = {}
    for platforms in (frozenset(), ties.PIECES_LATE):
        monkeypatch.setattr(ties, "PIECES_LATE", platforms)
        held[bool(platforms)] = grouped_program("tpu-v5e:2x4", GROUPED).memory_analysis().temp_size_in_bytes
    image = 2 * math.prod(GROUPED) // 8
    assert held[True] < held[False] - 5 * image, held


def test_waiting_with_pieces_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (8, 8, 8, 16)
    rng = np.random.default_rng(0)
    found = []
    for platforms in (frozenset(), frozenset({"cpu"})):
        monkeypatch.setattr(ties, "PIECES_LATE", platforms)
        monkeypatch.setattr(ties, "MIN_COPY_BYTES", 0)
        program = grouped_program("cpu:8", shape)
        args = [np.full((3, 3, 4, 16), 0.1, jnp.bfloat16)] * 3 + [rng.normal(size=shape).astype(jnp.bfloat16)]
        rng = np.random.default_rng(0)
        found.append([np.asarray(v) for v in program(*map(jax.device_put, args, program.input_shardings[0]))])
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_what_divides_is_even_partial_sums_or_not() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for spec, shape, even in (
        (PartitionSpec("data", "model"), (4, 8), True),
        (PartitionSpec(None, "model"), (4, 9), False),
        (PartitionSpec("data", None, "model"), (3, 8), True),  # partial sums over "data", in front
        (PartitionSpec("data", None, "model"), (4, 9), False),
    ):
        assert ties.is_even(NamedSharding(mesh, spec), shape) == even
