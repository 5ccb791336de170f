"""A profile on which computing is slow and sending is cheap, so that even tiny models are worth sharding."""

import dataclasses

from autoshard_ilp.costs.collectives import COLLECTIVE_KINDS
from autoshard_ilp.costs.profile import HardwareProfile, load_profile
from profiles_for_tests import WITHOUT_KERNELS


def dear_compute() -> HardwareProfile:
    """An 8-device switch without latencies and with 1 GFLOP/s, 1 GB/s chips."""
    real = load_profile("h100")
    return dataclasses.replace(
        real,
        hop_seconds=0.0,
        call_seconds_by_kind=dict.fromkeys(COLLECTIVE_KINDS, 0.0),
        in_switch_bytes_per_s=None,
        memory_bytes_per_s=1e9,
        **WITHOUT_KERNELS,
        peak_flops_per_s_by_dtype=dict.fromkeys(real.peak_flops_per_s_by_dtype, 1000000000.0),
    )
