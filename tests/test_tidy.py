"""The compiled tidying of a factor says and does what the operations on any factor do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.program.kernels.tidy import ALIKE, COLUMNS, COMPRESSED, ROWS, SOME, tidy_pair
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Net


@st.composite
def pairs(draw: st.DrawFn) -> Net:
    """Two nodes and a factor; some strategies are gone, some labels nobody's, some cells infinite, some rows alike."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    table = rng.choice(draw(st.sampled_from([[0.0, 1.0], [0.0, 0.5, 2.0, 3.25], [0.1, 0.2, 0.3]])), shape)
    table[rng.random(shape) < draw(st.sampled_from([0.0, 0.3]))] = np.inf
    if draw(st.booleans()):
        table += rng.random((shape[0], 1)) + rng.random(shape[1])
    net = Net(2)
    labels = []
    for v, count in enumerate(shape):
        size = count + draw(st.integers(0, 3))
        labels.append(rng.integers(0, count, size))
        cost = rng.random(size)
        cost[rng.random(size) < 0.2] = np.inf
        cost[0] = 1.0
        net.set_cost(v, cost)
    net.add(Factor((0, 1), tuple(labels), table))
    return net


@given(pairs())
@settings(deadline=None, max_examples=300, derandomize=True)
def test_a_pair_is_tidied_as_by_single_steps(net: Net) -> None:
    f, alive = net.factors[0], [a.copy() for a in net.alive]
    given_table = f.table.copy()
    flags, table, u_labels, v_labels, of_rows, of_columns = tidy_pair(
        f.table, f.labels[0], f.labels[1], alive[0], alive[1], reduce.ROUNDING
    )
    assert np.array_equal(f.table, given_table), "what is given does not change"
    assert bool(flags & COMPRESSED) == reduce.compress(net, 0)
    before, costs = net.factors[0], [c.copy() for c in net.cost]
    try:
        reduce.normalise(net, 0)
    except EmptyNodeError:
        return
    after = net.factors[0]
    assert np.array_equal(table, after.table)
    for own, other in zip((u_labels, v_labels), before.labels, strict=True):
        assert np.array_equal(own, other)
    assert bool(flags & (ROWS | COLUMNS)) == (after is not before)
    for v, moved, least, flag in ((0, u_labels, of_rows, ROWS), (1, v_labels, of_columns, COLUMNS)):
        assert bool(flags & flag) == bool(least.any())
        assert np.array_equal(costs[v][alive[v]] + least[moved[alive[v]]], net.cost[v][alive[v]])
    assert bool(flags & SOME) == bool(after.table.any())
    if not flags & ALIKE and all(len(a) == len(b) for a, b in zip(alive, net.alive, strict=True)):
        assert not (flags & SOME and reduce.merge_equal_labels(net, 0))


@pytest.mark.parametrize("axis", [0, 1])
def test_equal_labels_are_seen(axis: int) -> None:
    table = np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [5.0, 0.0, 1.0]])
    table = table if axis == 0 else table.T.copy()
    places = [np.arange(n) for n in table.shape]
    assert tidy_pair(table, *places, *places, reduce.ROUNDING)[0] & ALIKE
