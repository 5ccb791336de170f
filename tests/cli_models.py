"""Models that the tests of the command line name as ``cli_models:<factory>``."""

import keras


def small() -> keras.Model:
    """Two dense layers of width 64; says something on stdout, as a user's factory may."""
    print("building a model")
    inputs = keras.Input((32,), name="features")
    hidden = keras.layers.Dense(64, activation="relu", name="first")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(16, name="last")(hidden))
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    return model


def other() -> keras.Model:
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def uncompiled() -> keras.Model:
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(16)])


def failing() -> keras.Model:
    raise RuntimeError("no such dataset")


def leaving() -> keras.Model:
    raise SystemExit(3)


number = 7
