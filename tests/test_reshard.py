"""Resharding: the priced sequence of steps is what XLA does, byte for byte."""

from __future__ import annotations

import itertools
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.costs.collectives import CollectiveCosts
from autoshard_ilp.costs.profile import load_profile
from autoshard_ilp.costs.reshard import seconds, steps
from autoshard_ilp.costs.reshard_tables import ReshardTables
from autoshard_ilp.costs.topology import MeshLinks
from autoshard_ilp.enforce.moved import move
from autoshard_ilp.sharding import PARTIAL, WHOLE, divides, divisible_layouts, local_bytes
from autoshard_ilp.strategies import layouts_of
from compiled import NAMES, SIZES, mesh_of, needs_cuda, predicted, sent, sharding

SHAPE = (512, 1024, 64)


def _costs(name: str = "h100", sizes: tuple[int, ...] = SIZES) -> CollectiveCosts:
    names = ("a", "b", "c", "d")[: len(sizes)]
    return CollectiveCosts(MeshLinks.create(load_profile(name), names, sizes))


def _line(start: tuple[int, ...], end: tuple[int, ...]) -> str:
    found = steps(SHAPE, 2, start, end, SIZES, _costs())
    return " ; ".join(f"{s.kind} {s.axes} {int(s.payload_bytes)}" for s in found)


@pytest.mark.parametrize(
    ("start", "end", "line"),
    [
        ((0, 1), (0, 1), ""),
        ((-1, -1), (0, 1), "slice (0,) 0 ; slice (1,) 0"),
        ((0, 1), (0, -1), "all-gather (1,) 33554432"),
        ((0, 0), (-1, -1), "all-gather (0, 1) 67108864"),
        ((0, 1), (1, 1), "all-to-all (0,) 8388608 ; collective-permute (0, 1) 8388608"),
        ((-1, 0), (-1, 1), "all-to-all (1,) 16777216"),
        ((-1, 0), (1, 0), "slice (0,) 0"),
        ((0, 0), (-1, 0), "all-gather (0,) 16777216 ; collective-permute (0, 1) 8388608"),
        ((0, -1), (-1, 1), "slice (1,) 0 ; all-gather (0,) 16777216"),
    ],
)
def test_steps(start, end, line):
    assert _line(start, end) == line


def _pairs(seed: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    layouts = divisible_layouts(SHAPE, SIZES)
    pairs = [(a, b) for a, b in itertools.product(layouts, layouts) if a != b]
    return random.Random(seed).sample(pairs, count)


UNEVEN = (64, 1003)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(2))
def test_uneven_dimensions_are_sent_as_priced(seed):
    """Shards of 1003 elements over 2, 4 and 8 devices do not line up: gathered whole, then cut."""
    mesh = mesh_of("h100:8")
    layouts = layouts_of(UNEVEN, SIZES)
    pairs = [(a, b) for a, b in itertools.permutations(layouts, 2) if 1 in a or 1 in b]
    for start, end in random.Random(seed).sample(pairs, 6):
        path = steps(UNEVEN, 2, start, end, SIZES, _costs())
        between = tuple(dict.fromkeys(step.after for step in path))

        def walk(x, start=start, between=between):
            x = jax.lax.with_sharding_constraint(x * 2, sharding(mesh, start, 2))
            for now, after in itertools.pairwise((start, *between)):
                moved = move(x, now, after, mesh, NAMES)
                x = jax.lax.with_sharding_constraint(x, sharding(mesh, after, 2)) if moved is None else moved
            return x + 1

        got = sent(walk, mesh, [UNEVEN], [(WHOLE, WHOLE)], end) if divides(UNEVEN, end, SIZES) else None
        if got is None:  # results must divide: the last layout is left behind a sum
            got = sent(lambda x, f=walk: f(x).sum(axis=1), mesh, [UNEVEN], [(WHOLE, WHOLE)], (WHOLE, WHOLE))
            got = {k: v for k, v in got.items() if k != "all-reduce" and v > 256}
        want = predicted([(s.kind, s.axes, s.payload_bytes) for s in path if s.kind != "slice"])
        assert want.keys() <= got.keys(), (start, end, want, got)
        assert all(abs(want[k] - got[k]) <= 0.02 * want[k] + 256 for k in want), (start, end, want, got)


BETWEEN = (64, 300)
"""300 divides by 2 and by 4, but not by all 8 devices."""


@pytest.mark.parametrize(
    ("start", "end", "line"),
    [
        ((WHOLE, 1), (1, 0), "all-to-all (1,) 19200 ; slice (0,) 0"),
        ((1, WHOLE), (WHOLE, 1), "all-gather (0,) 76800 ; slice (1,) 0"),
        ((1, 0), (WHOLE, 1), "all-gather (0,) 19200 ; all-gather (1,) 76800 ; slice (1,) 0"),
        ((WHOLE, WHOLE), (0, 1), "slice (0,) 0 ; slice (1,) 0"),
    ],
)
def test_what_does_not_divide_in_between_is_cut_last_or_gathered(start, end, line):
    path = steps(BETWEEN, 4, start, end, SIZES, _costs())
    assert " ; ".join(f"{s.kind} {s.axes} {s.payload_bytes:.0f}" for s in path) == line


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2), (2, 3, 2, 2)])
@pytest.mark.parametrize("shape", [BETWEEN, (12, 20), (300, 6, 50)])
def test_every_step_between_layouts_that_divide_divides(shape, sizes):
    layouts = divisible_layouts(shape, sizes)
    pairs = list(itertools.permutations(layouts, 2))
    for start, end in random.Random(0).sample(pairs, min(600, len(pairs))):
        path = steps(shape, 4, start, end, sizes, _costs("h100", sizes))
        assert all(divides(shape, step.after, sizes) for step in path), (start, end, path)
        assert path[-1].after == end


@needs_cuda
@pytest.mark.cuda
def test_gpu_compiler_sends_what_is_priced_where_it_does_not_divide_in_between():
    mesh = mesh_of("h100:8")
    for start, end in [((WHOLE, 1), (1, 0)), ((1, WHOLE), (0, 1)), ((0, 1), (1, WHOLE))]:
        path = steps(BETWEEN, 2, start, end, SIZES, _costs())

        def walk(x, start=start, path=path):
            x = jax.lax.with_sharding_constraint(jax.numpy.sin(x), sharding(mesh, start, 2))
            for now, after in itertools.pairwise((start, *dict.fromkeys(step.after for step in path))):
                moved = move(x, now, after, mesh, NAMES)
                x = jax.lax.with_sharding_constraint(x, sharding(mesh, after, 2)) if moved is None else moved
            return jax.numpy.cos(x)

        want = predicted([(s.kind, s.axes, s.payload_bytes) for s in path if s.kind != "slice"])
        assert sent(walk, mesh, [BETWEEN], [start], end) == pytest.approx(want, rel=0.01), (start, end)


def test_uneven_shards_are_gathered_with_their_padding():
    path = steps((64, 84), 4, (1, 1), (WHOLE, WHOLE), SIZES, _costs())
    assert [(s.kind, s.payload_bytes) for s in path] == [("all-gather", 64 * 88 * 4)], "eight shards of 11 columns"
    alone = ReshardTables(SIZES, _costs()).table((64, 84), 4, ((1, 1),), ((WHOLE, WHOLE),))[0].item()
    assert alone == pytest.approx(_costs().seconds("all-gather", (0, 1), 64 * 88 * 4), rel=1e-9)


@needs_cuda
@pytest.mark.cuda
def test_the_compiler_gathers_the_padding_too():
    mesh = mesh_of("h100:8")

    def columns(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, sharding(mesh, (1, 1), 2))
        return jax.lax.with_sharding_constraint(y, sharding(mesh, (WHOLE, WHOLE), 2))

    whole = (WHOLE, WHOLE)
    got = sent(columns, mesh, [(64, 32), (32, 84)], [whole, whole], whole)
    (step,) = steps((64, 84), 2, (1, 1), whole, SIZES, _costs())
    assert got == predicted([(step.kind, step.axes, step.payload_bytes)])


def test_what_is_gathered_on_the_way_counts_as_held():
    tables = ReshardTables(SIZES, _costs())
    (held,) = tables.table(UNEVEN, 2, ((WHOLE, 1),), ((1, 1),))[1][0]
    assert held == 64 * 1003 * 2, "1003 over 4 devices becomes 1003 over 8: whole in between"
    assert tables.table((64, 1024), 2, ((WHOLE, 1),), ((1, 1),))[1][0, 0] == 64 * 1024 * 2 // 8


def _compiled_mismatches(target: str, pairs: list) -> list:
    mesh = mesh_of(target)
    wrong = []
    for start, end in pairs:
        path = steps(SHAPE, 2, start, end, SIZES, _costs())

        def walk(x, start=start, path=path):
            x = jax.lax.with_sharding_constraint(x * 2, sharding(mesh, start, 3))
            for step in path:
                x = jax.lax.with_sharding_constraint(x, sharding(mesh, step.after, 3))
            return x + 1

        want = predicted([(s.kind, s.axes, s.payload_bytes) for s in path if s.kind != "slice"])
        got = sent(walk, mesh, [SHAPE], [start], end)
        if want.keys() != got.keys() or any(abs(want[k] - got[k]) > 0.01 * want[k] for k in want):
            wrong.append((start, end, want, got))
    return wrong


@needs_cuda
@pytest.mark.cuda
def test_gpu_compiler_sends_what_is_priced():
    assert not _compiled_mismatches("h100:8", _pairs(0, 40))


@needs_cuda
@pytest.mark.cuda
@pytest.mark.slow
def test_gpu_compiler_sends_what_is_priced_for_every_pair():
    assert not _compiled_mismatches("h100:8", _pairs(0, 240))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(data=st.data())
def test_tables_agree_with_single_prices(data):
    """Every pair of layouts, even or not, on up to four mesh axes."""
    sizes = data.draw(st.sampled_from([(8,), (2, 4), (4, 3), (2, 2, 2), (2, 1, 4), (2, 3, 2, 2)]))
    extents = st.lists(st.sampled_from([0, 1, 3, 8, 10, 12, 16, 40, 1003]), min_size=1, max_size=3)
    shape, itemsize = tuple(data.draw(extents)), data.draw(st.sampled_from([0.5, 2, 4]))
    costs = _costs(data.draw(st.sampled_from(["tpu-v5e", "h100", "l4"])), sizes)
    every = list(itertools.product(range(WHOLE, len(shape)), repeat=len(sizes)))
    random.Random(data.draw(st.integers(0, 99))).shuffle(every)
    starts, ends = tuple(every[:12]), tuple(every[-12:])
    found, copies = ReshardTables(sizes, costs).table(shape, itemsize, starts, ends)
    for (i, a), (j, b) in itertools.product(enumerate(starts), enumerate(ends)):
        path = steps(shape, itemsize, a, b, sizes, costs)
        assert found[i, j] == pytest.approx(seconds(path, costs), rel=1e-12), (a, b)
        assert copies[i, j] == max((local_bytes(shape, itemsize, s.after, sizes) for s in path), default=0), (a, b)


def test_partial_sums_are_not_resharded():
    layouts = ((PARTIAL, WHOLE), (PARTIAL, 0), (0, WHOLE))
    found, copies = ReshardTables(SIZES, _costs()).table((64,), 4, layouts, layouts)
    assert np.isinf(found).tolist() == [[False, True, True], [True, False, True], [True, True, False]]
    assert not np.diag(found).any() and not np.diag(copies).any()


def test_what_only_cuts_sends_nothing():
    """But where a later mesh axis keeps sharding the same dimension, whose shards then change places."""
    layouts = divisible_layouts((8, 16), (2, 4))
    found, _ = ReshardTables((2, 4), _costs("tpu-v5e", (2, 4))).table((8, 16), 4, layouts, layouts)
    for (i, a), (j, b) in itertools.product(enumerate(layouts), enumerate(layouts)):
        only_cut = all(x in (WHOLE, y) for x, y in zip(a, b, strict=True))
        in_order = not (a[0] == WHOLE and a[1] == b[1] == b[0] != WHOLE)
        assert (found[i, j] == 0) == (only_cut and in_order)
