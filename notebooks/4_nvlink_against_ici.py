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
# # NVLink against ICI
#
# The same model, the same mesh, two machines: eight H100s behind an NVLink switch, and eight TPU v5e chips on a torus of
# slower links. The best layout is a property of the machine as much as of the model.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras

import autoshard_ilp as autoshard


def build():
    x = inputs = keras.Input((256, 1024), name="tokens")
    for i in range(2):
        h = keras.layers.MultiHeadAttention(16, 64, name=f"block_{i}_attention")(x, x)
        x = keras.layers.Add(name=f"block_{i}_add")([x, h])
        h = keras.layers.Dense(4096, activation="gelu", name=f"block_{i}_up")(x)
        x = keras.layers.Add(name=f"block_{i}_out")([x, keras.layers.Dense(1024, name=f"block_{i}_down")(h)])
    model = keras.Model(inputs, x)
    model.compile(optimizer="adamw", loss="mse")
    return model


MESH = {"data": 2, "model": 4}

# %% [markdown]
# The two profiles. Each figure comes with its source, in `cost_models/`.

# %%
for name in ("h100", "tpu-v5e"):
    p = autoshard.profile(name)
    print(
        f"{name:8} {p.peak_flops_per_s('bfloat16') / 1e12:6.0f} TFLOP/s reached, "
        f"{p.memory_bytes_per_s / 1e12:.2f} TB/s memory, {p.link_kind} of {p.link_bytes_per_s / 1e9:.0f} GB/s links"
    )

# %% [markdown]
# One trace is enough: `what_if` prices the same step on the other hardware.

# %%
nvlink = autoshard.optimize(build, MESH, hardware="h100", batch_size=64, progress=False)
ici = nvlink.what_if(hardware="tpu-v5e")
for plan in (nvlink, ici):
    share = plan.cost.communication_s / plan.cost.total_s
    print(f"{plan.hardware:8} {plan.cost.total_s * 1e3:7.2f} ms a step, {share:.0%} of it communication")

# %%
nvlink.plot.communication()

# %%
ici.plot.communication()

# %% [markdown]
# Where the two plans differ, tensor by tensor:

# %%
nvlink.compare(ici)

# %% [markdown]
# What would it cost to carry the layout of one machine over to the other? Pin it and see.

# %%
pins = {f"^{path}$": spec for path, spec in nvlink.specs.items() if path.endswith("kernel")}
carried = ici.what_if(pins=pins)
extra = carried.cost.total_s / ici.cost.total_s - 1
print(f"the H100's kernels on the TPU: {carried.cost.total_s * 1e3:.2f} ms, {extra:+.1%} against its own plan")
