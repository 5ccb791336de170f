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
# # Memory against communication
#
# Weights in pieces must be gathered before they are used; whole weights take memory. Between the two lies a curve, and
# every point of it is a plan that says how far it can be from the best one. The model is built abstractly, traced once.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras

import autoshard_ilp as autoshard


def build():
    x = inputs = keras.Input((2048,), name="features")
    for i in range(2):
        h = keras.layers.Dense(8192, activation="gelu", name=f"block_{i}_up")(x)
        x = keras.layers.Add(name=f"block_{i}_add")([x, keras.layers.Dense(2048, name=f"block_{i}_down")(h)])
    model = keras.Model(inputs, keras.layers.Dense(256, name="head")(x))
    model.compile(optimizer="adam", loss="mse")
    return model


loose = autoshard.optimize(
    build,
    {"data": 2, "model": 4},
    hardware="h100",
    batch_size=8192,
    remat="never",  # no activation is computed twice: the curve is that of communication alone
    progress=False,
)
loose

# %% [markdown]
# The fastest plan is one end of the curve; the other end is the least memory that any plan needs. `autoshard.pareto` finds
# the breakpoints in between: each budget at which another plan becomes the best. A plan under a tight budget is harder to
# prove, so the search gets ten seconds here, and every point says how far it can be from the best of its budget.

# %%
curve = autoshard.pareto(loose, max_points=6, time_limit=10, progress=False)
curve

# %%
curve.plot()

# %% [markdown]
# Both ends of the curve over time: at the loose end the memory is that of whole weights and activations, at the tight
# end they are held in pieces and gathered for as short as possible.

# %%
curve.points[-1].plan.plot.memory()

# %%
curve.points[0].plan.plot.memory()

# %% [markdown]
# The price of the memory that the tight plan saves is communication:

# %%
curve.points[0].plan.plot.communication()
