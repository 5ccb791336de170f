"""Gradients of biases that XLA:GPU sums up whole, where the plan would cut what they are sums over.

A cotangent that is computed elementwise is written for the products that read it. A sum over a part of it costs less
than one over all of it, so a plan may cut it for the sum. XLA:GPU then computes that part anew from what the cotangent
is made of (the cotangent behind an activation function, and the function's mask), and so holds these as well, though
the written one was to take their place: 168 of 983 MB for layers of width 8192 on 8 H100s. A sum over all of it reads
what is written, for microseconds more, and its result is cut instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard_ilp.costs.primitives import PRODUCTS, VIEWS, fusible
from autoshard_ilp.enforce.cuts import is_cut
from autoshard_ilp.enforce.order import sums_put_off
from autoshard_ilp.enforce.repeated import Places
from autoshard_ilp.graph import Graph
from autoshard_ilp.sharding import WHOLE

PLATFORMS = frozenset({"gpu"})
"""Whose compilers compute a part anew."""


def sums_of_the_whole(
    graph: Graph, operands: Places, results: Places, axis_sizes: Sequence[int], platform: str
) -> tuple[Places, Places]:
    """Decided layouts with every such sum taken over what is written.

    Args:
        graph: of the step, hubs included.
        operands, results: the decided layouts.
        axis_sizes: devices along each mesh axis.
        platform: of the mesh's devices.

    Returns:
        Layouts of operands and results.
    """
    if platform not in PLATFORMS:
        return operands, results
    operands, results = dict(operands), dict(results)
    for op in sums_put_off(graph):
        t = graph.tensors[op.inputs[0]]
        source = graph.tensors[graph.behind(t.id, ("hub",))]
        if t.producer is None or source.producer is None:
            continue
        made, now = graph.ops[source.producer], results.get((t.producer, t.result_index))
        read, summed = operands.get((op.id, 0)), results.get((op.id, 0))
        if now is None or read is None or summed is None or not is_cut(now, read, t.shape, axis_sizes):
            continue
        cut = [k for k, (a, b) in enumerate(zip(now, read, strict=True)) if a != b]
        multiplied = any(r.primitive in PRODUCTS for r in graph.readers(source.id))
        written = fusible(made) and made.primitive not in VIEWS and multiplied
        if written and not any(read[k] in op.params["axes"] for k in cut):
            operands[op.id, 0] = now
            results[op.id, 0] = tuple(WHOLE if k in cut else dim for k, dim in enumerate(summed))
    return operands, results
