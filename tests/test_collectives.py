"""Topology and collectives: published worked examples, measured curves, and the properties a planner relies on."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.costs.collectives import CollectiveCosts, ring_bytes_per_device
from autoshard_ilp.costs.profile import COLLECTIVE_KINDS, HardwareProfile, load_profile, profiles
from autoshard_ilp.costs.topology import Group, MeshLinks, Segment, assign_axes, axis_wraps
from autoshard_ilp.errors import InputShapeError

AG, RS, AR, A2A, CP = COLLECTIVE_KINDS
MIB, GIB = 2**20, 2**30


def costs(
    profile: str | HardwareProfile, sizes: tuple[int, ...], physical: str | None = None, **changes: Any
) -> CollectiveCosts:
    changed = replace(load_profile(profile), **changes)
    names = tuple("abcdef"[: len(sizes)])
    return CollectiveCosts(MeshLinks.create(changed, names, sizes, physical))


def ideal(profile: str, sizes: tuple[int, ...], physical: str | None = None, **changes: Any) -> CollectiveCosts:
    """Nominal bandwidth, no fixed costs, no reduction in the switch: the setting of the published formulas."""
    nominal = dict.fromkeys(("link_efficiency", "all_to_all_efficiency", "network_efficiency"), 1.0)
    silent: dict[str, Any] = {"hop_seconds": 0.0, "network_hop_seconds": 0.0, "in_switch_bytes_per_s": None}
    silent["call_seconds_by_kind"] = dict.fromkeys(COLLECTIVE_KINDS, 0.0)
    return costs(profile, sizes, physical, **(nominal | silent | changes))


def microseconds(model: CollectiveCosts, kind: str, axes: tuple[int, ...], payload_bytes: float) -> float:
    return model.seconds(kind, axes, payload_bytes) * 1e6


# ---------------------------------------------------------------------------------------------------------------
# Published examples, bandwidth terms. The scaling book drops the factor (n-1)/n in some; it is written out here.

X1 = 2 * 1024 * 4096  # bytes of a bfloat16 [1024, 4096]
EXAMPLES = [
    # id, model, kind, axes, payload bytes, expected microseconds, relative tolerance
    ("E2 v5e open axis of 4", ideal("tpu-v5e", (8, 4), "4x8"), AG, (1,), 2 * 2048 * 8192, 559.2, 0.01),
    ("E3 the same, wrapped", ideal("tpu-v5e", (4, 4), "4x4"), AG, (1,), 2 * 2048 * 8192, 559.2, 0.01),
    ("E5 v4 one axis", ideal("tpu-v4", (4, 4, 4)), AG, (0,), X1 / 4, 23.3 * 3 / 4, 0.01),
    ("E6 v4 two axes", ideal("tpu-v4", (4, 4, 4)), AG, (0, 1), X1, 43.7, 0.01),
    ("E7 v4 all-reduce", ideal("tpu-v4", (4, 4, 4)), AR, (2,), X1 / 16, 11.65 * 3 / 4, 0.01),
    ("E8 v4 two axes, not adjacent", ideal("tpu-v4", (4, 4, 4)), AG, (0, 2), X1 / 4, 11.65 * 15 / 16, 0.02),
    ("E9 v4 three axes", ideal("tpu-v4", (4, 4, 4)), AG, (0, 1, 2), X1, 31.07 * 63 / 64, 0.01),
    ("E11 v5e ring of 16", ideal("tpu-v5e", (16, 16)), A2A, (0,), 64 * MIB / 16, 186.4, 0.01),
    ("E12 v6e open 4x4", ideal("tpu-v6e", (16,)), A2A, (0,), 64 * MIB, 745.7, 0.01),
    ("E13 v6e 16x16", ideal("tpu-v6e", (256,)), A2A, (0,), 64 * MIB, 1491.3, 0.01),
    ("E14 7x cube, both cores", ideal("tpu-7x", (64, 2)), A2A, (0, 1), 32 * MIB, 372.8, 0.01),
    ("E14 7x cube, one core's group", ideal("tpu-7x", (64, 2)), A2A, (0,), 32 * MIB, 372.8, 0.01),
    ("E15 v5p ring of 8", ideal("tpu-v5p", (8, 64)), AR, (0,), 256 * MIB, 2609.8, 0.01),
    ("E16 v5p plane", ideal("tpu-v5p", (4, 256), "16x16x4"), AR, (1,), 256 * MIB, 1485.5, 0.01),
    ("E18 v5e spread over ICI", ideal("tpu-v5e", (16,)), AG, (0,), 16e9, 166_667, 0.03),
    ("E19 8 H100", ideal("h100", (8,)), AG, (0,), 2 * 1024 * 16384, 65.2, 0.01),
    ("E20 8 H100, larger", ideal("h100", (8,)), AG, (0,), 2 * 4096 * 65536, 1043.9, 0.01),
    ("E21a 8 H100", ideal("h100", (8,)), A2A, (0,), 64 * MIB, 130.5, 0.01),
    ("E21b 2 nodes", ideal("h100", (16,)), A2A, (0,), 32 * MIB, 335.5, 0.01),
    ("E22 4 nodes of 8, overlapped", ideal("b200", (32,)), AR, (0,), 4 * GIB, 16_106, 0.01),
    ("E23 2 nodes", ideal("h100", (16,)), AG, (0,), GIB, 2087.8, 0.01),
    ("E24 32 nodes", ideal("h100", (256,)), AG, (0,), GIB, 2600.5, 0.01),
    ("E32 2 slices", ideal("tpu-v6e", (2, 256)), AR, (0,), GIB, 85_899, 0.01),
]
# Left out: E1 (point to point over disjoint paths; no collective here), E31 and E37 (other models' formulas),
# E33 to E36 and E38 (rooflines, in test_profiles), the PCIe leg of E18 (no host transfers in a plan).


@pytest.mark.parametrize(("name", "model", "kind", "axes", "payload", "expected", "tolerance"), EXAMPLES)
def test_published_examples(
    name: str,
    model: CollectiveCosts,
    kind: str,
    axes: tuple[int, ...],
    payload: float,
    expected: float,
    tolerance: float,
) -> None:
    assert microseconds(model, kind, axes, payload) == pytest.approx(expected, rel=tolerance), name


def test_a_wrapped_axis_of_four_takes_half_the_time_of_an_open_one() -> None:
    """E3: what the same axis would take with wraparound links."""
    profile = load_profile("tpu-v5e")
    assert profile.torus is not None
    wrapped = ideal("tpu-v5e", (4, 4), "4x4", torus=replace(profile.torus, wrap_size=4))
    assert microseconds(wrapped, AG, (1,), 2 * 2048 * 8192) == pytest.approx(279.6, rel=0.01)


# ---------------------------------------------------------------------------------------------------------------
# Latency


def test_two_hops_around_a_ring_of_four() -> None:
    """E10: 256 bytes on a wrapped axis of 4 take two hops of 1 us."""
    model = ideal("tpu-v4", (4, 4, 4), hop_seconds=1e-6)
    assert microseconds(model, AG, (0,), 256) == pytest.approx(2.0, rel=0.01)


def test_a_small_gather_on_v5e() -> None:
    """E4: about 8 us were measured, 3 us of them hops."""
    assert 7 < microseconds(costs("tpu-v5e", (8, 4), "4x8"), AG, (1,), 2 * 256 * 256) < 11


NCCL = {  # protocol: (ring base, ring step, tree base, tree step, ring step between nodes, tree step between nodes)
    "LL": (6.6, 0.6, 6.8, 0.6, 2.7, 5.0),
    "LL128": (14.0, 1.9, 14.0, 1.25, 4.0, 8.5),
    "Simple": (8.4, 3.4, 8.4, 4.0, 14.0, 14.0),
}
NCCL_LATENCIES = [
    # protocol, all-reduce on one node (E25, ring), gather 2x8 and 4x8 (E26, ring), all-reduce 2x8 and 4x8 (E27, tree)
    ("LL", 15.0, 23.3, 42.7, 25.2, 35.2),
    ("LL128", 40.6, 44.6, 79.2, 48.5, 65.5),
    ("Simple", 56.0, 70.0, 145.6, 92.4, 120.4),
]


@pytest.mark.parametrize(("protocol", "one", "gather2", "gather4", "reduce2", "reduce4"), NCCL_LATENCIES)
def test_steps_compose_as_in_nccl(
    protocol: str, one: float, gather2: float, gather4: float, reduce2: float, reduce4: float
) -> None:
    """With NCCL's constants (src/graph/tuning.cc) the steps give the latencies that NCCL logs."""
    ring, step, tree, tree_step, between, tree_between = (1e-6 * value for value in NCCL[protocol])

    def latency(kind: str, devices: int, base: float, hop: float, network: float) -> float:
        calls = dict.fromkeys(COLLECTIVE_KINDS, base)
        model = ideal("h100", (devices,), hop_seconds=hop, network_hop_seconds=network, call_seconds_by_kind=calls)
        return model.alpha_beta(kind, (0,))[0] * 1e6

    assert latency(AR, 8, ring, step, between) == pytest.approx(one)
    # across nodes NCCL counts at least its 1 us of network overhead per step inside a node
    for devices, expected in ((16, gather2), (32, gather4)):
        assert latency(AG, devices, ring, max(step, 1e-6), between) == pytest.approx(expected)
    for devices, expected in ((16, reduce2), (32, reduce4)):
        assert latency(AR, devices, tree, tree_step, tree_between) == pytest.approx(expected)


def test_a_gather_with_nccls_simple_ring() -> None:
    """E28: 70 us and 1 GiB at 16/15 * 384 GB/s on two nodes."""
    calls = dict.fromkeys(COLLECTIVE_KINDS, 8.4e-6)
    nccl = {"hop_seconds": 3.4e-6, "network_hop_seconds": 14e-6, "call_seconds_by_kind": calls}
    model = ideal("h100", (16,), link_efficiency=384 / 450 * 14 / 15, **nccl)
    assert microseconds(model, AG, (0,), GIB) == pytest.approx(2691.4, rel=0.01)


# ---------------------------------------------------------------------------------------------------------------
# Measured curves, with each profile exactly as it ships

MEASURED = [
    # what, profile, mesh sizes, kind, {payload bytes: microseconds}, relative tolerance
    (
        "E17 gather over 4 chips; 3/4 of the result is received per chip (accelerator-microbenchmarks)",
        *("tpu-7x", (8,), AG, 0.02),
        {
            r * 4 / 3: t
            for r, t in ((1.573e6, 21.9), (6.291e6, 48.7), (25.17e6, 155.4), (100.7e6, 576.0), (402.7e6, 2252.3))
        },
    ),
    (
        "E29 all-reduce on 8 H200 (ml-engineering)",
        *("h200", (8,), AR, 0.25),
        {2**15: 40.0, MIB: 45.9, 16 * MIB: 133.5, 64 * MIB: 338.9, 256 * MIB: 1077, GIB: 4053, 16 * GIB: 62_341},
    ),
    (
        "E30 all-reduce on 8 A100 (ml-engineering)",
        *("a100-80", (8,), AR, 0.35),
        {2**15: 43.8, MIB: 101.9, 16 * MIB: 276.6, 256 * MIB: 2420.6, GIB: 8203.9, 16 * GIB: 127_997},
    ),
    ("E21a all-to-all on 8 H100 (autoparallel)", *("h100", (8,), A2A, 0.02), {64 * MIB: 226.6}),
    ("E22 all-reduce on 4 x 8 B200 (ml-engineering)", *("b200", (32,), AR, 0.05), {GIB: 5747, 4 * GIB: 22_053}),
    ("gather of 537 MB on 8 H100 (scaling book: about 1500 us)", *("h100", (8,), AG, 0.15), {2 * 4096 * 65536: 1500}),
]


@pytest.mark.parametrize(("name", "profile", "sizes", "kind", "tolerance", "curve"), MEASURED)
def test_measured_curves(
    name: str, profile: str, sizes: tuple[int, ...], kind: str, tolerance: float, curve: dict[float, float]
) -> None:
    model = costs(profile, sizes)
    for payload, measured in curve.items():
        assert microseconds(model, kind, (0,), payload) == pytest.approx(measured, rel=tolerance), (name, payload)


# ---------------------------------------------------------------------------------------------------------------
# Topology

PLACEMENTS = [
    # physical axes, logical axes, factors per logical axis: as jax's mesh_utils assigns them
    ((4, 4, 4), (16, 4), ((1, 4, 4), (4, 1, 1))),
    ((4, 4, 4), (4, 16), ((1, 1, 4), (4, 4, 1))),
    ((4, 4, 4), (64,), ((4, 4, 4),)),
    ((4, 4, 4), (8, 8), ((1, 2, 4), (4, 2, 1))),
    ((4, 4, 4), (2, 32), ((1, 1, 2), (4, 4, 2))),
    ((4, 4, 16), (16, 16), ((1, 1, 16), (4, 4, 1))),
    ((4, 8, 8), (4, 64), ((4, 1, 1), (1, 8, 8))),
    ((8, 8, 8), (8, 64), ((1, 1, 8), (8, 8, 1))),
    ((16, 16), (16, 16), ((1, 16), (16, 1))),
    ((16, 16), (64, 4), ((4, 16), (4, 1))),
    ((16, 16), (256,), ((16, 16),)),
    ((8, 16), (16, 8), ((1, 16), (8, 1))),
    ((8, 16), (8, 16), ((8, 1), (1, 16))),
    ((4, 4), (2, 8), ((1, 2), (4, 2))),
    ((4, 4, 8), (4, 32), ((1, 4, 1), (4, 1, 8))),
    ((4, 4, 4, 2), (16, 8), ((1, 4, 4, 1), (4, 1, 1, 2))),
    ((4, 4, 4, 2), (64, 2), ((4, 4, 4, 1), (1, 1, 1, 2))),
    ((4, 4, 4), (4, 2, 8), ((1, 1, 4), (1, 2, 1), (4, 2, 1))),
    ((4, 4, 4), (8, 2, 4), ((1, 2, 4), (1, 2, 1), (4, 1, 1))),
    ((16,), (4, 4), ((4,), (4,))),
]


@pytest.mark.parametrize(("physical", "logical", "expected"), PLACEMENTS)
def test_mesh_axes_lie_where_jax_puts_them(
    physical: tuple[int, ...], logical: tuple[int, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert assign_axes(physical, logical) == expected


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_every_mesh_fits_its_physical_axes_exactly(physical: list[int], data: st.DataObject) -> None:
    primes = [p for n in physical for p in _primes(n)]
    axes = data.draw(st.lists(st.integers(0, 2), min_size=len(primes), max_size=len(primes)))
    logical = tuple(math.prod(p for p, axis in zip(primes, axes, strict=True) if axis == k) for k in range(3))
    rows = assign_axes(physical, logical)
    assert tuple(map(math.prod, rows)) == logical
    assert tuple(map(math.prod, zip(*rows, strict=True))) == tuple(physical)


def _primes(n: int) -> list[int]:
    for p in range(2, n + 1):
        if n % p == 0:
            return [p, *_primes(n // p)]
    return []


@pytest.mark.parametrize(
    ("profile", "shape", "expected"),
    [
        ("tpu-v5e", (4, 4), (False, False)),
        ("tpu-v5e", (8, 16), (False, True)),
        ("tpu-v6e", (16, 16), (True, True)),
        ("tpu-v4", (2, 2, 4), (False, False, False)),
        ("tpu-v5p", (4, 4, 8), (True, True, True)),
        ("tpu-7x", (2, 4, 4), (False, False, False)),
    ],
)
def test_wraparound(profile: str, shape: tuple[int, ...], expected: tuple[bool, ...]) -> None:
    torus = load_profile(profile).torus
    assert torus is not None
    assert axis_wraps(torus, shape) == expected


@pytest.mark.parametrize(
    ("profile", "devices", "shape", "slices"),
    [
        *(("tpu-v5e", 1, (1, 1), 1), ("tpu-v5e", 8, (2, 4), 1), ("tpu-v5e", 128, (8, 16), 1)),
        *(("tpu-v5e", 6, (2, 3), 1), ("tpu-v5e", 7, (1, 7), 1), ("tpu-v5e", 512, (16, 16), 2)),
        *(("tpu-v5p", 4, (2, 2, 1), 1), ("tpu-v5p", 64, (4, 4, 4), 1), ("tpu-v4", 16, (2, 2, 4), 1)),
        *(("tpu-7x", 2, (1, 1, 1), 1), ("tpu-7x", 8, (2, 2, 1), 1), ("tpu-7x", 3, (1, 1, 3), 1)),
    ],
)
def test_slice_of_a_device_count(profile: str, devices: int, shape: tuple[int, ...], slices: int) -> None:
    links = costs(profile, (devices,)).links
    assert (links.slice_shape, links.slices) == (shape, slices)


def test_what_a_group_sees_on_a_split_torus() -> None:
    links = costs("tpu-v5p", (8, 8), "4x4x4").links  # axis 1 of the torus is split 2 x 2
    assert set(links.group((1,)).segments) == {Segment(4, True), Segment(2, False)}
    assert set(links.group((0,)).segments) == {Segment(4, True), Segment(2, True, 2.0)}
    assert links.group((0, 1)).segments == (Segment(4, True),) * 3
    strided = costs("tpu-v5e", (4, 4, 16), "16x16").links.group((0,)).segments
    assert strided == (Segment(4, True, 4.0),)
    assert strided[0].width == 0.5
    assert strided[0].hops == 8
    contiguous = costs("tpu-v5e", (4, 4, 16), "16x16").links.group((1,)).segments
    assert contiguous == (Segment(4, False),)


def test_a_single_axis_over_a_small_slice_runs_as_a_ring() -> None:
    assert costs("tpu-v5e", (8,)).links.group((0,)).closed_ring
    assert costs("tpu-v5e", (8, 1)).links.group((0,)).closed_ring
    assert not costs("tpu-v5e", (2, 4)).links.group((0, 1)).closed_ring
    assert not costs("tpu-v5e", (8, 2), "4x4").links.group((0,)).closed_ring
    model = ideal("tpu-v5e", (8,), hop_seconds=1e-6)
    assert model.alpha_beta(AG, (0,))[0] == pytest.approx(4e-6)
    assert model.alpha_beta(CP, (0,))[0] == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("sizes", "axes", "expected"),
    [
        ((2, 4, 4), (2,), Group(4, 1, 4, 4)),
        ((2, 4, 4), (1,), Group(4, 2, 2, 2)),
        ((2, 4, 4), (0,), Group(2, 2, 1, 1)),
        ((2, 4, 4), (0, 1, 2), Group(32, 4, 8, 8)),
        ((2, 4, 4), (0, 2), Group(8, 2, 4, 4)),
        # ranks 6 to 11 lie on two nodes: the worst group decides
        ((2, 6), (1,), Group(6, 2, 6, 2)),
        ((12,), (0,), Group(12, 2, 8, 4)),
        ((8, 1), (1,), Group(1, 1, 1, 1)),
    ],
)
def test_ranks_per_node(sizes: tuple[int, ...], axes: tuple[int, ...], expected: Group) -> None:
    assert costs("h100", sizes).links.group(axes) == expected


def test_domains_of_several_hosts_are_filled_evenly() -> None:
    """72 GPUs share an NVLink domain, but a mesh of 128 is 64 and 64, not 72 and 56."""
    assert costs("gb200-nvl72", (2, 64)).links.group((1,)) == Group(64, 1, 64, 64)
    assert costs("gb200-nvl72", (1024,)).links.group((0,)) == Group(1024, 16, 64, 64)
    assert costs("gb200-nvl72", (144,)).links.group((0,)) == Group(144, 2, 72, 72)
    assert costs("gb200-nvl72", (146,)).links.group((0,)) == Group(146, 3, 72, 2)


def test_a_group_that_straddles_nodes_pays_for_the_network() -> None:
    inside, across = costs("h100", (2, 8)), costs("h100", (8, 8))
    for kind in COLLECTIVE_KINDS:
        assert across.seconds(kind, (0,), GIB) > 2 * inside.seconds(kind, (1,), GIB)
        assert costs("h100", (2, 6)).seconds(kind, (1,), GIB) > 2 * inside.seconds(kind, (1,), GIB)
        assert costs("gb200-nvl72", (9, 8)).seconds(kind, (0,), GIB) < across.seconds(kind, (0,), GIB) / 4


def test_mistakes_are_named() -> None:
    profile = load_profile("tpu-v5e")
    for sizes, physical in (((8,), "4x4"), ((8,), "2x2x2"), ((8,), "two"), ((8,), "0x8"), ((0,), None)):
        with pytest.raises(InputShapeError, match="Received"):
            MeshLinks.create(profile, ("a",), sizes, physical)
    with pytest.raises(InputShapeError, match="distinct name"):
        MeshLinks.create(profile, ("a", "a"), (2, 4))
    with pytest.raises(InputShapeError, match="torus"):
        MeshLinks.create(load_profile("h100"), ("a",), (8,), "2x4")
    model = costs("tpu-v5e", (2, 4))
    with pytest.raises(InputShapeError, match=r"all-gather, .*Received: 'gossip'"):
        model.seconds("gossip", (0,), 1)
    for axes in ((2,), (-1,), (0, 0)):
        with pytest.raises(InputShapeError, match="distinct indices"):
            model.seconds(AG, axes, 1)
    with pytest.raises(InputShapeError, match="Received"):
        ring_bytes_per_device("gossip", 2, 1)


# ---------------------------------------------------------------------------------------------------------------
# Properties

mesh_sizes = st.lists(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 16)), min_size=1, max_size=4).map(tuple)
any_profile = st.sampled_from(profiles())
any_kind = st.sampled_from(COLLECTIVE_KINDS)


def subsets(n: int) -> list[tuple[int, ...]]:
    return [axes for k in range(n + 1) for axes in itertools.combinations(range(n), k)]


@given(any_profile, mesh_sizes, any_kind, st.data())
@settings(deadline=None, max_examples=300, derandomize=True)
def test_any_mesh_has_finite_costs_that_grow_with_bytes(
    profile: str, sizes: tuple[int, ...], kind: str, data: st.DataObject
) -> None:
    model = costs(profile, sizes)
    axes = data.draw(st.sampled_from(subsets(len(sizes))))
    payload = np.sort(np.array(data.draw(st.lists(st.integers(0, 10**12), min_size=2, max_size=8))))
    seconds = model.seconds_array(kind, axes, payload)
    assert seconds.tolist() == [model.seconds(kind, axes, size) for size in payload.tolist()]
    if math.prod(sizes[axis] for axis in axes) == 1:
        assert not seconds.any()
        return
    assert np.isfinite(seconds).all()
    assert (seconds[payload > 0] > 0).all()
    assert (seconds[payload == 0] == 0).all()
    assert (np.diff(seconds)[np.diff(payload) > 0] > 0).all()


@given(any_profile, any_kind, st.integers(0, 10**11), st.data())
@settings(deadline=None, max_examples=200, derandomize=True)
def test_a_larger_group_on_links_of_one_kind_is_never_cheaper(
    profile: str, kind: str, payload: int, data: st.DataObject
) -> None:
    """A longer line or ring of a torus, more members of a switch or a shared bus, more whole nodes."""
    hardware = load_profile(profile)
    small, large = sorted(data.draw(st.tuples(st.integers(1, 64), st.integers(1, 64))))
    if hardware.torus is not None:
        wraps = data.draw(st.booleans())
        torus = replace(hardware.torus, wrap_rule="all-multiples-of", wrap_size=1 if wraps else 10**6, ring_shapes=())
        hardware = replace(hardware, torus=torus, domain_devices=10**6)
        chips = ["x".join(["1"] * (torus.dims - 1) + [str(n)]) for n in (small, large)]
        pair = [
            costs(hardware, (n, torus.cores_per_chip), shape) for n, shape in zip((small, large), chips, strict=True)
        ]
        assert len(pair[1].links.group((0,)).segments) == (large > 1)
    elif data.draw(st.booleans()):
        small, large = min(small, hardware.domain_devices), min(large, hardware.domain_devices)
        pair = [costs(hardware, (n,)) for n in (small, large)]
    else:
        pair = [costs(hardware, (n, hardware.domain_devices)) for n in (min(small, 12), min(large, 12))]
    assert pair[0].seconds(kind, (0,), payload) <= pair[1].seconds(kind, (0,), payload) * (1 + 1e-12)


@given(
    any_profile,
    st.lists(st.sampled_from((1, 2, 4, 8, 16)), min_size=1, max_size=4).map(tuple),
    st.sampled_from((AG, RS, AR, A2A)),
    st.integers(1, 10**10),
    st.data(),
)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_spanning_another_axis_is_never_cheaper_for_the_same_shard(
    profile: str, sizes: tuple[int, ...], kind: str, shard: int, data: st.DataObject
) -> None:
    """Gathering the same shards from more devices, or reducing to the same shards, moves more bytes.

    Nodes are filled evenly here: where a group straddles nodes unevenly, its smallest part decides.
    """
    model = costs(profile, sizes)
    axes = data.draw(st.sampled_from(subsets(len(sizes))))
    more = data.draw(st.sampled_from([wider for wider in subsets(len(sizes)) if set(axes) <= set(wider)]))
    n, m = (1 if kind == A2A else math.prod(sizes[axis] for axis in chosen) for chosen in (axes, more))
    assert model.seconds(kind, axes, shard * n) <= model.seconds(kind, more, shard * m) * (1 + 1e-12)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("profile", [name for name in profiles() if load_profile(name).torus is None])
def test_every_size_inside_a_node_is_in_order(profile: str, kind: str) -> None:
    """Also where the switch starts to reduce."""
    hardware = load_profile(profile)
    sizes = range(1, min(hardware.domain_devices, 80) + 1)
    seconds = [costs(hardware, (n,)).seconds(kind, (0,), 64 * MIB) for n in sizes]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)


def test_axes_are_a_set() -> None:
    model = costs("tpu-v5p", (4, 2, 8))
    assert model.seconds(AG, (2, 0), MIB) == model.seconds(AG, (0, 2), MIB)
    assert model.seconds(AR, (), MIB) == 0


def test_declared_overlap_is_left_out() -> None:
    whole = costs("h100", (8,))
    half = costs("h100", (8,), overlap_by_kind={AG: 0.5})
    assert half.seconds(AG, (0,), GIB) == pytest.approx(whole.seconds(AG, (0,), GIB) / 2)
    assert half.seconds(RS, (0,), GIB) == whole.seconds(RS, (0,), GIB)


@pytest.mark.parametrize(
    ("kind", "n", "expected"),
    [(AR, 8, 1750.0), (AG, 8, 875.0), (RS, 4, 750.0), (A2A, 2, 500.0), (CP, 8, 1000.0), (AR, 1, 0.0), (CP, 1, 0.0)],
)
def test_ring_bytes(kind: str, n: int, expected: float) -> None:
    assert ring_bytes_per_device(kind, n, 1000) == expected


@pytest.mark.parametrize("name", ["h100", "h200", "a100-80", "b200", "l4", "tpu-v5e"])
@pytest.mark.parametrize("payload_bytes", [1, 10_000, 10**8])
def test_an_all_reduce_is_never_faster_than_the_reduce_scatter_that_compilers_make_of_it_and_a_cut(
    name: str, payload_bytes: int
) -> None:
    model = costs(name, (2, 4))
    for axes in ((0,), (1,), (0, 1)):
        assert model.seconds(AR, axes, payload_bytes) > model.seconds(RS, axes, payload_bytes) * (1 - 1e-12)


def test_eight_gpus_all_reduce_as_fast_as_measured() -> None:
    """The measured intercept, 31 us, is more than that of a reduce-scatter, so nothing raises it."""
    assert costs("h100", (8,)).alpha_beta(AR, (0,))[0] == pytest.approx(31e-6)
