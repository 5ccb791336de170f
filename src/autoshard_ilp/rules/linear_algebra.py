"""Matrix products, factorisations and Fourier transforms.

``dot_general`` of a batched matrix product: ``(b m k, b k n) -> (b m n) reduction={k}``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard_ilp.rules.builder import Builder, NoRule, arithmetic_weight, is_summable
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Dim, Kind, OpView, Rule


@register("dot_general")
def dot_general(op: OpView) -> Rule:
    """Batch dimensions pass, contracted ones are reductions; result: batch, free left, free right."""
    ((contract_l, contract_r), (batch_l, batch_r)) = op.params["dimension_numbers"]
    left, right = op.in_shapes
    b = Builder()
    lhs: list[Dim | None] = [None] * len(left)
    rhs: list[Dim | None] = [None] * len(right)
    for i, j in zip(batch_l, batch_r, strict=True):
        lhs[i] = rhs[j] = b.dim(left[i], stem="b")
    free_l = _fill(b, lhs, left, "m", skip=contract_l)
    kind = Kind.REDUCTION if is_summable(op.out_dtypes[0]) else Kind.REPLICATE
    for i, j in zip(contract_l, contract_r, strict=True):
        lhs[i] = rhs[j] = b.dim(left[i], kind, stem="k")
    free_r = _fill(b, rhs, right, "n")
    batch = [_known(lhs[i]) for i in batch_l]
    flops = 2.0 * math.prod(op.out_shapes[0]) * math.prod(left[i] for i in contract_l)
    return b.rule(
        [tuple(map(_known, lhs)), tuple(map(_known, rhs))],
        [(*batch, *free_l, *free_r)],
        flops * arithmetic_weight(op.out_dtypes[0]),
    )


@register("ragged_dot_general")
def ragged_dot_general(op: OpView) -> Rule:
    """A matrix product in groups along one ragged dimension, which stays whole, as do the groups.

    The ragged dimension is free (each row block meets its own matrix), contracted (one product per group, a group
    dimension in front of the result) or a batch dimension.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    ((contract_l, contract_r), (batch_l, batch_r)) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    group_dims = tuple(numbers.rhs_group_dimensions)
    left, right, sizes = op.in_shapes
    b = Builder()
    groups = b.dim(sizes[-1], Kind.REPLICATE, stem="g")
    lhs: list[Dim | None] = [None] * len(left)
    rhs: list[Dim | None] = [None] * len(right)

    def kind(i: int, otherwise: Kind) -> Kind:
        return Kind.REPLICATE if i == ragged else otherwise

    for i, j in zip(batch_l, batch_r, strict=True):
        lhs[i] = rhs[j] = b.dim(left[i], kind(i, Kind.PASS), stem="b")
    for i, j in zip(contract_l, contract_r, strict=True):
        lhs[i] = rhs[j] = b.dim(left[i], kind(i, Kind.REDUCTION), stem="k")
    free_l = []
    for i, size in enumerate(left):
        if lhs[i] is None:
            lhs[i] = b.dim(size, kind(i, Kind.PASS), stem="m")
            free_l.append(_known(lhs[i]))
    for j in group_dims:
        rhs[j] = groups
    free_r = _fill(b, rhs, right, "n")
    result = (*(_known(lhs[i]) for i in batch_l), *free_l, *free_r)
    if ragged in contract_l:
        result = (groups, *result)
    prefix = [*batch_l, *(i for i in range(len(left)) if i not in batch_l and i not in contract_l)]
    if ragged in contract_l:
        prefix = [*batch_l, *contract_l]
    shared = [_known(lhs[i]) for i in prefix[: prefix.index(ragged)]] if len(sizes) > 1 else []
    work = math.prod(left) * math.prod(
        right[j] for j in range(len(right)) if j not in (*contract_r, *batch_r, *group_dims)
    )
    return b.rule(
        [tuple(map(_known, lhs)), tuple(map(_known, rhs)), (*shared, groups)],
        [result],
        2.0 * work * arithmetic_weight(op.out_dtypes[0]),
    )


# Dimensions of one matrix or vector in the first operand, and floating point operations of one matrix of n columns,
# to leading order (Golub and Van Loan, Matrix Computations).
FACTORISATIONS: dict[str, tuple[int, float]] = {
    "cholesky": (2, 1 / 3),
    "cholesky_update": (2, 0.0),
    "eig": (2, 25.0),
    "eigh": (2, 9.0),
    "geqp3": (2, 4 / 3),
    "geqrf": (2, 4 / 3),
    "hessenberg": (2, 10 / 3),
    "householder_product": (2, 4 / 3),
    "lu": (2, 2 / 3),
    "lu_pivots_to_permutation": (1, 0.0),
    "ormqr": (2, 2.0),
    "qr": (2, 8 / 3),
    "schur": (2, 25.0),
    "svd": (2, 21.0),
    "symmetric_product": (2, 1.0),
    "tridiagonal": (2, 4 / 3),
    "tridiagonal_solve": (1, 0.0),
}


@register(*FACTORISATIONS)
def factorisation(op: OpView) -> Rule:
    """Batch dimensions in front pass, the matrix itself stays whole."""
    core, weight = FACTORISATIONS[op.primitive]
    first = op.in_shapes[0]
    n_batch = len(first) - core
    batch_shape = first[:n_batch]
    if any(shape[:n_batch] != batch_shape for shape in (*op.in_shapes, *op.out_shapes)):
        raise NoRule
    b = Builder()
    batch = b.dims(batch_shape)

    def side(shape: Sequence[int]) -> tuple[Dim, ...]:
        return batch + b.dims(shape[n_batch:], Kind.REPLICATE)

    cubic = math.prod(first) * min(first[n_batch:], default=1)
    flops = weight * cubic * arithmetic_weight(op.in_dtypes[0])
    return b.rule([side(s) for s in op.in_shapes], [side(s) for s in op.out_shapes], flops)


@register("triangular_solve")
def triangular_solve(op: OpView) -> Rule:
    """``a x = b`` (or ``x a = b``): batch dimensions and the independent right-hand sides pass."""
    matrix, known = op.in_shapes
    b = Builder()
    batch = b.dims(matrix[:-2])
    a = batch + b.dims(matrix[-2:], Kind.REPLICATE)
    left = bool(op.params["left_side"])
    rows = b.dim(known[-2], Kind.REPLICATE if left else Kind.PASS)
    columns = b.dim(known[-1], Kind.PASS if left else Kind.REPLICATE)
    x = (*batch, rows, columns)
    return b.rule([a, x], [x], float(math.prod(known) * matrix[-1]) * arithmetic_weight(op.out_dtypes[0]))


@register("fft")
def fft(op: OpView) -> Rule:
    """The transformed dimensions stay whole (their sizes differ for real transforms); 5 n log2 n operations."""
    lengths = tuple(int(n) for n in op.params["fft_lengths"])
    (source,), (target,) = op.in_shapes, op.out_shapes
    n_batch = len(source) - len(lengths)
    b = Builder()
    batch = b.dims(source[:n_batch])
    points = math.prod(lengths)
    flops = 5.0 * math.prod(source[:n_batch]) * points * math.log2(max(points, 2))
    sides = [batch + b.dims(shape[n_batch:], Kind.REPLICATE) for shape in (source, target)]
    return b.rule(sides[:1], sides[1:], flops)


def _fill(b: Builder, side: list[Dim | None], shape: tuple[int, ...], stem: str, skip: Sequence[int] = ()) -> list[Dim]:
    """Give the dimensions that have no factor yet one of their own; returns these."""
    free = []
    for i, size in enumerate(shape):
        if side[i] is None and i not in skip:
            side[i] = b.dim(size, stem=stem)
            free.append(_known(side[i]))
    return free


def _known(dim: Dim | None) -> Dim:
    if dim is None:
        raise NoRule
    return dim
