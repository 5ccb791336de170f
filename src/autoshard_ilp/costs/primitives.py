"""Which operations XLA may compute inside others, by their primitive."""

from __future__ import annotations

from functools import cache

from autoshard_ilp.graph import Graph, Op

VIEWS = frozenset(
    """
    reshape squeeze expand_dims transpose bitcast_convert_type copy copy_p stop_gradient hub loop_invariant
    loop_slice loop_carry recompute branch_merge optimization_barrier sharding_constraint random_wrap
    random_unwrap
    """.split()  # noqa: SIM905
)
"""Operations whose result shares its operand's buffer (or is a free slice of it)."""

SAME_VALUES = (*VIEWS, "convert_element_type")
"""What an array may go through and still be the one that a reduction sums up."""

RANDOM = frozenset({"random_bits", "threefry2x32"})
"""Random bits take too long to be drawn in several kernels; XLA:TPU draws them again all the same."""

TRANSCENDENTAL = frozenset(
    """
    exp exp2 expm1 log log1p log2 tanh tan sin cos sinh cosh asin acos atan atan2 erf erfc erf_inv logistic pow
    lgamma digamma
    """.split()  # noqa: SIM905
)
"""Elementwise operations that XLA:CPU does not compute in several kernels. XLA:TPU does, and XLA:GPU computes some of
them anew (:func:`slow_on_gpus`). Divisions and square roots are on XLA's list of dear operations as well, but are
duplicated freely."""

LONG = frozenset({"erf", "erfc", "erf_inv", "lgamma", "digamma"})
"""What XLA expands to polynomials of a hundred instructions: XLA:TPU too may compute these once for several kernels."""

UNFUSIBLE = frozenset(
    """
    dot_general ragged_dot_general conv_general_dilated gather scatter scatter-add scatter_add scatter-mul scatter-min
    scatter-max sort top_k cumsum cumprod cummax cummin cumlogsumexp fft cholesky triangular_solve qr eigh svd lu
    reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add
    select_and_gather_add argmax argmin result loop_stack dot_product_attention_fwd_wrapper
    dot_product_attention_bwd_wrapper rnn_fwd rnn_bwd
    """.split()  # noqa: SIM905
)
"""Operations that read their operands from memory and write their result to memory."""

_QUICK_ON_GPUS = frozenset({"exp", "exp2", "erf", "erfc"})
_QUICK_ON_GPUS_IN_16_BITS = _QUICK_ON_GPUS | {"log", "log2", "logistic"}


def slow_on_gpus(primitive: str, itemsize: float) -> bool:
    """Whether XLA:GPU writes what a function makes for several kernels, however little it reads for it.

    Exponentials are computed anew where that reads fewer bytes than the result has, such as float32 exponentials of
    bfloat16 logits; so are error functions, and logarithms in 16 bits. Not so the others: compiled for h100, the
    ``tanh`` of a sum of two broadcast arrays (additive attention) is written, 16 times as large as both.
    """
    quick = _QUICK_ON_GPUS if itemsize > 2 else _QUICK_ON_GPUS_IN_16_BITS
    return primitive in TRANSCENDENTAL and primitive not in quick


PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""XLA:TPU computes operands of these inside the kernel: an activation function is not written for the product after it,
and is computed again for the weight's gradient."""

WINDOWS = frozenset(
    {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add"}
)
"""XLA:GPU computes operands of these element by element inside the kernel: of a ReLU before a pooling nothing is
written."""

REDUCTIONS = ("reduce_", "argm")
"""How the names of reductions begin."""


def fusible(op: Op) -> bool:
    """Whether XLA may compute the operation inside its consumer."""
    return _fusible(op.primitive)


@cache
def _fusible(primitive: str) -> bool:
    return primitive not in UNFUSIBLE and not primitive.startswith(REDUCTIONS)


def has_vector(graph: Graph, op: Op) -> bool:
    """Whether an operand of a product has no dimensions of its own: batch dimensions and contracted ones only.

    XLA multiplies and sums up then, in a kernel that computes the operands element by element: nothing is written for
    the product. (Compiled for H100 and v5e, sines times vectors: with and without batches, of 16 and of 32 bits.)
    """
    if op.primitive != "dot_general" or len(op.inputs) != 2:
        return False
    contract, batch = op.params["dimension_numbers"]
    shapes = (graph.tensors[t].shape for t in op.inputs)
    return any(
        all(n == 1 or d in c or d in b for d, n in enumerate(shape))
        for shape, c, b in zip(shapes, contract, batch, strict=True)
    )


def dilates(op: Op) -> bool:
    """Whether an operation puts elements between those of its operand: the gradient of a strided slice, or half of what
    interleaves two arrays. XLA:TPU makes a kernel of it, which fuses nothing and is not fused (compiled for v5e:
    paddings of ``x * x + 1.5``, of two and of four dimensions, read by sums, sines and reductions)."""
    return op.primitive == "pad" and any(interior for _, _, interior in op.params["padding_config"])


def strides(op: Op) -> bool:
    """Whether an operation leaves out elements between others. XLA:TPU computes nothing inside such a slice."""
    return op.primitive == "slice" and any(step != 1 for step in op.params["strides"] or ())
