"""Hardware for the tests: an H100 without its fixed costs, so that layouts follow from bytes and FLOP alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoshard_ilp.costs.profile import COLLECTIVE_KINDS, HardwareProfile, load_profile

WITHOUT_KERNELS = {
    "kernel_launch_seconds": 0.0,
    "processors": 0,
    "unaligned_efficiency": 1.0,
    "convolution_efficiency": 1.0,
    "random_words_per_s": None,
}
"""What a GPU's kernels cost besides bytes and FLOP: nothing."""


def toy(flops_per_s: float = 1e12, memory_bytes_per_s: float = 1e12, **changes: Any) -> HardwareProfile:
    """Devices of a switch without latencies and with round figures.

    Args:
        flops_per_s: matmul rate of every dtype.
        memory_bytes_per_s: device memory; raise it to make matmuls bound by arithmetic at any size.
        changes: further fields of the profile.

    Returns:
        A profile whose ring over n devices moves (n-1)/n of the bytes at 1e9 bytes/s (twice for an all-reduce).
    """
    plain = {
        "name": "toy",
        "hop_seconds": 0.0,
        "network_hop_seconds": 0.0,
        "call_seconds_by_kind": dict.fromkeys(COLLECTIVE_KINDS, 0.0),
        "in_switch_bytes_per_s": None,
        "link_bytes_per_s": 1e9,
        "link_efficiency": 1.0,
        "all_to_all_efficiency": None,
        "memory_bytes_per_s": memory_bytes_per_s,
        "memory_efficiency": 1.0,
        "matmul_efficiency": 1.0,
        "peak_flops_per_s_by_dtype": {"float32": flops_per_s},
        "float32_runs_as": "float32",
        "overlap_by_kind": {},
        **WITHOUT_KERNELS,
    }
    return dataclasses.replace(load_profile("h100"), **{**plain, **changes})
