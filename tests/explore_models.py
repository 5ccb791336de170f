"""Small models on which the layouts matter, for the tests of explore; also named as ``explore_models:<factory>``."""

import keras

MESH = {"data": 2, "model": 2}
OPTIONS = {"hardware": "tpu-v5e", "batch_size": 512}


def mlp():
    """Two dense layers, 1024 to 4096 to 1024."""
    inputs = keras.Input((1024,), name="features")
    hidden = keras.layers.Dense(4096, activation="relu", name="wide")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1024, name="last")(hidden), name="mlp")
    model.compile(optimizer="sgd", loss="mse")
    return model


def deep():
    """Six equal blocks, so that those in the middle share one decision."""
    x = inputs = keras.Input((512,), name="features")
    for i in range(6):
        y = keras.layers.Dense(1024, activation="gelu", name=f"up_{i}")(x)
        x = keras.layers.Dense(512, name=f"down_{i}")(y) + x
    model = keras.Model(inputs, x, name="deep")
    model.compile(optimizer="sgd", loss="mse")
    return model


def tiny():
    """One dense layer: planned in no time."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, name="only")], name="tiny")
    model.compile(optimizer="sgd", loss="mse")
    return model


def failing():
    raise RuntimeError("no such dataset")
