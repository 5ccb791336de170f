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
    solver=autoshard.SolverOptions(time_limit=4),
    progress=False,
)
loose

# %% [markdown]
# The fastest plan is one end of the curve. The other end is the least memory that any plan needs, which the planner says
# when it is asked for too little.

# %%
try:
    loose.what_if(memory_budget="1MB", progress=False)
except autoshard.InfeasibleError as error:
    least = error.minimum_budget
print(f"least {least / 1e9:.2f} GB, fastest plan {loose.memory.peak_bytes / 1e9:.2f} GB")

# %% [markdown]
# Some budgets between the two:

# %%
between = loose.memory.peak_bytes - least
plans = [loose]
for share in (0.7, 0.4, 0.2):
    try:
        plans.append(loose.what_if(memory_budget=int(least + share * between), progress=False))
    except autoshard.InfeasibleError:
        print(f"nothing found at {share:.0%} in time")
for plan in plans:
    print(
        f"{plan.memory.peak_bytes / 1e9:5.2f} GB: {plan.cost.total_s * 1e3:6.3f} ms, of which "
        f"{plan.cost.communication_s * 1e3:6.3f} ms communication; {plan.status}, gap {plan.gap:.2%}"
    )

# %% [markdown]
# The curve, as a figure of matplotlib:

# %%
from autoshard_ilp.plots.base import new, plain

figure = new(7, 3)
axes = plain(figure.subplots(), "A step against its memory")
axes.plot([p.memory.peak_bytes / 1e9 for p in plans], [p.cost.total_s * 1e3 for p in plans], "o-")
axes.set_xlabel("peak memory per device, GB")
axes.set_ylabel("step, ms")
figure

# %% [markdown]
# Both ends of the curve over time: at the loose end the memory is that of whole weights and activations, at the tight
# end they are held in pieces and gathered for as short as possible.

# %%
plans[0].plot.memory()

# %%
plans[-1].plot.memory()
