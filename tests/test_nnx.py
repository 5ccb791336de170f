"""Plans of hand-written training steps: Optax on a plain pytree, and a Flax NNX model with its optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from dear_compute import dear_compute

pytestmark = pytest.mark.usefixtures("quick_code")

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

MESH = {"data": 2, "model": 4}
STEPS = 3


class Block(nnx.Module):
    """Normalisation, two projections with a skip, dropout: parameters, statistics and a random stream."""

    def __init__(self, width: int, rngs: Any) -> None:
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))


class Network(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(16, 64, rngs=rngs)
        self.block = Block(64, rngs)
        self.last = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.block(self.first(x)))


def batches() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(32, 16)).astype("float32"), rng.normal(size=(32, 8)).astype("float32")) for _ in range(STEPS)
    ]


def optimize_fn(step: Any, args: Any, **options: Any) -> autoshard.Plan:
    return autoshard.optimize_fn(step, args, MESH, hardware=dear_compute(), progress=False, **options)


def losses_of(run: Any, state: Any) -> tuple[list[float], Any]:
    found = []
    for batch in batches():
        *state, loss = run(*state, batch)
        found.append(float(loss))
    return found, state


def check(plan: autoshard.Plan, step: Any, state: Any, rtol: float = 1e-5) -> Any:
    """Three planned steps equal three on one device; every state array stays where it was planned."""
    expected, ends = losses_of(jax.jit(step), state)
    copies = jax.tree.map(jnp.copy, state)
    laid_out = [jax.device_put(part, s) for part, s in zip(copies, plan.in_shardings, strict=False)]
    got, found = losses_of(plan.jit(), laid_out)
    np.testing.assert_allclose(got, expected, rtol=rtol)
    for a, b, sharding in zip(*map(jax.tree.leaves, (ends, found, plan.in_shardings[: len(state)])), strict=True):
        assert b.sharding.is_equivalent_to(sharding, b.ndim)
        if not str(b.dtype).startswith("key"):
            np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-4)
    return found


def sharded(plan: autoshard.Plan) -> set[str]:
    return {path for path, spec in plan.specs.items() if any(spec)}


# -- plain JAX


def test_an_optax_training_step() -> None:
    rng = np.random.default_rng(1)
    params = {"up": rng.normal(size=(16, 256)) / 4, "bias": np.zeros(256), "down": rng.normal(size=(256, 8)) / 16}
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0, 0.01, 2, 9))
    )

    def step(params: Any, slots: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> Any:
            return jnp.mean((jnp.tanh(batch[0] @ p["up"] + p["bias"]) @ p["down"] - batch[1]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, slots = optimizer.update(gradients, slots, params)
        return optax.apply_updates(params, updates), slots, loss

    state = (params, optimizer.init(params))
    plan = optimize_fn(step, (*state, batches()[0]))
    assert plan.executable is not None and plan.executable.donated == (0, 1)
    assert {"args/0/up", "args/0/down"} <= sharded(plan)
    moments = [path for path in sharded(plan) if path.startswith("args/1/") and path.endswith("up")]
    assert len(moments) == 2, "Adam's moments lie as their parameter"
    assert all(plan.specs[path] == plan.specs["args/0/up"] for path in moments)
    assert jax.tree.structure(plan.in_shardings) == jax.tree.structure((*state, batches()[0]))
    out = jax.eval_shape(step, *state, batches()[0])
    assert jax.tree.structure(plan.out_shardings) == jax.tree.structure(out)
    check(plan, step, state)


# -- Flax NNX


def split_network() -> tuple[Any, Any, Any]:
    """The static part, the state, and the training step on them."""
    model = Network(nnx.Rngs(params=0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    static, state = nnx.split((model, optimizer))

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(static, state)
        model.train()

        def loss_of(m: Any) -> Any:
            return jnp.mean((m(batch[0]) - batch[1]) ** 2)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return static, state, step


@pytest.fixture(scope="module")
def network() -> Any:
    static, state, step = split_network()
    return static, state, step, optimize_fn(step, (state, batches()[0]))


def test_an_nnx_model_trains_as_on_one_device(network: Any) -> None:
    static, state, step, plan = network
    found = sharded(plan)
    assert any("up/kernel" in path for path in found) and any("opt_state" in path for path in found)
    ends = check(plan, step, (state,), rtol=2e-5)
    model, optimizer = nnx.merge(static, ends[0])
    assert int(optimizer.step[...]) == STEPS
    assert not np.allclose(model.block.norm.mean[...], 0), "statistics have moved"


def test_shardings_have_the_structure_of_the_nnx_state(network: Any) -> None:
    _, state, _, plan = network
    assert jax.tree.structure(plan.in_shardings[0]) == jax.tree.structure(state)
    assert jax.tree.structure(plan.out_shardings[0]) == jax.tree.structure(state)
    assert all(isinstance(s, NamedSharding) for s in jax.tree.leaves((plan.in_shardings, plan.out_shardings)))
    text = plan.jit().lower(*plan.abstract_args()).compile().as_text()
    assert "all-reduce" in text or "reduce-scatter" in text or "all-gather" in text


def test_pins_and_files_of_an_nnx_plan(network: Any, tmp_path: Any) -> None:
    _, state, step, plan = network
    args = (state, batches()[0])
    pinned = optimize_fn(step, args, pins={r"block/up/kernel": (None, "model")})
    kernels = {path: spec for path, spec in pinned.specs.items() if "block/up/kernel" in path}
    assert kernels and set(kernels.values()) == {P(None, "model")}
    plan.save(tmp_path / "plan.json")
    with pytest.raises(autoshard.InputShapeError, match="args="):  # an nnx.State is a class
        autoshard.load(tmp_path / "plan.json", step)
    again = autoshard.load(tmp_path / "plan.json", step, args=args)
    assert again.fingerprint == plan.fingerprint
    losses = [
        losses_of(p.jit(), [jax.device_put(jax.tree.map(jnp.copy, state), p.in_shardings[0])])[0] for p in (plan, again)
    ]
    assert losses[0] == losses[1]


def test_an_nnx_state_is_saved_under_one_plan_and_restored_under_another(network: Any, tmp_path: Any) -> None:
    pytest.importorskip("orbax.checkpoint")
    _, state, step, _ = network
    other = autoshard.optimize_fn(step, (state, batches()[0]), {"x": 8}, hardware=dear_compute(), progress=False)
    autoshard.save_checkpoint(tmp_path / "state", state)
    there = autoshard.restore_checkpoint(tmp_path / "state", other)
    assert jax.tree.structure(there) == jax.tree.structure(state)
    for a, b, s in zip(*map(jax.tree.leaves, (state, there, other.in_shardings[0])), strict=True):
        a, b = (jax.random.key_data(v) if str(v.dtype).startswith("key") else v for v in (a, b))
        assert np.array_equal(a, b) and (b.ndim != len(s.spec) or b.sharding.is_equivalent_to(s, b.ndim))
