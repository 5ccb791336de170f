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
# # A first plan
#
# Which axis of which tensor goes over which axis of the mesh? Here the question is answered for a small network on eight
# devices, and the answer is run. No accelerator is needed: eight virtual CPU devices stand in for the hardware.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before anything else uses JAX

import keras
import numpy as np

import autoshard_ilp as autoshard

# %% [markdown]
# A model like any other. It is compiled, because the whole training step is planned: forward, backward and the
# optimizer's update.


# %%
def build():
    x = inputs = keras.Input((512,), name="features")
    for i in range(2):
        h = keras.layers.LayerNormalization(name=f"block_{i}_norm")(x)
        h = keras.layers.Dense(4096, activation="gelu", name=f"block_{i}_up")(h)
        x = keras.layers.Add(name=f"block_{i}_add")([x, keras.layers.Dense(512, name=f"block_{i}_down")(h)])
    model = keras.Model(inputs, keras.layers.Dense(32, name="head")(x))
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
    return model


# %% [markdown]
# The mesh has two axes, the devices are TPU v5e chips, and a budget of memory may be given per device. The plan shows
# what every tensor does, what a step costs and why, and how far the plan can be from the best one: the gap.

# %%
model = build()
plan = autoshard.optimize(model, {"data": 2, "model": 4}, hardware="tpu-v5e", batch_size=32, progress=False)
plan

# %% [markdown]
# The same content as text is `print(plan.summary())`. Every layout is a JAX `PartitionSpec`:

# %%
{path: spec for path, spec in plan.specs.items() if path.endswith("kernel")}

# %% [markdown]
# `plan.apply` lays the model out in place. `fit` then runs the planned step on the eight devices.

# %%
plan.apply(model)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(128, 512)).astype("float32"), rng.normal(size=(128, 32)).astype("float32")
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
[round(loss, 3) for loss in history.history["loss"]]

# %% [markdown]
# The weights are really in pieces:

# %%
kernel = next(v for v in model.trainable_variables if v.path == "block_0_up/kernel")
kernel.value.sharding.spec, [shard.data.shape for shard in kernel.value.addressable_shards][:2]

# %% [markdown]
# A plan can be kept: `plan.save("plan.json")`, and `autoshard.load("plan.json", model)` brings it back.
