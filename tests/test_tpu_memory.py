"""What XLA:TPU does with memory: tiles, casts in kernels, padded gradients, copies held for long, loops."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.costs.tpu.carried import count_gathers_twice, count_twice
from autoshard_ilp.costs.tpu.heap import REPORTED
from autoshard_ilp.costs.tpu.hoisted import hoisted_casts, never_wide
from autoshard_ilp.costs.tpu.tiles import of_batched_products, padding, through_convolutions, tiled_bytes
from autoshard_ilp.costs.written import packed_bytes
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program
from autoshard_ilp.verify import compile_only_mesh
from compiled import needs_tpu

MIB = 2**20


@pytest.mark.parametrize(
    ("shape", "fastest", "expected"),
    [
        ((1024, 8192), (), 1.0),
        ((8, 1024, 50257), (), 1.0),  # the odd dimension need not be among the two
        ((4, 12, 197, 197), (), 256 / 197),  # tokens, and rows of four images
        ((32, 112, 112, 32), (0, 3), 4.0),  # seen: bf16[32,112,112,32]{3,0,2,1:T(8,128)(2,1)} of 102.8 MB
        ((32, 112, 112, 16), (0, 3), 4.0),  # seen: {0,3,2,1}, 51.4 MB
        ((32, 56, 56, 144), (0, 3), 256 / 144),  # seen: {3,0,2,1}, 51.4 MB
        ((32, 224, 224, 3), (0, 3), 128 / 32 * 4 / 3),  # seen: {0,3,2,1:T(4,128)(2,1)}, 51.4 MB
        ((32, 224, 224, 3), (), 256 / 224),  # an argument: 22.0 MB of float32
        ((7,), (), 1.0),
        ((0, 5), (), 1.0),
    ],
)
def test_tiles(shape: tuple[int, ...], fastest: tuple[int, ...], expected: float) -> None:
    assert padding(shape, fastest) == pytest.approx(expected)


def test_shards_are_padded_not_the_whole() -> None:
    assert tiled_bytes((256, 112, 112, 32), 2.0, (0,), (8,), (0, 3)) == 4 * 32 * 112 * 112 * 32 * 2
    assert tiled_bytes((256, 128), 4.0, (0,), (8,)) == 32 * 128 * 4


def plan_of(build: Any, mesh: dict[str, int], hardware: Any, **options: Any) -> Any:
    return autoshard.optimize(build, mesh, hardware=hardware, progress=False, **options)


def test_images_are_tiled_by_batch_and_channels() -> None:
    import keras

    def build() -> Any:
        conv = [keras.layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(2)]
        net = keras.Sequential([keras.Input((64, 64, 16)), *conv, keras.layers.GlobalAveragePooling2D()])
        net.compile(optimizer="sgd", loss="mse")
        return net

    def largest(hardware: str) -> int:
        plan = plan_of(build, {"data": 4}, hardware, batch_size=64, mode="predict")
        built = plan.trail.built
        held = [
            n.bytes[c]
            for n, c in zip(built.program.nodes, plan.trail.solution.choices, strict=True)
            if n.bytes is not None
        ]
        return max(held)

    assert through_convolutions(plan_of(build, {"data": 4}, "tpu-v5p", batch_size=64).trail.graph)
    # 16 images and 32 channels per device: 128 x 16 instead of 32 x 16
    assert largest("tpu-v5p") == 4 * largest("h100")


def wide(n: int = 2, units: int = 2048) -> Any:
    import keras

    def build() -> Any:
        dense = [keras.layers.Dense(units, "relu", dtype="mixed_bfloat16") for _ in range(n)]
        net = keras.Sequential([keras.Input((units,)), *dense])
        net.compile(optimizer="sgd", loss="mse")
        return net

    return build


def test_casts_of_weights_are_not_written() -> None:
    """Both products of a layer read the float32 weight and cast it in their kernels; on GPUs the cast is written."""
    for hardware, written in (("tpu-v5e", 0), ("tpu-v5p", 0), ("h100", 2)):
        plan = plan_of(wide(3), {"data": 4}, hardware, batch_size=256)
        graph, stored = plan.trail.graph, plan.trail.costs.buffers.stored
        casts = [
            op
            for op in graph.ops
            if op.primitive == "convert_element_type"
            and op.phase == "forward"
            and graph.tensors[op.outputs[0]].shape == (2048, 2048)
            and stored[op.outputs[0]]
        ]
        assert len(casts) >= written if written else not casts


def test_what_is_gathered_once_is_held_though_its_source_is_in_no_memory() -> None:
    """A cast weight has no buffer on TPU; its gathered copy that the backward pass reuses has one."""
    plan = plan_of(wide(3), {"data": 8}, "tpu-v5p", batch_size=8192, pins={r".*kernel": ("data", None)})
    held = [c for c in plan.collectives if c.kind == "all-gather" and "kernel" in c.tensor]
    built, horizon = plan.trail.built, plan.trail.costs.buffers.horizon
    from autoshard_ilp.report import held_bytes

    lt, choices = built.program.lifetimes, plan.trail.solution.choices
    holes = 1 + REPORTED * autoshard.profile("tpu-v5p").heap_loss_share
    long = [
        i
        for i in range(len(lt.owner))
        if built.categories[i] == "gathered"
        and held_bytes(built, i, choices) == math.ceil(2048 * 2048 * 2 * holes)
        and lt.end[i] - lt.start[i] > horizon // 8
    ]
    once = [c for c in held if c.count == 1]
    assert once
    assert len(long) >= 1


def test_the_gradient_of_a_slice_is_written_once_for_several_kernels() -> None:
    import keras

    def build() -> Any:
        x = inputs = keras.Input((64, 128))
        x = keras.layers.LayerNormalization()(keras.layers.Dense(128)(x))
        net = keras.Model(inputs, keras.layers.Dense(8)(x[:, 0, :]))
        net.compile(optimizer="sgd", loss="mse")
        return net

    for hardware, written in (("tpu-v5e", True), ("h100", False)):
        plan = plan_of(build, {"data": 2}, hardware, batch_size=64)
        graph, stored = plan.trail.graph, plan.trail.costs.buffers.stored
        pads = [op for op in graph.ops if op.primitive == "pad"]
        assert pads
        chain, found = list(pads), False
        for op in chain:
            found |= bool(stored[op.outputs[0]])
            readers = {c for c, _ in graph.tensors[op.outputs[0]].consumers}
            chain += [graph.ops[r] for r in readers if graph.ops[r].outputs and len(chain) < 4]
        assert found or not written


@pytest.mark.parametrize(("groups", "written"), [(1, 0), (128, 3)])
def test_the_padding_of_convolutions_is_not_written(groups: int, written: int) -> None:
    """Seen for a WaveNet: f32[16,4096,128] but no f32[16,4352,128], though the padded array has two readers. But the
    padding of depthwise convolutions is: bf16[32,113,113,96] of MobileNet-V2."""
    import keras

    def build() -> Any:
        layers = [keras.layers.Conv1D(128, 2, padding="causal", activation="tanh", groups=groups) for _ in range(3)]
        net = keras.Sequential([keras.Input((256, 128)), *layers])
        net.compile(optimizer="sgd", loss="mse")
        return net

    plan = plan_of(build, {"data": 2}, "tpu-v5e", batch_size=64)
    graph, stored = plan.trail.graph, plan.trail.costs.buffers.stored
    pads = [op for op in graph.ops if op.primitive == "pad" and op.phase == "forward"]
    assert len(pads) == 3
    assert sum(bool(stored[op.outputs[0]]) for op in pads) == written


def program(rows: list[tuple[int, int, int]], horizon: int) -> Program:
    """One node per (bytes, start, end); an argument of 10 bytes that stays."""
    rows = [*rows, (10, 0, horizon)]
    nodes = tuple(Node(str(i), np.zeros(1), np.array([b])) for i, (b, _, _) in enumerate(rows))
    start, end = (np.array([r[k] for r in rows]) for k in (1, 2))
    return Program(nodes, (), Lifetimes(np.zeros(len(rows), bool), np.arange(len(rows)), start, end))


def test_what_loops_stack_up_is_counted_twice() -> None:
    """Two loops and a backward one, as compiled: 2 H - N, and the argument once."""
    first, second, back = (134, 1, 20), (134, 6, 16), (67, 12, 20)
    found, categories, labels = count_twice(
        program([first, second, back], 22), ["activations"] * 4, ["a"] * 4, [0, 1, 2], 22
    )
    peak = found.peak([0, 0, 0, 0])
    heap, known = 134 + 134 + 67, 134
    assert peak == 10 + 2 * heap - known
    assert len(categories) == len(labels) == len(found.lifetimes.owner)


def scanned(x: Any, w: Any, v: Any) -> Any:
    """Gradients of four layers."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            w, v = weights
            return x + jnp.tanh(x @ w) @ v, None

        return jnp.square(jax.lax.scan(layer, x, weights)[0].astype("float32")).mean()

    return jax.grad(loss)((w, v))


@needs_tpu
@pytest.mark.parametrize("batch", [16384, pytest.param(65536, marks=pytest.mark.slow)])
def test_what_a_loop_stacks_up_has_no_buffer_of_its_own(batch: int) -> None:
    """Activations of four layers are written straight into their stacks, and passed on in vector memory."""
    import jax

    shapes = ((batch, 1024), "bfloat16"), ((4, 1024, 8192), "bfloat16"), ((4, 8192, 1024), "bfloat16")
    args = tuple(jax.ShapeDtypeStruct(*s) for s in shapes)
    pins = {"args/0": ("data",), "args/1": (), "args/2": ()}
    plan = autoshard.optimize_fn(scanned, args, {"data": 8}, hardware="tpu-v5e", pins=pins, progress=False)
    found = plan.verify("tpu-v5e:2x4")
    assert found.compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.1)


@needs_tpu
@pytest.mark.tpu
def test_stacks_of_matrices_are_not_tiled_along_the_loop() -> None:
    """A recurrence of matrices with 64 columns: every entry of its stacks is padded to 128."""
    import jax
    import jax.numpy as jnp

    def loss(decay: Any, keys: Any) -> Any:
        def step(state: Any, now: Any) -> Any:
            decay, key = now
            state = decay[..., None] * state + key[..., None] * key[..., None, :]
            return state, jnp.tanh(state).sum(-1)

        start = jnp.zeros((*keys.shape[1:], keys.shape[-1]))
        return jnp.square(jax.lax.scan(step, start, (decay, keys))[1]).mean()

    args = (jax.ShapeDtypeStruct((128, 32, 8, 64), "float32"),) * 2
    pins = {"args/0": (None, "data"), "args/1": (None, "data")}
    plan = autoshard.optimize_fn(jax.grad(loss), args, {"data": 8}, hardware="tpu-v5e", pins=pins, progress=False)
    found = plan.verify("tpu-v5e:2x4")
    stack = 128 * 4 * 8 * 64 * 128 * 4
    assert stack < found.compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.1)


def layers(remat: bool) -> Any:
    """Gradients of four scanned layers whose 32-bit weights are cast in the loop."""
    import jax
    import jax.numpy as jnp

    def layer(x: Any, weights: Any) -> Any:
        w, v = (part.astype("bfloat16") for part in weights)
        return x + jax.nn.relu(x @ w) @ v, None

    def loss(weights: Any, x: Any) -> Any:
        last, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)
        return jnp.square(last.astype("float32")).mean()

    return jax.grad(loss)


@pytest.mark.parametrize("remat", [False, True])
def test_casts_of_stacks_stand_before_the_loops(remat: bool) -> None:
    """One 16-bit stack of each weight, from the first loop to the end of the last."""
    import jax

    weights = jax.ShapeDtypeStruct((4, 512, 2048), "float32"), jax.ShapeDtypeStruct((4, 2048, 512), "float32")
    args = (weights, jax.ShapeDtypeStruct((4096, 512), "bfloat16"))
    pins = {"args/0/.*": (), "args/1": ("data",)}
    plan = autoshard.optimize_fn(layers(remat), args, {"data": 8}, hardware="tpu-v5e", pins=pins, progress=False)
    graph, buffers = plan.trail.costs.graph, plan.trail.costs.buffers
    found = hoisted_casts(graph, buffers)
    stacks = {cast.stack for cast in found.values()}
    assert {graph.tensors[t].shape for t in stacks} == {w.shape for w in weights}
    assert {cast.itemsize for cast in found.values()} == {2.0}
    for t in stacks:
        mine = sorted((cast.start, cast.end) for cast in found.values() if cast.stack == t)
        assert len(mine) == (2 if remat else 1), "what is not recomputed leaves its cast to the backward loop"
        assert mine[0][1] >= mine[-1][0], "held from one to the next"


def test_slices_that_are_also_read_as_they_are_are_cast_in_the_loop() -> None:
    import jax
    import jax.numpy as jnp

    def step(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w.astype("bfloat16") * jnp.square(w).sum().astype(x.dtype), None), x, w)[
            0
        ]

    args = jax.ShapeDtypeStruct((4, 512, 512), "float32"), jax.ShapeDtypeStruct((4096, 512), "bfloat16")
    plan = autoshard.optimize_fn(step, args, {"data": 8}, hardware="tpu-v5e", progress=False)
    assert not hoisted_casts(plan.trail.costs.graph, plan.trail.costs.buffers)


def test_stacks_that_are_computed_for_loops_that_cast_them_are_held_as_these_read_them() -> None:
    import jax

    def step(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w.astype("bfloat16"), None), x, 2 * w + 1)[0]

    args = jax.ShapeDtypeStruct((4, 2048, 2048), "float32"), jax.ShapeDtypeStruct((2048, 2048), "bfloat16")
    plan = autoshard.optimize_fn(step, args, {"data": 1}, hardware="tpu-v5e", progress=False)
    graph = plan.trail.costs.graph
    (stack,) = never_wide(graph, hoisted_casts(graph, plan.trail.costs.buffers))
    assert graph.ops[graph.tensors[stack].producer].primitive == "add"


@needs_tpu
@pytest.mark.tpu
@pytest.mark.slow
def test_the_tpu_compiler_casts_stacks_before_the_loop() -> None:
    import jax

    weights = jax.ShapeDtypeStruct((4, 2048, 8192), "float32"), jax.ShapeDtypeStruct((4, 8192, 2048), "float32")
    args = (weights, jax.ShapeDtypeStruct((16384, 2048), "bfloat16"))
    pins = {"args/0/.*": (), "args/1": ("data",)}
    plan = autoshard.optimize_fn(
        layers(True), args, {"data": 8}, hardware="tpu-v5e", pins=pins, progress=False, donate_argnums=()
    )
    found = plan.verify("tpu-v5e:2x4")
    assert found.compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.1)
    assert found.compiled_peak_bytes > plan.memory.inputs + 2 * 4 * 2048 * 8192 * 2


@pytest.mark.slow
@needs_tpu
@pytest.mark.tpu
def test_what_is_gathered_into_a_donated_weight_costs_no_copies() -> None:
    """Whole weights, updated in shards: without a kernel of ours each is copied at both ends of the step."""
    import jax
    import jax.numpy as jnp

    def step(weights: Any, slots: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w, v in weights:
                y = y + jax.nn.relu(y @ w.astype("bfloat16")) @ v.astype("bfloat16")
            return jnp.square(y.astype("float32")).mean()

        slots = jax.tree.map(lambda m, g: 0.9 * m + g, slots, jax.grad(loss)(weights))
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, slots), slots

    shapes = (2048, 8192), (8192, 2048)
    weights = [tuple(jax.ShapeDtypeStruct(s, "float32") for s in shapes) for _ in range(4)]
    args = (weights, weights, jax.ShapeDtypeStruct((4096, 2048), "bfloat16"))
    pins = {"args/0/.*": (), "args/1/.*": (None, "data"), "args/2": ("data",)}
    plan = autoshard.optimize_fn(
        step, args, {"data": 8}, hardware="tpu-v5e", pins=pins, progress=False, donate_argnums=(0, 1)
    )
    mesh = compile_only_mesh("tpu-v5e:2x4", ("data",), (8,))
    text = plan.jit(mesh).lower(*plan.abstract_args(mesh)).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert "all-gather" in entry
    copied = re.findall(r"= f32\[(?:2048,8192|8192,2048)\]\S* copy\(", entry)
    assert not copied
    assert plan.memory.gathered >= 8 * 2048 * 8192 * 4, "in flight at the end of the step"


def test_batches_of_products_lie_along_no_tile() -> None:
    """Windows of 64 tokens pad scores, queries, keys and values; whole sequences of 256 do not."""
    import jax
    import jax.numpy as jnp

    def padded(tokens: int) -> set[float]:
        def attend(x: Any, w: Any) -> Any:
            q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 24, 32), 3, 2)
            scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k), -1)
            return jnp.einsum("bhts,bshk->bthk", scores, v)

        args = jax.ShapeDtypeStruct((1024, tokens, 256), "float32"), jax.ShapeDtypeStruct((256, 768), "float32")
        graph = autoshard.optimize_fn(attend, args, {"data": 8}, hardware="tpu-v5e", progress=False).trail.costs.graph
        return {padding(graph.tensors[t].shape, dims) for t, dims in of_batched_products(graph).items()}

    assert padded(64) == {2.0}
    assert padded(256) == {1.0}


@pytest.mark.parametrize(("hardware", "expected"), [("h100", 3), ("tpu-v5e", 2)])
def test_a_stencil_in_a_loop_has_places_of_its_own(hardware: str, expected: int) -> None:
    """The argument, which is not donated, and what the loop carries. On a GPU its next value is beside it; on a TPU it
    is in vector memory."""
    import jax
    import jax.numpy as jnp

    def heat(u: Any) -> Any:
        def step(u: Any, _: Any) -> Any:
            p = jnp.pad(u, 1)
            return u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u), None

        return jax.lax.scan(step, u, None, 10)[0]

    args = (jax.ShapeDtypeStruct((4096, 4096), "float32"),)
    pins = {"args/0": ()}
    plan = autoshard.optimize_fn(heat, args, {"data": 8}, hardware=hardware, pins=pins, progress=False)
    assert plan.memory.peak_bytes == pytest.approx(expected * 4096 * 4096 * 4, rel=0.01)


@pytest.mark.parametrize("moved", [True, False])
def test_only_what_is_moved_needs_a_place_beside_the_carry(moved: bool) -> None:
    import jax
    import jax.numpy as jnp

    def step(x: Any) -> Any:
        body = (lambda c, _: (jnp.flip(c, 0) + 1, None)) if moved else (lambda c, _: (jnp.tanh(c) + 1, None))
        return jax.lax.scan(body, x, None, 3)[0]

    args = (jax.ShapeDtypeStruct((4096, 4096), "float32"),)
    plan = autoshard.optimize_fn(step, args, {"data": 1}, hardware="h100", progress=False)
    assert plan.memory.peak_bytes == pytest.approx((3 if moved else 2) * 4096 * 4096 * 4, rel=0.01)


def test_one_loop_and_steps_without_are_counted_once() -> None:
    plain = program([(100, 1, 8), (50, 3, 5)], 10)
    names = ["activations"] * 3
    assert count_twice(plain, names, names, [], 10)[0] is plain
    assert count_twice(plain, names, names, [0], 10)[0].peak([0, 0, 0]) <= 10 + 100 + 2 * 50


def test_an_instant_is_never_counted_less_than_it_holds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = []
        for _ in range(8):
            a, b = sorted(rng.choice(20, 2, replace=False))
            rows.append((int(rng.integers(1, 50)), int(a), int(b)))
        p = program(rows, 22)
        names = ["activations"] * 9
        q = count_twice(p, names, names, [0, 3, 5], 22)[0]
        choices = [0] * 9
        assert (q.usage_over_time(choices) >= p.usage_over_time(choices)).all()
        assert q.peak(choices) <= 2 * p.peak(choices)


def labelled(vocabulary: int = 1000, width: int = 64, **dense: Any) -> Any:
    """Builder of a language model without attention, with its accuracy."""
    import keras

    def build() -> Any:
        inputs = keras.Input((16,), dtype="int32")
        x = keras.layers.Dense(vocabulary, **dense)(keras.layers.Embedding(64, width)(inputs))
        net = keras.Model(inputs, x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(optimizer="sgd", loss=loss, metrics=["accuracy"])
        return net

    return build


@pytest.mark.parametrize(("growth", "written"), [(32, 3), (128, 0)])
def test_what_is_joined_off_lanes_is_written_once_for_several_kernels(growth: int, written: int) -> None:
    """Layers of a DenseNet: XLA:TPU writes what they join, but where every part fills its lanes."""
    import keras
    from keras import layers

    from autoshard_ilp.costs.memory import analyse
    from autoshard_ilp.graph.step import trace_step
    from autoshard_ilp.mesh import as_mesh

    x = inputs = keras.Input((8, 8, 128))
    for _ in range(3):
        y = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.Concatenate()([x, layers.Conv2D(growth, 3, padding="same")(y)])
    out = layers.GlobalAveragePooling2D()(layers.Activation("relu")(layers.BatchNormalization()(x)))
    model = keras.Model(inputs, out)
    model.compile(optimizer="sgd", loss="mse")
    graph = trace_step(model, as_mesh({"data": 8}), batch_size=64)[0].graph
    joined = [op.outputs[0] for op in graph.ops if op.primitive == "concatenate" and op.phase == "forward"]
    assert len(joined) == 3
    assert sum(bool(analyse(graph, "tpu").stored[t]) for t in joined) == written


def test_masks_of_an_accuracy_are_written_but_not_one_hot_labels() -> None:
    """Keras's argmax looks for negative zeros, ours for what is no number: a bit per logit, before backward."""
    for hardware, written in (("tpu-v5e", {"eq", "ne", "convert_element_type"}), ("h100", {"and"})):
        plan = plan_of(labelled(), {"data": 2}, hardware, batch_size=64)
        graph, buffers = plan.trail.graph, plan.trail.costs.buffers
        masks = [t for t in graph.tensors if t.shape == (64, 16, 1000) and t.dtype == "bool" and buffers.stored[t.id]]
        products = [op for op in graph.ops if (op.primitive, op.phase) == ("dot_general", "backward")]
        backward = min(int(buffers.time[op.id]) for op in products)
        assert {graph.ops[t.producer].primitive for t in masks if t.producer is not None} == written
        assert all(graph.ops[t.producer].phase == "update" for t in masks if t.producer is not None)
        assert all(buffers.end[t.id] <= backward for t in masks)


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ((2, 1024, 50257), 1024 * 50257),  # seen: u8[1024,50257]
        ((8, 512, 32768), 512 * 32768),  # seen: u8[512,32768]
        ((16, 197, 3072), 2 * 197 * 3072),  # seen: u16[197,3072]
        ((), 0),
    ],
)
def test_masks_share_bytes_along_their_first_dimension(local: tuple[int, ...], expected: int) -> None:
    assert packed_bytes(local) == expected


def pictures(policy: str) -> Any:
    """Builder of a network whose convolutions read images of three channels."""
    import keras

    def build() -> Any:
        conv = keras.layers.Conv2D(128, 8, strides=4, padding="same", activation="relu", dtype=policy)
        layers = [keras.Input((128, 128, 3)), conv, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
        net = keras.Sequential(layers)
        net.compile(optimizer="sgd", loss="mse")
        return net

    return build


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_images_are_copied_for_convolutions_and_kept_for_their_gradient(policy: str) -> None:
    """Seen: bf16[32,256,256,3]{0,3,2,1:T(4,128)(2,1)}, from before the first convolution to its kernel's gradient."""
    profile = replace(autoshard.profile("tpu-v5e"), heap_loss_share=0.0)
    plan = plan_of(pictures(policy), {"data": 8}, profile, batch_size=256)
    graph, buffers, built = plan.trail.graph, plan.trail.costs.buffers, plan.trail.built
    convolutions = [int(buffers.time[op.id]) for op in graph.ops if op.primitive == "conv_general_dilated"]
    copied = 128 * 128 * (128 * 4) * 2  # 32 images fill 128 lanes, three channels four rows, of 16 bits
    from autoshard_ilp.report import held_bytes

    lt, choices = built.program.lifetimes, plan.trail.solution.choices
    spans = [
        (int(lt.start[i]), int(lt.end[i])) for i in range(len(lt.owner)) if held_bytes(built, i, choices) == copied
    ]
    assert (convolutions[0], convolutions[-1] + 1) in spans
    assert len(convolutions) == 2


def test_what_is_gathered_ahead_into_device_memory_is_counted_twice() -> None:
    """Seen for GPT-2's table of 77 MB, not for its other weights of 5 MB: those are gathered into vector memory."""
    nodes = tuple(Node(n, np.zeros(2), None) for n in "ab")
    edge = Edge(0, 1, np.arange(2), np.arange(2), np.zeros((2, 2)), np.array([[0, 80], [80, 20]]))
    lifetimes = Lifetimes(np.array([True, True]), np.zeros(2, int), np.array([1, 3]), np.array([3, 5]))
    program, names = Program(nodes, (edge,), lifetimes), ["gathered"] * 2
    twice, categories, _ = count_gathers_twice(program, names, names, [0], 100)
    assert categories == ("gathered",) * 3
    for choices, expected in (((0, 0), 0), ((0, 1), 160), ((1, 1), 20)):
        assert twice.peak(choices) == expected
        assert twice.usage_over_time(choices)[3] == program.usage_over_time(choices)[3]
    assert count_gathers_twice(program, names, names, [0], 0)[0] is program


def test_a_residual_sum_is_written_whatever_small_vectors_it_reads() -> None:
    """Two normalised convolutions: eight vectors come before them among what a kernel would read again."""
    import keras

    def build() -> Any:
        x = inputs = keras.Input((32, 32, 128))
        for _ in range(2):
            a, b = (keras.layers.BatchNormalization()(keras.layers.Conv2D(128, 1)(x)) for _ in range(2))
            x = keras.layers.ReLU()(a + b)
        net = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
        net.compile(optimizer="sgd", loss="mse")
        return net

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plan = plan_of(build, {"data": 2}, "tpu-v5p", batch_size=256, mode="predict")
    finally:
        keras.config.set_dtype_policy("float32")
    graph, stored = plan.trail.graph, plan.trail.costs.buffers.stored
    written = [t for t in graph.tensors if t.shape == (256, 32, 32, 128) and stored[t.id] and t.producer is not None]
    kinds = [graph.ops[t.producer].primitive for t in written]
    assert kinds.count("conv_general_dilated") == 4
    assert len(kinds) >= 6  # and the input, and the first sum


@pytest.mark.parametrize(("hardware", "scores", "wide"), [("tpu-v5e", 1, 1), ("tpu-v5p", 2, 2)])
def test_softmaxes_and_error_functions_are_written_on_v5p(hardware: str, scores: int, wide: int) -> None:
    """Seen on v5p for four transformer layers: bf16[4,16,512,512] beside the scores, bf16[4,512,4096] beside what it is
    made of. XLA:TPU computes both in the products' kernels on v5e."""
    import keras

    def build() -> Any:
        kept = {"dtype": "mixed_bfloat16"}
        x = inputs = keras.Input((64, 128))
        x = keras.layers.Add(**kept)([x, keras.layers.MultiHeadAttention(4, 32, **kept)(x, x)])
        x = keras.layers.Dense(128, **kept)(keras.layers.Dense(512, "gelu", **kept)(x))
        net = keras.Model(inputs, x)
        net.compile(optimizer="sgd", loss="mse")
        return net

    plan = plan_of(build, {"data": 2}, hardware, batch_size=256)
    graph, stored = plan.trail.graph, plan.trail.costs.buffers.stored

    def written(size: int) -> int:
        made = [t for t in graph.tensors if stored[t.id] and t.producer is not None and int(np.prod(t.shape)) == size]
        return len([t for t in made if graph.ops[t.producer].phase == "forward"])

    assert (written(256 * 4 * 64 * 64), written(256 * 64 * 512)) == (scores, wide)


@needs_tpu
@pytest.mark.tpu
@pytest.mark.slow
def test_the_tpu_compiler_copies_images_into_tiles_of_batch_and_channels() -> None:
    """What is counted for a convolution's image: 16 bits, with batch and channels varying fastest."""
    import jax

    shape, sizes = (128, 64, 64, 3), (4,)

    def loss(kernel: Any, image: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(image.astype("bfloat16"), kernel, (2, 2), "SAME", dimension_numbers=numbers)
        return (jax.nn.relu(made).astype("float32") ** 2).mean()

    mesh = compile_only_mesh("tpu-v5e:2x2", ("data",), sizes)
    whole, rows = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in ((), ("data",)))
    args = [
        jax.ShapeDtypeStruct((4, 4, 3, 128), "bfloat16", sharding=whole),
        jax.ShapeDtypeStruct(shape, "float32", sharding=rows),
    ]
    text = jax.jit(jax.value_and_grad(loss)).lower(*args).compile().as_text()
    found = re.findall(r" = bf16\[32,64,64,3\]\{([\d,]+):T\((\d+),(\d+)\)", text)
    sizes_seen = set()
    for order, *tile in found:
        padded = [32, 64, 64, 3]
        for dim, part in zip(map(int, order.split(",")[:2]), map(int, reversed(tile)), strict=True):
            padded[dim] = -(-padded[dim] // part) * part
        sizes_seen.add(math.prod(padded) * 2)
    assert tiled_bytes(shape, 2.0, (0,), sizes, (0, 3)) in sizes_seen, "the copy that is counted"


@pytest.mark.slow
@needs_tpu
@pytest.mark.tpu
def test_depthwise_gradients_are_computed_device_by_device() -> None:
    """One convolution each, as planned: no gather of pieces of padded images, and not 49 of them held at once."""
    import keras

    def build() -> Any:
        kept = {"dtype": "mixed_bfloat16"}
        x = inputs = keras.Input((32, 32, 96))
        for _ in range(2):
            h = keras.layers.DepthwiseConv2D(7, padding="same", **kept)(x)
            x = keras.layers.Add(**kept)([x, keras.layers.Dense(96, **kept)(h)])
        net = keras.Model(inputs, keras.layers.Dense(8, **kept)(keras.layers.GlobalAveragePooling2D(**kept)(x)))
        net.compile(optimizer="sgd", loss="mse")
        return net

    plan = plan_of(build, {"data": 2, "model": 4}, "tpu-v5e", batch_size=256)
    found = plan.verify("tpu-v5e:2x4")
    assert found.predicted_bytes_per_device > 0
    assert found.unplanned_bytes_per_device == 0
    image = 32 * 32 * 32 * 128 * 2  # of one device: 32 examples, 96 channels in 128 lanes, 16 bits
    assert found.compiled_peak_bytes < plan.memory.inputs + 4 * image
