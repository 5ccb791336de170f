"""cuDNN's flash attention, which ``jax.nn.dot_product_attention`` and Keras choose where a GPU is attached.

One kernel per device computes whole sequences of some rows of the batch and some heads; jax's own partitioning of these
primitives (``jax/_src/cudnn/fused_attention_stablehlo.py``) wants the same of queries, keys and values.
"""

from __future__ import annotations

import math

from autoshard_ilp.rules.builder import Builder, NoRule
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Dim, Dims, Kind, OpView, Rule

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
PRIMITIVES = (FORWARD, BACKWARD)

HEADS_IN_FRONT = 1
"""Value of the parameter ``layout`` of arrays (batch, heads, tokens, width); else (batch, tokens, heads, width)."""

PRODUCTS_FORWARD, PRODUCTS_BACKWARD = 2, 5
"""Of tokens x tokens x width per head: scores and their sum of values; scores again, and four gradients."""


@register(FORWARD, BACKWARD)
def flash_attention(op: OpView) -> Rule:
    """Batch and heads pass, tokens and width stay whole: ``(a b c d), (a e c d), ... -> (a b c d)``.

    Several heads of queries may share one of keys: the first factor of theirs is that of the keys'.
    """
    query, key, value, bias = op.in_shapes[:4]
    forward = op.primitive == FORWARD
    if {len(query), len(key), len(value)} != {4} or any(op.params["variadic_args"][1:]):
        raise NoRule
    if op.params.get("score_mod") is not None:  # a function of the positions of rows and heads, which would be shifted
        raise NoRule
    heads_at = 1 if op.params["layout"] == HEADS_IN_FRONT else 2
    tokens_at = 3 - heads_at
    shared = query[heads_at] // key[heads_at]
    b = Builder()
    batch, heads = b.dim(query[0], even=True), b.dim(key[heads_at], even=True)
    query_heads = heads + b.dim(shared, Kind.REPLICATE)
    tokens, others = b.dim(query[tokens_at], Kind.REPLICATE), b.dim(key[tokens_at], Kind.REPLICATE)
    width, value_width = b.dim(query[3], Kind.REPLICATE), b.dim(value[3], Kind.REPLICATE)

    def laid_out(count: Dim, of: Dim, last: Dim) -> Dims:
        return (batch, of, count, last) if heads_at == 1 else (batch, count, of, last)

    q, k, v = laid_out(tokens, query_heads, width), laid_out(others, heads, width), laid_out(others, heads, value_width)
    out = laid_out(tokens, query_heads, value_width)
    sums: Dims = (batch, query_heads, tokens)
    of_bias = _bias(b, bias, (batch, query_heads, tokens, others), query)
    operands = [q, k, v, of_bias, *(b.dims(shape, Kind.REPLICATE) for shape in op.in_shapes[4:10])]
    products = PRODUCTS_FORWARD if forward else PRODUCTS_BACKWARD
    flops = products * 2.0 * math.prod(query) * key[tokens_at]
    if "CAUSAL" in str(op.params["mask_type"]):
        flops /= 2
    if forward:
        return b.rule(operands, [out, sums][: len(op.out_shapes)], flops)
    if len(op.in_shapes) != 13 or len(op.out_shapes) != 3:
        raise NoRule
    return b.rule([*operands, sums, out, out], [q, k, v], flops)


def _bias(b: Builder, shape: tuple[int, ...], like: Dims, query: tuple[int, ...]) -> Dims:
    """Dimensions of a bias, or mask; what is 1 there is broadcast. Without one the array is empty."""
    if len(shape) != len(like):
        return b.dims(shape, Kind.REPLICATE)
    return tuple(() if n == 1 else dim for n, dim in zip(shape, like, strict=True))
