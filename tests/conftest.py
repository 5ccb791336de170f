"""Eight virtual CPU devices for every test; set before any backend starts."""

import gc
import os
import signal

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# A shell starts background jobs with SIGINT ignored; tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules and what jax keeps of earlier tests are never garbage, and each full collection walks over all of it.
gc.freeze()
gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module")
def quick_code():
    """XLA:CPU makes machine code in half the time, of the same program: LLVM optimises it less.

    For tests whose time is compiling and which ask only for the values that come out. Not for those that compare what
    compilers make of a plan, and not for all numerics: some run what users run. What jax keeps compiled is dropped on
    both sides: bits differ, and some tests compare bits.
    """
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
