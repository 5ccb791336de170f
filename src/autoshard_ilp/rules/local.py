"""Primitives to run device by device, because XLA's own partitioning of them falls short of their rule.

Seen with jaxlib 0.10.2, by compiling each primitive alone with the shardings of its rule:

* The weight gradient of a convolution in groups (``batch_group_count > 1``), batch sharded over one of two mesh axes:
  XLA (CPU, GPU and TPU) adds the partial results over *all* devices, so the gradient is multiplied by the size of
  the other axis. This is a wrong result, not a slow one: see the tests.
* A convolution whose windows lie side by side (patches; 1x1, stride 2), an image dimension sharded over one mesh axis
  and the output features over a larger or equal one: XLA adds the results over the second axis, where they are the
  same, and returns a multiple of the right value. Wrong again, and silently: seen on CPU, and what is compiled for
  H100 and TPU v5e has the same all-reduce.
* Convolutions in groups of several features: XLA:CPU and XLA:GPU gather the whole input, whatever is sharded.
* ``top_k``, ``fft`` and the right-hand sides of ``triangular_solve``: XLA:CPU and XLA:GPU gather the batch dimensions.
* cuDNN's flash attention: jax's own partitioning refuses layouts that differ between queries, keys and values.
* Factorisations: XLA:TPU gathers batches of ``lu`` and synchronises the loops of ``eigh`` and ``svd``.

Under ``jax.shard_map`` each device runs the primitive on its own part, which is what the rule promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard_ilp.rules import attention
from autoshard_ilp.rules.linear_algebra import FACTORISATIONS
from autoshard_ilp.rules.rule import Dims, Kind, OpView, Rule
from autoshard_ilp.sharding import WHOLE, Layout

_ALWAYS = frozenset({"top_k", "approx_top_k", "fft", "triangular_solve", *FACTORISATIONS, *attention.PRIMITIVES})

Shape = tuple[int, ...]


def runs_locally(op: OpView, operand_layouts: Sequence[Layout | None] = ()) -> bool:
    """Whether a program must run this operation with :func:`run_locally` wherever it is sharded, or is sharded so."""
    if op.primitive == "conv_general_dilated":
        grouped = int(op.params["feature_group_count"]) > 1 or int(op.params["batch_group_count"]) > 1
        return grouped or _parts_of_images(op, operand_layouts)
    return op.primitive in _ALWAYS


def _parts_of_images(op: OpView, operand_layouts: Sequence[Layout | None]) -> bool:
    """Whether a convolution reads parts of images, by windows or strides of several elements."""
    spec, strides = op.params["dimension_numbers"], op.params["window_strides"]
    sharded = set(operand_layouts[0] or ()) if operand_layouts else set()
    windows = [op.in_shapes[1][d] for d in spec.rhs_spec[2:]]
    return any(
        d in sharded and (window > 1 or stride > 1)
        for d, window, stride in zip(spec.lhs_spec[2:], windows, strides, strict=True)
    )


def axes_of_factors(
    op: OpView,
    rule: Rule,
    operand_layouts: Sequence[Layout],
    axis_names: Sequence[str],
    axis_sizes: Sequence[int],
) -> dict[str, tuple[str, ...]] | None:
    """Which factors the layouts of an operation's operands shard, as :func:`run_locally` wants it.

    Args:
        op: the whole operation.
        rule: its rule.
        operand_layouts: the layout in which each operand is read.
        axis_names, axis_sizes: the mesh axis behind each entry of a layout, and its number of devices.

    Returns:
        Mesh axes, major to minor, of every sharded factor. None where the operation cannot run device by device: two
        operands disagree, a factor may not be sharded or is not major-most everywhere, or a dimension does not divide.
    """
    sides = [*zip(rule.operands, op.in_shapes, strict=True), *zip(rule.results, op.out_shapes, strict=True)]
    axes_of: dict[str, tuple[str, ...]] = {}
    shards: dict[str, int] = {}
    for axis, (name, size) in enumerate(zip(axis_names, axis_sizes, strict=True)):
        sharded = [(dims, layout[axis]) for dims, layout in zip(rule.operands, operand_layouts, strict=True)]
        factors = {dims[d][0] if dims[d] else "" for dims, d in sharded if d != WHOLE}
        if size == 1 or not factors:
            continue
        factor = factors.pop()
        if factors or not factor or not _may_shard(rule, factor):
            return None
        if any((d != WHOLE) != any(dim[:1] == (factor,) for dim in dims) for dims, d in sharded):
            return None
        axes_of[factor] = (*axes_of.get(factor, ()), name)
        shards[factor] = shards.get(factor, 1) * size
    for dims, shape in sides:
        leading = [dim[0] for dim in dims if dim and dim[0] in shards]
        inner = any(f in shards for dim in dims for f in dim[1:])
        uneven = any(n % shards.get(dim[0], 1) for dim, n in zip(dims, shape, strict=True) if dim)
        if inner or uneven or len(leading) != len(set(leading)):
            return None
    if any(rule.factors[f].size % n for f, n in shards.items()):
        return None
    return axes_of


def _may_shard(rule: Rule, factor: str) -> bool:
    kind = rule.factors[factor].kind
    return kind is Kind.PASS or (kind is Kind.REDUCTION and rule.factors[factor].combine == "add")


def local_params(op: OpView, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> dict[str, Any]:
    """The parameters with which one device runs an operation that :func:`runs_locally`.

    Args:
        op: the whole operation.
        in_shapes: shapes of one device's parts of the operands.
        out_shapes: shapes of one device's parts of the results.
    """
    params = dict(op.params)
    if op.primitive == "conv_general_dilated":
        spec = params["dimension_numbers"]
        lhs, rhs, out = in_shapes[0], in_shapes[1], out_shapes[0]
        params["feature_group_count"] = lhs[spec.lhs_spec[1]] // rhs[spec.rhs_spec[1]]
        params["batch_group_count"] = lhs[spec.lhs_spec[0]] // out[spec.out_spec[0]]
    return params


def run_locally(
    bind: Callable[..., Any],
    op: OpView,
    rule: Rule,
    operands: Sequence[Any],
    mesh: Any,
    axes_of: Mapping[str, tuple[str, ...]],
) -> list[Any]:
    """Run an operation device by device, partial results added up.

    Args:
        bind: the primitive's ``bind``.
        op: the whole operation.
        rule: its rule.
        operands: whole arrays or tracers.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
        axes_of: mesh axes, major to minor, of every sharded factor. These may pass or be an added-up reduction, must be
            major-most wherever they occur, and their sizes must be multiples of their number of shards.

    Returns:
        The whole results, sharded as the rule says; whole over the axes of reductions.
    """
    import jax
    from jax.sharding import PartitionSpec

    def spec(dims: Dims) -> Any:
        return PartitionSpec(*(axes_of.get(d[0]) if d else None for d in dims))

    partial = [axes for f, axes in axes_of.items() if rule.factors[f].kind is Kind.REDUCTION]
    sums = tuple(axis for axes in partial for axis in axes)
    shards = {f: math.prod(mesh.shape[axis] for axis in axes) for f, axes in axes_of.items()}

    def one_device(*parts: Any) -> list[Any]:
        out_shapes = [
            tuple(n // (shards.get(d[0], 1) if d else 1) for n, d in zip(shape, dims, strict=True))
            for shape, dims in zip(op.out_shapes, rule.results, strict=True)
        ]
        results = bind(*parts, **local_params(op, [part.shape for part in parts], out_shapes))
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        return [jax.lax.psum(r, sums) for r in results] if sums else results

    run = jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=tuple(spec(dims) for dims in rule.operands),
        out_specs=[spec(dims) for dims in rule.results],
        check_vma=False,
    )
    return list(run(*operands))
