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
# # Reading and questioning a plan
#
# A plan is no oracle: everything in it can be looked at and asked about. Here is a small transformer on eight H100s.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras

import autoshard_ilp as autoshard


def build():
    x = inputs = keras.Input((128, 512), name="tokens")
    for i in range(2):
        h = keras.layers.LayerNormalization(name=f"block_{i}_norm")(x)
        h = keras.layers.MultiHeadAttention(8, 64, name=f"block_{i}_attention")(h, h)
        x = keras.layers.Add(name=f"block_{i}_add")([x, h])
        h = keras.layers.Dense(2048, activation="gelu", name=f"block_{i}_up")(x)
        x = keras.layers.Add(name=f"block_{i}_out")([x, keras.layers.Dense(512, name=f"block_{i}_down")(h)])
    model = keras.Model(inputs, keras.layers.Dense(512, name="head")(x))
    model.compile(optimizer="adamw", loss="mse")
    return model


plan = autoshard.optimize(build, {"data": 2, "model": 4}, hardware="h100", batch_size=64, progress=False)
plan

# %% [markdown]
# ## What runs when
#
# The predicted timeline of one device. `plan.to_perfetto("step.json")` writes it operation by operation for
# <https://ui.perfetto.dev>.

# %%
plan.plot.timeline()

# %% [markdown]
# ## What is communicated, and for what

# %%
plan.plot.communication()

# %% [markdown]
# ## Where one tensor lies

# %%
plan.plot.mesh("block_0_up/kernel")

# %% [markdown]
# ## Why does it lie there?
#
# For every other layout the planner is asked again, with that layout demanded. The table shows the best plan under each,
# what it costs more, and which collectives make the difference.

# %%
plan.explain("block_0_up/kernel", time_limit=600)

# %% [markdown]
# ## What if?
#
# Pin a layout, change the budget, change the objective: the step is not traced again.

# %%
pinned = plan.what_if(pins={"block_._up/kernel": (None, "model"), "block_._down/kernel": ("model", None)})
print(f"{plan.cost.total_s * 1e3:.3f} ms free, {pinned.cost.total_s * 1e3:.3f} ms with Megatron's layout of the MLP")
plan.compare(pinned)

# %% [markdown]
# ## The operations of one layer
#
# Views and elementwise operations that the compiler fuses are left out; collectives stand at the operation that needs
# them.

# %%
plan.plot.graph("block_0_attention")
