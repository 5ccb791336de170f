"""Elementwise primitives: every dimension passes through. ``add``: ``(a b, a b) -> (a b)``.

Operands may be scalars, and a dimension of size 1 may stand against a larger one (then it has no factor).
"""

from __future__ import annotations

from autoshard_ilp.rules.builder import Builder, NoRule
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Dims, Kind, OpView, Rule

UNARY = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj convert_element_type copy cos cosh digamma
erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p log2 logistic name neg not
one_minus_square population_count pvary real reduce_precision reshard round rsqrt sharding_constraint layout_constraint
sign sin sinh sqrt square stop_gradient tan tanh zeros_like random_clone hub recompute loop_invariant
with_memory_space_constraint
""".split()  # noqa: SIM905 (a list of 60 quoted names is harder to read)
SEVERAL_OPERANDS = """
add add_any and atan2 clamp complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min mul mulhi
ne nextafter or philox2x32 philox4x32 polygamma polynomial pow random_fold_in random_gamma_grad
regularized_incomplete_beta rem select_n shift_left shift_right_arithmetic shift_right_logical sub threefry2x32
threefry4x32 xor zeta branch_merge loop_carry
""".split()  # noqa: SIM905


@register(*UNARY, *SEVERAL_OPERANDS)
def elementwise(op: OpView) -> Rule:
    """All operands and results share their dimensions."""
    b = Builder()
    rank = max((len(s) for s in (*op.in_shapes, *op.out_shapes)), default=0)
    sizes = [1] * rank
    for shape in (*op.in_shapes, *op.out_shapes):
        if len(shape) == rank:
            sizes = [s if s != 1 else n for s, n in zip(sizes, shape, strict=True)]
    dims = b.dims(sizes)

    def side(shape: tuple[int, ...]) -> Dims:
        if not shape:
            return ()
        if len(shape) != rank:
            raise NoRule
        return tuple(d if size != 1 else () for d, size in zip(dims, shape, strict=True))

    return b.rule([side(s) for s in op.in_shapes], [side(s) for s in op.out_shapes])


@register("optimization_barrier", "device_put")
def parallel(op: OpView) -> Rule:
    """Several values go through side by side: ``(a b, c) -> (a b, c)``."""
    b = Builder()
    sides = [b.dims(shape) for shape in op.in_shapes]
    return b.rule(sides, sides)


@register("tie")
def tie(op: OpView) -> Rule:
    """The second operand, ordered after the first."""
    b = Builder()
    first, second = (b.dims(shape) for shape in op.in_shapes)
    return b.rule([first, second], [second])


@register("bitcast_convert_type", "to_edtype", "from_edtype", "random_wrap", "random_unwrap")
def reinterpret(op: OpView) -> Rule:
    """The same bits as another type; the parts of one element, if any, are a last dimension that stays whole."""
    b = Builder()
    (source,), (target,) = op.in_shapes, op.out_shapes
    shared = min(len(source), len(target))
    if source[:shared] != target[:shared]:
        raise NoRule
    dims = b.dims(source[:shared])
    parts = b.dims((source if len(source) > shared else target)[shared:], Kind.REPLICATE)
    longer, shorter = dims + parts, dims
    return b.rule([longer if len(source) > shared else shorter], [longer if len(target) > shared else shorter])
