"""Strategies: which exist, and that XLA's program of one sends what it was priced at."""

from __future__ import annotations

import jax
import pytest

from autoshard_ilp.costs.resolution import resolution_payloads
from autoshard_ilp.rules import rule_for
from autoshard_ilp.rules.rule import Factor, Kind, OpView, Rule
from autoshard_ilp.sharding import WHOLE
from autoshard_ilp.strategies import hub_strategies, layouts_of, strategies_of
from compiled import SIZES, mesh_of, needs_cuda, predicted, sent, sharding

A, B, OUT = (1024, 2048), (2048, 4096), (1024, 4096)


def _dot() -> Rule:
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": None, "preferred_element_type": None}
    return rule_for(OpView("dot_general", (A, B), (OUT,), ("bfloat16",) * 2, ("bfloat16",), params))


def test_a_matrix_product_has_every_classic_layout():
    found = {
        (s.operands, s.results[0], tuple(r.kind for r in s.resolutions))
        for s in strategies_of(_dot(), [A, B], [OUT], SIZES)
    }
    data_parallel = (((0, WHOLE), (WHOLE, WHOLE)), (0, WHOLE), ())
    column = (((0, WHOLE), (WHOLE, 1)), (0, 1), ())
    row = (((0, 1), (WHOLE, 0)), (0, WHOLE), ("all-reduce",))
    row_scattered = (((0, 1), (WHOLE, 0)), (0, 1), ("reduce-scatter",))
    assert {data_parallel, column, row, row_scattered} <= found


def test_only_major_factors_are_sharded():
    rule = Rule(((("h", "d"),),), ((("h",), ("d",)),), {"h": Factor(8), "d": Factor(64)})
    layouts = {s.operands[0] for s in strategies_of(rule, [(512,)], [(8, 64)], (2, 4))}
    assert layouts == {(-1, -1), (0, -1), (-1, 0), (0, 0)}
    assert all(1 not in s.results[0] for s in strategies_of(rule, [(512,)], [(8, 64)], (2, 4)))


def test_uneven_dimensions_only_inside_and_only_when_padding_is_small():
    rule = Rule(((("v",),),), ((("v",),),), {"v": Factor(50257)})
    assert len(strategies_of(rule, [(50257,)], [(50257,)], (4,))) == 2
    assert len(strategies_of(rule, [(50257,)], [(50257,)], (4,), even=True)) == 1
    tiny = Rule(((("v",),),), ((("v",),),), {"v": Factor(5)})
    assert len(strategies_of(tiny, [(5,)], [(5,)], (4,))) == 1
    assert layouts_of((50257, 8), (4,)) == ((-1,), (0,), (1,))
    uneven = next(s for s in strategies_of(rule, [(50257,)], [(50257,)], (4,)) if s.operands[0] == (0,))
    assert uneven.fraction == 12565 / 50257


def test_replicated_and_halo_factors_stay_whole():
    factors = {"n": Factor(8), "x": Factor(16, Kind.PERMUTATION), "c": Factor(4, Kind.REPLICATE)}
    rule = Rule(((("n",), ("x",), ("c",)),), ((("n",), ("x",), ("c",)),), factors)
    assert {s.operands[0] for s in strategies_of(rule, [(8, 16, 4)], [(8, 16, 4)], (4,))} == {(-1,), (0,)}


def test_max_is_never_scattered():
    factors = {"a": Factor(8), "k": Factor(8, Kind.REDUCTION, "max")}
    rule = Rule(((("a",), ("k",)),), ((("a",),),), factors)
    found = [r.kind for s in strategies_of(rule, [(8, 8)], [(8,)], (4,)) for r in s.resolutions]
    assert found == ["all-reduce"]


def test_axes_of_size_one_shard_nothing():
    assert all(s.operands[0][0] == WHOLE for s in strategies_of(_dot(), [A, B], [OUT], (1, 4)))


def test_hubs_copy_afresh_or_reuse():
    fresh = hub_strategies((8, 8), (2, 4), may_reuse=False)
    both = hub_strategies((8, 8), (2, 4), may_reuse=True)
    assert len(both) == 2 * len(fresh) == 18
    assert [s.results for s in both if s.operands[0] is None] == [s.results for s in fresh]


@needs_cuda
@pytest.mark.cuda
def test_gpu_compiler_sends_what_strategies_are_priced_at():
    """Every strategy of a product. One kind is left out: a scatter while another axis computes copies of the same, for
    which XLA prefers an all-reduce and a permute; such strategies waste compute and are not chosen."""
    mesh = mesh_of("h100:8")
    wrong = []
    for s in strategies_of(_dot(), [A, B], [OUT], SIZES):
        idle = [i for i in (0, 1) if all(lay[i] == WHOLE for lay in s.operands)]
        if idle and any(r.kind == "reduce-scatter" for r in s.resolutions):
            continue

        def product(a, b, s=s):
            a = jax.lax.with_sharding_constraint(a * 2, sharding(mesh, s.operands[0], 2))
            b = jax.lax.with_sharding_constraint(b * 2, sharding(mesh, s.operands[1], 2))
            return jax.lax.with_sharding_constraint(a @ b, sharding(mesh, s.results[0], 2)) + 1

        want = predicted(resolution_payloads(s, OUT, 2, SIZES))
        got = sent(product, mesh, [A, B], s.operands, s.results[0])
        if want.keys() != got.keys() or any(abs(want[k] - got[k]) > 0.01 * want[k] for k in want):
            wrong.append((s, want, got))
    assert not wrong
