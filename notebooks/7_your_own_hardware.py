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
# # Your own hardware
#
# A hardware profile is a TOML file: data only, every figure with its unit in its name and its source beside it. Here an
# H100 node whose links were measured at half the published rate becomes a profile of its own.

# %%
import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import keras

import autoshard_ilp as autoshard
from autoshard_ilp.costs.profile import profile_path

text = profile_path("h100").read_text()
print(text[:420])

# %% [markdown]
# Change what is different, and say where the figure comes from; a figure without a source does not load.

# %%
published = 'bytes_per_s = {value = 4.5e11, source = "SB-gpus: 18 links of 25 GB/s, one way"}'
measured = 'bytes_per_s = {value = 2.25e11, source = "derived: measured on our nodes, half the nominal rate"}'
assert text.count(published) == 1
mine = text.replace(published, measured).replace('name = "h100"', 'name = "our-h100"')
path = Path(tempfile.mkdtemp()) / "our-h100.toml"
path.write_text(mine)

profile = autoshard.profile(path)
print(profile.name, f"{profile.link_bytes_per_s / 1e9:.0f} GB/s per device")

# %% [markdown]
# A mistake is named with its file and key:

# %%
wrong = path.with_name("wrong.toml")
wrong.write_text(mine.replace("matmul_efficiency = {value = 0.8", "matmul_efficiency = {value = 80"))
try:
    autoshard.profile(wrong)
except autoshard.ProfileError as error:
    print(f"{error.key}: {str(error).replace(str(wrong.parent), '...')}")


# %% [markdown]
# Use it like any other. The plan may change with the links, and the difference is priced:


# %%
def build():
    x = inputs = keras.Input((4096,), name="features")
    for i in range(4):
        h = keras.layers.Dense(8192, activation="gelu", name=f"block_{i}_up")(x)
        x = keras.layers.Add(name=f"block_{i}_add")([x, keras.layers.Dense(4096, name=f"block_{i}_down")(h)])
    model = keras.Model(inputs, x)
    model.compile(optimizer="adam", loss="mse")
    return model


nominal = autoshard.optimize(build, {"data": 2, "model": 4}, hardware="h100", batch_size=2048, progress=False)
ours = nominal.what_if(hardware=path)
for plan in (nominal, ours):
    print(f"{plan.hardware:9} {plan.cost.total_s * 1e3:.3f} ms, communication {plan.cost.communication_s * 1e3:.3f} ms")

# %%
nominal.compare(ours)

# %% [markdown]
# On devices that are attached, `autoshard.calibrate(mesh)` measures such a profile.
