# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A rule for your own primitive
#
# The planner knows an operation by its *rule*: which dimensions of its operands and results belong together, and what
# sharding them means. A primitive without a rule is kept whole: always correct, never fast. Here a primitive of our own
# gets its rule, in a few lines.
#
# The primitive scales every row of a matrix by its length: `x / |x|`.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autoshard_ilp as autoshard

normalise_p = Primitive("normalise_rows")


def normalise(x):
    return normalise_p.bind(x)


def implementation(x):
    return x / jnp.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


normalise_p.def_impl(implementation)
normalise_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(normalise_p, mlir.lower_fun(implementation, multiple_results=False))


# %% [markdown]
# A function that uses it, and a mesh of eight devices:


# %%
def forward(weights, x):
    return normalise(jnp.tanh(x @ weights[0])) @ weights[1]


shape = jax.ShapeDtypeStruct
arguments = ((shape((2048, 8192), "bfloat16"), shape((8192, 2048), "bfloat16")), shape((4096, 2048), "bfloat16"))
options = {"hardware": "tpu-v5e", "donate_argnums": (), "progress": False}

before = autoshard.optimize_fn(forward, arguments, {"data": 8}, **options)
print(f"{before.cost.total_s * 1e3:.3f} ms, {before.cost.communication_s * 1e3:.3f} ms of it communication")
print("kept whole:", *before.unknown)

# %% [markdown]
# Whole on every device: the rows are gathered first. With `strict=True` this would be an error. Now the rule. Rows are
# independent of each other, so their dimension *passes*; a row must be whole on its device, so the other dimension is
# *replicated*.

# %%
from autoshard_ilp.rules import Kind, register, rule_for
from autoshard_ilp.rules.builder import Builder


@register("normalise_rows")
def normalise_rows(op):
    b = Builder()
    (shape,) = op.in_shapes
    dims = (*b.dims(shape[:-1]), b.dim(shape[-1], Kind.REPLICATE))
    return b.rule([dims], [dims])


# %% [markdown]
# A rule prints as one line, which is also what tests compare:

# %%
after = autoshard.optimize_fn(forward, arguments, {"data": 8}, strict=True, **options)
op = next(op for op in after.trail.graph.ops if op.primitive == "normalise_rows")
print(rule_for(after.trail.graph.view(op)))

# %%
print(f"{after.cost.total_s * 1e3:.3f} ms, {after.cost.communication_s * 1e3:.3f} ms of it communication")
assert after.cost.total_s < before.cost.total_s and not after.unknown
after.plot.timeline()

# %% [markdown]
# Does the rule tell the truth? Ask of every factor: if each device runs the primitive on its own part, is the result
# exactly its part of the whole? For this one, a test by hand:

# %%
x = jax.random.normal(jax.random.key(0), (8, 16))
parts = jnp.concatenate([normalise(part) for part in jnp.split(x, 4)])
assert jnp.array_equal(parts, normalise(x))
print("rows in parts give the rows of the whole")
