"""Golden lines of the sharding rules, and the registry."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.errors import AutoshardError
from autoshard_ilp.rules import Kind, OpView, register, registered, rule_for
from autoshard_ilp.rules.registry import misfits
from autoshard_ilp.rules.windows import Window, real_taps
from rule_cases import CASES, Case

# Primitives that Keras and KerasHub models were seen to emit (backbones, applications, optimizers, losses, layers).
SEEN = """
abs add add_any and argmax bitcast_convert_type broadcast_in_dim ceil concatenate cond conv_general_dilated
convert_element_type copy cos cumsum div dot_general dynamic_slice dynamic_update_slice eq erf_inv erfc exp expm1 floor
gather ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad pow random_bits
random_wrap reduce_and reduce_max reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_sum rem reshape rev
rsqrt scan scatter scatter-add select_and_scatter_add select_n shift_right_arithmetic shift_right_logical sign sin slice
sort split sqrt square squeeze stack stop_gradient sub tanh tile top_k transpose unstack jit custom_jvp_call remat2
sharding_constraint while
""".split()  # noqa: SIM905
INLINED = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint", "scan", "cond", "while"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_prints(case: Case) -> None:
    call = case.call()
    rule = rule_for(call.view)
    assert str(rule) == case.expected
    assert rule.known
    if case.flops is not None:
        assert rule.flops == case.flops


def test_every_seen_primitive_has_a_rule() -> None:
    assert set(SEEN) - INLINED - set(registered()) == set()


def view(primitive: str, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]], **params: object) -> OpView:
    return OpView(primitive, tuple(ins), tuple(outs), ("float32",) * len(ins), ("float32",) * len(outs), params)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (view("argument", [], [(4, 6)]), "() -> (a b)"),
        (view("constant", [], [(4,)]), "() -> (a)"),
        (view("empty2", [], [()]), "() -> ()"),
        (view("result", [(4, 6)], []), "(a b) -> ()"),
        (view("loop_slice", [(5, 4, 6)], [(4, 6)]), "(t a b) -> (a b) replicate={t}"),
        (view("loop_stack", [(4, 6)], [(5, 4, 6)]), "(a b) -> (t a b) replicate={t}"),
        (view("loop_invariant", [(4, 6)], [(4, 6)]), "(a b) -> (a b)"),
        (view("loop_carry", [(4, 6), (4, 6)], [(4, 6), (4, 6)]), "(a b, a b) -> (a b, a b)"),
        (view("branch_merge", [(4, 6)] * 3, [(4, 6)]), "(a b, a b, a b) -> (a b)"),
        (view("hub", [(4, 6)], [(4, 6)]), "(a b) -> (a b)"),
        (view("tie", [(3,), (4, 6)], [(4, 6)]), "(a, b c) -> (b c)"),
        (view("sharding_constraint", [(4, 6)], [(4, 6)]), "(a b) -> (a b)"),
        (view("debug_callback", [(4, 6)], []), "(a b) -> () replicate={a,b}"),
        (view("concatenate", [(4, 6)], [(4, 6)], dimension=1), "(a b) -> (a b)"),
        (view("add", [(0, 4), (0, 4)], [(0, 4)]), "(a b, a b) -> (a b) replicate={a,b}"),
        (view("reduce_max", [(4,)], [()], axes=(0,)), "(a) -> () reduction={a:max}"),
    ],
    ids=lambda x: x.primitive if isinstance(x, OpView) else "",
)
def test_operations_without_a_jaxpr(op: OpView, expected: str) -> None:
    assert str(rule_for(op)) == expected


def test_random_bits_of_an_order_dependent_generator_stay_whole() -> None:
    op = OpView("random_bits", ((),), ((4, 6),), ("key<rbg>",), ("uint32",), {})
    assert str(rule_for(op)) == "() -> (a b) replicate={a,b}"


def test_partial_maxima_of_complex_numbers_are_not_combined() -> None:
    op = OpView("reduce_max", ((4, 6),), ((4,),), ("complex64",), ("complex64",), {"axes": (1,)})
    assert str(rule_for(op)) == "(a b) -> (a) replicate={b}"


def test_unknown_primitive_is_kept_whole() -> None:
    rule = rule_for(view("never_heard_of", [(4, 6), ()], [(4,)]))
    assert str(rule) == "(a b, ) -> (c) replicate={a,b,c} unknown"
    assert not rule.known
    assert {f.kind for f in rule.factors.values()} == {Kind.REPLICATE}


@pytest.mark.parametrize(
    "op",
    [
        view("add", [(4, 6), (6,)], [(4, 6)]),  # ranks that no elementwise primitive has
        view("reshape", [(24,), ()], [(4, 6)]),  # a size that is known only when the program runs
        view("transpose", [(4, 6), (4, 6)], [(6, 4)], permutation=(1, 0)),  # an operand the rule has not heard of
    ],
    ids=lambda op: op.primitive,
)
def test_variant_that_a_rule_does_not_cover_is_unknown(op: OpView) -> None:
    assert not rule_for(op).known


def test_second_rule_for_a_name_is_an_error() -> None:
    with pytest.raises(AutoshardError, match="second one for 'dot_general'"):
        register("dot_general")(rule_for)


def test_rules_do_not_import_jax() -> None:
    code = "import sys, autoshard_ilp.rules; sys.exit('jax' in sys.modules or 'keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.data())
def test_reshape_rule_fits_both_shapes(data: st.DataObject) -> None:
    """Both shapes are products of their factors, and every passing factor occurs on both sides."""
    primes = data.draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), max_size=6))

    def shape() -> tuple[int, ...]:
        sizes = [1] * data.draw(st.integers(1, 4))
        for p in data.draw(st.permutations(primes)):
            sizes[data.draw(st.integers(0, len(sizes) - 1))] *= p
        return tuple(sizes)

    op = view("reshape", [shape()], [shape()], dimensions=None)
    rule = rule_for(op)
    assert rule.known
    assert misfits(op, rule) == []
    sides = [[f for dim in dims for f in dim] for dims in (rule.operands[0], rule.results[0])]
    for name, factor in rule.factors.items():
        assert (factor.kind is Kind.PASS) == (name in sides[0] and name in sides[1])


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(-1, 3), st.integers(-1, 3), st.integers(1, 3),
    st.integers(1, 2),
)  # fmt: skip
def test_real_taps_counts_what_a_plain_loop_counts(
    n_in: int, size: int, stride: int, low: int, high: int, in_dilation: int, dilation: int
) -> None:
    row: list[bool] = [False] * max(low, 0)
    for i in range(n_in):
        row += [True] + [False] * ((in_dilation - 1) if i < n_in - 1 else 0)
    row += [False] * max(high, 0)
    row = row[max(-low, 0) : len(row) - max(-high, 0)]
    window = Window(size, stride, low, high, in_dilation, dilation)
    starts = range(0, len(row) - window.extent + 1, stride)
    expected = sum(row[s + k * dilation] for s in starts for k in range(size))
    assert real_taps(n_in, len(starts), window) == expected
