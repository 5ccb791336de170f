"""Models that no cost formula was fitted to: other architectures, for measuring predictions on attached hardware."""

from __future__ import annotations

from typing import Any


def wavenet() -> Any:
    """Two stacks of gated causal convolutions with dilations up to 128, 2048 samples of 256 classes."""
    import keras
    from keras import layers

    inputs = keras.Input((2048, 1))
    x = layers.Conv1D(128, 2, padding="causal")(inputs)
    skips = []
    for dilation in 2 * [2**i for i in range(8)]:
        gates = [
            layers.Conv1D(128, 2, padding="causal", dilation_rate=dilation, activation=a)(x)
            for a in ("tanh", "sigmoid")
        ]
        z = layers.multiply(gates)
        skips.append(layers.Conv1D(256, 1)(z))
        x = layers.add([x, layers.Conv1D(128, 1)(z)])
    outputs = layers.Conv1D(256, 1)(layers.Activation("relu")(layers.add(skips)))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def application(name: str, size: int = 224) -> Any:
    """An image classifier of ``keras.applications``, in bfloat16."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classifier_activation=None)
    finally:
        keras.config.set_dtype_policy(before)
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def translator() -> Any:
    """Encoder and decoder of two GRU layers each, with attention between them; loops of 64 steps."""
    import keras
    from keras import layers

    source, target = keras.Input((64,), dtype="int32"), keras.Input((64,), dtype="int32")
    x = layers.Embedding(16000, 512)(source)
    y = layers.Embedding(16000, 512)(target)
    for _ in range(2):
        x = layers.GRU(1024, return_sequences=True, use_cudnn=False)(x)
        y = layers.GRU(1024, return_sequences=True, use_cudnn=False)(y)
    z = layers.Concatenate()([y, layers.Attention()([y, x])])
    model = keras.Model([source, target], layers.Dense(16000)(layers.Dense(1024, "tanh")(z)))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def mixer() -> Any:
    """An MLP-mixer of eight blocks, 196 tokens of width 768, in bfloat16."""
    import keras
    from keras import layers

    policy = "mixed_bfloat16"
    x = inputs = keras.Input((224, 224, 3))
    x = layers.Conv2D(768, 16, 16, dtype=policy)(x)
    x = layers.Reshape((196, 768), dtype=policy)(x)
    for _ in range(8):
        y = layers.Permute((2, 1), dtype=policy)(layers.LayerNormalization(dtype=policy)(x))
        y = layers.Dense(196, dtype=policy)(layers.Dense(384, "gelu", dtype=policy)(y))
        x = layers.Add(dtype=policy)([x, layers.Permute((2, 1), dtype=policy)(y)])
        y = layers.LayerNormalization(dtype=policy)(x)
        y = layers.Dense(768, dtype=policy)(layers.Dense(3072, "gelu", dtype=policy)(y))
        x = layers.Add(dtype=policy)([x, y])
    x = layers.GlobalAveragePooling1D(dtype=policy)(x)
    model = keras.Model(inputs, layers.Dense(1000, dtype="float32")(x))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def unet() -> Any:
    """A U-Net of plain convolutions on 256 x 256 images, 32 to 256 channels, in bfloat16."""
    import keras
    from keras import layers

    policy = "mixed_bfloat16"

    def block(x: Any, channels: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(channels, 3, padding="same", use_bias=False, dtype=policy)(x)
            x = layers.ReLU(dtype=policy)(layers.BatchNormalization(dtype=policy)(x))
        return x

    inputs = keras.Input((256, 256, 3))
    x, kept = inputs, []
    for channels in (32, 64, 128):
        x = block(x, channels)
        kept.append(x)
        x = layers.MaxPooling2D(dtype=policy)(x)
    x = block(x, 256)
    for channels in (128, 64, 32):
        x = layers.Conv2DTranspose(channels, 2, 2, dtype=policy)(x)
        x = block(layers.Concatenate(dtype=policy)([x, kept.pop()]), channels)
    model = keras.Model(inputs, layers.Conv2D(10, 1, dtype="float32")(x))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
