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
# # A model that does not fit
#
# Adam keeps two more numbers per weight, and gradients are as large as the weights. So a model of two billion parameters
# in float32 fills 26 GB on every device of a data-parallel run, far more than a TPU v5e chip has. Here the planner
# finds a plan that fits, and says what the least memory is.
#
# The model is given as a function. It is built abstractly: not one byte of these weights is ever allocated here.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras

import autoshard_ilp as autoshard


def build():
    x = inputs = keras.Input((4096,), name="features")
    for i in range(16):
        h = keras.layers.Dense(16384, activation="gelu", name=f"block_{i}_up")(x)
        x = keras.layers.Add(name=f"block_{i}_add")([x, keras.layers.Dense(4096, name=f"block_{i}_down")(h)])
    model = keras.Model(inputs, keras.layers.Dense(1000, name="head")(x))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


MESH = {"data": 2, "model": 4}
options = {"hardware": "tpu-v5e", "batch_size": 1024, "progress": False}

# %% [markdown]
# Data parallelism keeps all weights on every device. It does not fit, and the error says what would:

# %%
try:
    autoshard.baseline(build, MESH, "data_parallel", **options)
except autoshard.InfeasibleError as error:
    print(error)

# %% [markdown]
# The planner shards weights and optimizer state until the step fits, at the least cost in seconds.

# %%
plan = autoshard.optimize(build, MESH, **options)
print(repr(plan))
plan.plot.memory()

# %% [markdown]
# How little memory is enough? Ask for too little and the error carries the smallest budget, proved where both figures
# are equal, and what fills it.

# %%
try:
    plan.what_if(memory_budget="2GB")
except autoshard.InfeasibleError as error:
    print(f"smallest budget {error.minimum_budget / 1e9:.2f} GB, not below {error.minimum_budget_bound / 1e9:.2f} GB")
    for path, n_bytes in error.contributors[:5]:
        print(f"{n_bytes / 1e6:9.1f} MB  {path}")

# %% [markdown]
# A prediction is not a promise. Before the last gigabytes are relied on, `plan.verify("tpu-v5e:2x4")` compiles the plan
# with the real TPU compiler, without a TPU, and compares (it needs the extra `tpu`, and minutes for a large model).
