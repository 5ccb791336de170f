"""Reading compiled HLO: golden text for every notation and asynchronous form, closed forms on XLA:CPU."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard_ilp.verify.flops import matmul_flops
from autoshard_ilp.verify.hlo import parse_collectives, ring_bytes
from autoshard_ilp.verify.hlo_text import element_bits, parse_module, type_bytes
from autoshard_ilp.verify.replica_groups import (
    IRREGULAR,
    connected,
    mesh_axes_of,
    mesh_axes_of_pairs,
    parse_groups,
    parse_pairs,
    within_one_axis,
)
from autoshard_ilp.verify.trip_count import _runs

HEAD = "HloModule m, is_scheduled=true, num_partitions=8\n\n"


def module(entry: str, *others: str) -> str:
    """HLO text with the given entry body and other computations."""
    return HEAD + "\n\n".join(others) + "\n\nENTRY %main (p: f32[16]) -> f32[16] {\n" + entry.strip("\n") + "\n}\n"


def found(text: str) -> list[tuple[str, int, int]]:
    """``(kind, bytes per device, count)`` of every collective."""
    return [(c.kind, c.bytes_per_device, c.count) for c in parse_collectives(text)]


# --- replica groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0, 2}, {1, 3}}", ((0, 2), (1, 3))),
        ("{}", (tuple(range(8)),)),
        ("{{0,1,2},{3}}", ((0, 1, 2), (3,))),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a','b'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=4] {}", tuple((d,) for d in range(8))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'a'}", ((3, 1), (2, 0))),
    ],
)
def test_every_notation_of_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 8) == groups


@pytest.mark.parametrize("text", ["bananas", "[4,2]", "mesh(a)"])
def test_unknown_notation_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="replica groups"):
        parse_groups(text, 8)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_notations_agree_and_axes_come_back(shape: list[int], data: st.DataObject) -> None:
    names = [f"ax{i}" for i in range(len(shape))]
    chosen = [i for i in range(len(shape)) if data.draw(st.booleans())]
    still = [i for i in range(len(shape)) if i not in chosen]
    width = math.prod(shape[i] for i in chosen)
    rows = np.arange(math.prod(shape)).reshape(shape).transpose(still + chosen).reshape(-1, width)
    explicit = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows.tolist()) + "}"
    order = ",".join(map(str, still + chosen))
    iota = f"[{rows.shape[0]},{width}]<=[{','.join(map(str, shape))}]T({order})"
    mesh = "mesh[" + ",".join(f"'{n}'={s}" for n, s in zip(names, shape, strict=True)) + "] {"
    mesh += ",".join(f"'{names[i]}'" for i in chosen) + "}"
    expected = tuple(map(tuple, rows.tolist()))
    total = math.prod(shape)
    assert parse_groups(explicit, total) == parse_groups(iota, total) == parse_groups(mesh, total) == expected
    assert mesh_axes_of(expected, shape, names) == tuple(names[i] for i in chosen if shape[i] > 1)


def test_groups_that_follow_no_axes_are_irregular() -> None:
    assert mesh_axes_of(((0, 1), (2, 3)), (2, 2), ("a", "b")) == ("b",)
    assert mesh_axes_of(((0, 3), (1, 2)), (2, 2), ("a", "b")) == IRREGULAR
    assert mesh_axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), (2, 4), ("a", "b")) == IRREGULAR  # half of an axis
    assert within_one_axis(((0, 1), (2, 3), (4, 5), (6, 7)), (2, 4), ("a", "b")) == ("b",)
    assert within_one_axis(((0, 5), (1, 4), (2, 7), (3, 6)), (2, 4), ("a", "b")) == IRREGULAR
    assert mesh_axes_of(((0, 1), (2,), (3,)), (2, 2), ("a", "b")) == IRREGULAR
    assert mesh_axes_of(((0, 9),), (2, 4), ("a", "b")) == IRREGULAR


def test_a_permutation_of_the_devices_is_undone() -> None:
    position = {0: 0, 1: 2, 2: 1, 3: 3}
    assert mesh_axes_of(((0, 1), (2, 3)), (2, 2), ("a", "b"), position=position) == ("a",)


def test_axes_of_a_permute() -> None:
    ring = parse_pairs("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}")
    assert mesh_axes_of_pairs(ring, (2, 4), ("a", "b")) == ("b",)
    assert connected(ring) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh_axes_of_pairs([(0, 5), (5, 0)], (2, 4), ("a", "b")) == ("a", "b")
    assert mesh_axes_of_pairs([(0, 0)], (2, 4), ("a", "b")) == ()
    assert connected([(0, 0), (1, 2)]) == ((1, 2),)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("f32[2,3]{1,0}", 24),
        ("bf16[128,256]{1,0:T(8,128)(2,1)S(1)}", 65536),
        ("(bf16[4]{0:T(256)(128)(2,1)}, (f32[2]{0}), token[], u32[]{:S(2)})", 8 + 8 + 4),
        ("s4[3]{0:E(4)}", 2),
        ("u2[8]", 2),
        ("f8e4m3fn[16]", 16),
        ("f4e2m1fn[16]", 8),
        ("pred[7]", 7),
        ("c128[2]", 32),
        ("f32[<=8,2]", 64),
    ],
)
def test_bytes_of_types(text: str, n_bytes: int) -> None:
    assert type_bytes(text) == n_bytes


def test_bits_of_elements() -> None:
    names = ("pred", "s4", "u8", "bf16", "f8e8m0fnu", "f64", "c64", "token")
    assert [element_bits(name) for name in names] == [8, 4, 8, 16, 8, 64, 64, 0]


# --- kinds and bytes --------------------------------------------------------------------------------------------------

PLAIN = [
    ("%c = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add", ("all-reduce", 96, 1)),
    ("%c = f32[64]{0} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", ("all-gather", 192, 1)),
    ("%c = f32[8]{0} reduce-scatter(%p), replica_groups={{0,1},{2,3}}, to_apply=%add", ("reduce-scatter", 32, 1)),
    ("%c = f32[16]{0} all-to-all(%p), replica_groups={}, dimensions={0}", ("all-to-all", 56, 1)),
    ("%c = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", ("collective-permute", 64, 1)),
    ("%c = f32[16]{0} collective-broadcast(%p), replica_groups={{0,1}}", ("collective-broadcast", 64, 1)),
    ("%c = (f32[16]{0}, f32[16]{0}) all-reduce(%p, %p), replica_groups={{0,1}}, to_apply=%a", ("all-reduce", 128, 1)),
    ("%c = (f32[16], f32[16]) all-to-all(%p, /*index=1*/%p), replica_groups={{0,1}}", ("all-to-all", 64, 1)),
    ("%c = f32[16]{0} all-reduce(f32[16]{0:T(8,128)} %p), replica_groups={{0,1}}, to_apply=%a", ("all-reduce", 64, 1)),
    ("c = f32[16]{0} all-reduce(p), replica_groups={{0,1}}, to_apply=a", ("all-reduce", 64, 1)),
    (
        "%c = f32[16]{0} ragged-all-to-all(%p, %p, %p, %p, %p, %p), replica_groups={{0,1}}",
        ("all-to-all", 32, 1),
    ),
    (
        "%c = f32[16] collective-permute(%p, %p, %p, %p), source_target_pairs={{0,1}}, slice_sizes={{1,4},{2}}",
        ("collective-permute", 24, 1),
    ),
]


@pytest.mark.parametrize(("line", "expected"), PLAIN)
def test_plain_collectives(line: str, expected: tuple[str, int, int]) -> None:
    parameter = "  %p = f32[16]{0} parameter(0)\n" if "%p" in line else "  p = f32[16]{0} parameter(0)\n"
    assert found(module(f"{parameter}  ROOT {line}")) == [expected]


def test_groups_of_one_device_send_nothing() -> None:
    body = """
  %p = f32[16]{0} parameter(0)
  %c = f32[16]{0} all-reduce(%p), replica_groups={{0},{1}}, to_apply=%add
  ROOT %d = f32[16]{0} collective-permute(%c), source_target_pairs={{0,0},{1,1}}
"""
    assert found(module(body)) == []


def test_unequal_groups_cost_what_the_largest_costs() -> None:
    line = (
        "  %p = f32[12]{0} parameter(0)\n  ROOT %c = f32[12] all-reduce(%p), replica_groups={{0,1,2},{3}}, to_apply=%a"
    )
    assert found(module(line)) == [("all-reduce", 64, 1)]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 10**9), st.integers(1, 512))
def test_ring_bytes_are_consistent(payload: int, size: int) -> None:
    scatter = ring_bytes("reduce-scatter", payload, size)
    assert scatter == ring_bytes("all-gather", payload, size) == ring_bytes("all-to-all", payload, size)
    assert 2 * scatter - 1 <= ring_bytes("all-reduce", payload, size) <= 2 * scatter
    assert (scatter == 0) == (size == 1)
    assert ring_bytes("all-reduce", payload, size + 1) >= ring_bytes("all-reduce", payload, size)


# --- asynchronous forms -----------------------------------------------------------------------------------------------


def test_start_and_done_count_once() -> None:
    body = """
  %p = f32[16]{0} parameter(0)
  %q = bf16[4]{0} parameter(1)
  %rs = f32[16]{0} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add
  %rd = f32[16]{0} all-reduce-done(%rs)
  %gs = (f32[16]{0}, f32[32]{0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}
  %gd = f32[32]{0} all-gather-done(%gs)
  %ms = ((f32[16], bf16[4]), (f32[32], bf16[8])) all-gather-start(%p, %q), replica_groups={{0,1}}, dimensions={0}
  %md = (f32[32], bf16[8]) all-gather-done(%ms)
  %ss = ((f32[16]{0}), f32[8]{0}) reduce-scatter-start(%p), replica_groups={{0,1}}, to_apply=%add
  %sd = f32[8]{0} reduce-scatter-done(%ss)
  %as = ((f32[16]{0}), f32[16]{0}) all-to-all-start(%p), replica_groups={{0,1}}, dimensions={0}
  %ad = f32[16]{0} all-to-all-done(%as)
  %cs = (f32[16]{0}, f32[16]{0}, u32[]{:S(2)}) collective-permute-start(%p), source_target_pairs={{0,1}}
  ROOT %cd = f32[16]{0} collective-permute-done(%cs)
"""
    assert found(module(body)) == [
        ("all-reduce", 64, 1),
        ("all-gather", 64, 1),
        ("all-gather", 64 + 8, 1),
        ("reduce-scatter", 32, 1),
        ("all-to-all", 32, 1),
        ("collective-permute", 64, 1),
    ]


def test_async_wrapper_counts_its_computation_once() -> None:
    wrapped = """%wrapped (a: f32[16]) -> f32[8] {
  %a = f32[16]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%a), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}, execution_thread="main\""""
    body = """
  %p = f32[16]{0} parameter(0)
  %s = ((f32[16]{0}), f32[8]{0}, u32[]) async-start(%p), async_execution_thread="main", calls=%wrapped
  %u = ((f32[16]{0}), f32[8]{0}, u32[]) async-update(%s), async_execution_thread="main", calls=%wrapped
  ROOT %d = f32[8]{0} async-done(%u), async_execution_thread="main", calls=%wrapped
"""
    assert found(module(body, wrapped)) == [("reduce-scatter", 32, 1)]


def test_tpu_all_reduce_scatter_fusion_is_a_reduce_scatter() -> None:
    fused = """%all-reduce-scatter.4 (a: f32[16], b: f32[16]) -> (f32[8], f32[8]) {
  %a = f32[16]{0:T(8,128)} parameter(0)
  %b = f32[16]{0:T(8,128)} parameter(1)
  %ar = (f32[16]{0}, f32[16]{0}) all-reduce(%a, %b), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %g = f32[16]{0} get-tuple-element(%ar), index=0
  %s = f32[8]{0} dynamic-slice(%g, %i), dynamic_slice_sizes={8}
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%s, %s)
}"""
    body = """
  %p = f32[16]{0} parameter(0)
  ROOT %f = (f32[8], f32[8]) fusion(%p, %p), kind=kCustom, calls=%all-reduce-scatter.4, metadata={op_name="jit(f)/dot"}
"""
    (collective,) = parse_collectives(module(body, fused))
    assert (collective.kind, collective.bytes_per_device, collective.op_name) == ("reduce-scatter", 64, "jit(f)/dot")
    unnamed = fused.replace("all-reduce-scatter.4", "fused.1").replace("(%g, %i)", "(%ar, %i)")
    one = unnamed.replace("ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%s, %s)", "").replace("%s = ", "ROOT %s = ")
    assert found(module(body.replace("all-reduce-scatter.4", "fused.1"), one)) == [("reduce-scatter", 64, 1)]


def overlapped(chain: int, channel: int) -> tuple[list[str], str]:
    """The three computations into which XLA:TPU spreads one all-gather, and the lines that call them."""
    gather = (
        f"all-gather(%a), channel_id={channel}, replica_groups={{{{0,1}}}}, dimensions={{0}}, "
        f'frontend_attributes={{chain_id="{chain}"}}'
    )
    names = [f"%{part}.{chain}" for part in ("start", "async_collective_fusion", "done")]
    computations = [
        f"""{names[0]} (a: f32[16]) -> (f32[16], f32[32]) {{
  %a = f32[16]{{0}} parameter(0)
  %g = f32[32]{{0}} {gather}
  ROOT %c = (f32[16]{{0}}, f32[32]{{0}}, u32[]{{:S(2)}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}""",
        f"""{names[1]} (a: f32[16]) -> (f32[16], f32[32]) {{
  %a = f32[16]{{0}} parameter(0)
  %g = f32[32]{{0}} {gather}
  ROOT %t = (f32[16]{{0}}, f32[32]{{0}}) tuple(%a, %g)
}}""",
        f"""{names[2]} (a: f32[16]) -> f32[32] {{
  %a = f32[16]{{0}} parameter(0)
  %g = f32[32]{{0}} {gather}
  ROOT %c = f32[32]{{0}} custom-call(%a, %g), custom_call_target="AsyncCollectiveDone"
}}""",
    ]
    lines = [f"  %f{chain}.{i} = f32[16] fusion(%p), kind=kCustom, calls={name}" for i, name in enumerate(names)]
    return computations, "\n".join(lines)


def test_tpu_overlapped_collective_counts_once_per_chain() -> None:
    first, first_lines = overlapped(0, 4)
    second, second_lines = overlapped(1, 4)  # shard_map gives every collective the same channel
    body = f"  %p = f32[16]{{0}} parameter(0)\n{first_lines}\n{second_lines}"
    assert found(module(body, *first, *second)) == [("all-gather", 64, 1)] * 2


def test_one_channel_may_belong_to_different_collectives() -> None:
    body = """
  %p = f32[16]{0} parameter(0)
  %a = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %b = f32[16]{0} all-reduce(%a), channel_id=1, replica_groups={{0,1}}, to_apply=%add
"""
    assert found(module(body)) == [("all-reduce", 64, 1)] * 2


# --- loops and branches -----------------------------------------------------------------------------------------------


def loop(condition: str, update: str, init: str, suffix: str = "") -> str:
    """A while loop over ``(counter, array, limit)`` with one all-reduce inside, without XLA's annotation."""
    state = "(s32[]{:T(128)}, f32[16]{0}, s32[]{:T(128)})"
    body = f"""%body (q: (s32[], f32[16], s32[])) -> (s32[], f32[16], s32[]) {{
  %q = {state} parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %x = f32[16]{{0}} get-tuple-element(%q), index=1
  %n = s32[] get-tuple-element(%q), index=2
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %r = f32[16]{{0}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add
  %next = s32[] {update}
  ROOT %t = {state} tuple(%next, %r, %n)
}}"""
    test = f"""%cond (q: (s32[], f32[16], s32[])) -> pred[] {{
  %q = {state} parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %n = s32[] get-tuple-element(%q), index=2
  %k = s32[] constant(-3)
  %eight = s32[] constant(8)
  %below = pred[] compare(%i, %n), direction=LT
  %sooner = pred[] compare(%eight, %i), direction=GT
  %early = pred[] custom-call(%q), custom_call_target="converged"
  ROOT %lt = pred[] {condition}
}}"""
    wrapped = """%wrapped_add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %s = s32[] add(%a, %b)
}"""
    compare = """%wrapped_compare (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %s = pred[] compare(%a, %b), direction=LT
}"""
    entry = f"""
  %p = f32[16]{{0}} parameter(0)
  %five = s32[] constant(10)
  %start = s32[] constant({init})
  %copied = s32[] copy(%start)
  %t = {state} tuple(%copied, %p, %five)
  %w = {state} while(%t), condition=%cond, body=%body{suffix}
  ROOT %x = f32[16]{{0}} get-tuple-element(%w), index=1
"""
    return module(entry, body, test, wrapped, compare)


@pytest.mark.parametrize(
    ("condition", "update", "init", "trips"),
    [
        ("compare(%i, %n), direction=LT", "add(%i, %one)", "0", 10),
        ("compare(%n, %i), direction=GT", "add(%one, %i)", "4", 6),
        ("compare(%i, %n), direction=LE", "add(%i, %two)", "0", 6),
        ("compare(%i, %k), direction=GT", "subtract(%i, %two)", "6", 5),
        ("compare(%i, %k), direction=GE", "subtract(%i, %one)", "6", 10),
        ("compare(%i, %n), direction=NE", "add(%i, %two)", "0", 5),
        (
            "fusion(%i, %n), kind=kLoop, calls=%wrapped_compare",
            "fusion(%i, %one), kind=kLoop, calls=%wrapped_add",
            "1",
            9,
        ),
        ("compare(%i, %n), direction=LT", "add(%i, %one)", "10", 0),
        ("and(%early, %below)", "add(%i, %one)", "3", 7),
        ("and(%below, %sooner)", "add(%i, %one)", "0", 8),
    ],
)
def test_trip_counts_are_derived(condition: str, update: str, init: str, trips: int) -> None:
    expected = [("all-reduce", 64, trips)] if trips else []
    assert found(loop(condition, update, init)) == expected


def test_known_trip_count_wins() -> None:
    suffix = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    assert found(loop("compare(%i, %n), direction=LT", "add(%i, %one)", "0", suffix)) == [("all-reduce", 64, 7)]


@pytest.mark.parametrize(
    ("condition", "update"),
    [
        ("compare(%i, %n), direction=LT", "multiply(%i, %two)"),
        ("compare(%i, %n), direction=LT", "add(%i, %i)"),
        ("and(%early, %early)", "add(%i, %one)"),
    ],
)
def test_a_loop_that_cannot_be_told_counts_once_and_says_so(condition: str, update: str) -> None:
    (collective,) = parse_collectives(loop(condition, update, "1"))
    assert collective.count == 1
    assert collective.unknown_loop


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    st.integers(-20, 20),
    st.integers(-4, 4),
    st.integers(-20, 20),
    st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
)
def test_trip_count_formula_matches_running_the_loop(first: int, step: int, limit: int, direction: str) -> None:
    holds = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}[direction]
    times = 0
    while holds(first + times * step, limit) and times < 100:
        times += 1
    assert _runs(first, step, limit, direction) == (None if times == 100 else times)


def test_nested_loops_multiply() -> None:
    text = loop("compare(%i, %n), direction=LT", "add(%i, %one)", "7")
    inner = text[text.index("%body") : text.index("ENTRY")]
    renamed = (
        inner.replace("%body", "%inner_body").replace("%cond", "%inner_cond").replace("%wrapped", "%inner_wrapped")
    )
    state = "(s32[]{:T(128)}, f32[16]{0}, s32[]{:T(128)})"
    nested = f"""%z = s32[] constant(8)
  %it = {state} tuple(%z, %x, %n)
  %iw = {state} while(%it), condition=%inner_cond, body=%inner_body
  %r = f32[16]{{0}} get-tuple-element(%iw), index=1"""
    outer = text.replace("%r = f32[16]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add", nested)
    # The inner limit is the outer loop's unchanged element: 10 - 8 runs, inside 10 - 7.
    assert found(outer.replace("ENTRY", renamed + "\n\nENTRY")) == [("all-reduce", 64, 6)]


def test_the_heavier_branch_counts() -> None:
    branches = [
        f"""%branch{n} (a: f32[{n}]) -> f32[{n}] {{
  %a = f32[{n}]{{0}} parameter(0)
  ROOT %r = f32[{n}]{{0}} all-reduce(%a), replica_groups={{{{0,1}}}}, to_apply=%add
}}"""
        for n in (4, 16)
    ]
    for attributes in (
        "branch_computations={%branch4, %branch16}",
        "true_computation=%branch16, false_computation=%branch4",
    ):
        body = f"  %p = f32[16]{{0}} parameter(0)\n  ROOT %c = f32[16]{{0}} conditional(%i, %p, %p), {attributes}"
        (collective,) = parse_collectives(module(body, *branches))
        assert (collective.bytes_per_device, collective.conditional) == (64, True)


# --- names and sources ------------------------------------------------------------------------------------------------


def test_name_stack_and_source_line() -> None:
    tables = """FileNames
1 "/home/me/train.py"

FunctionNames
1 "step"

FileLocations
3 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=2 end_column=3}

StackFrames
9 {file_location_id=3 parent_frame_id=1}

"""
    line = (
        "  %p = f32[16]{0} parameter(0)\n  ROOT %c = f32[16]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%a, "
        'metadata={op_name="jit(step)/jvp(dense)/dot" '
    )
    (new,) = parse_collectives(module(line + "stack_frame_id=9}").replace(HEAD, HEAD + tables))
    (old,) = parse_collectives(module(line + 'source_file="a.py" source_line=7}'))
    assert (new.op_name, new.source, new.dtype) == ("jit(step)/jvp(dense)/dot", "/home/me/train.py:42", "f32")
    assert (old.op_name, old.source) == ("jit(step)/jvp(dense)/dot", "a.py:7")


def test_text_without_computations_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no computation"):
        parse_module("not a module")


def test_large_text_is_read_whole() -> None:
    """Megabytes of text, as XLA:TPU prints them; a quadratic reader would run into the test's time limit."""
    line = '  %x{n} = bf16[128,256]{{1,0:T(8,128)(2,1)}} add(%p, %p), metadata={{op_name="jit(f)/add"}}\n'
    body = "  %p = f32[16]{0} parameter(0)\n" + "".join(line.format(n=n) for n in range(50_000))
    parsed = parse_module(module(body))
    assert len(parsed.computations["main"].instructions) == 50_001
    assert parse_collectives(parsed) == []


# --- closed forms on XLA:CPU ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("a", "b"))


def compiled_text(mesh, function, arguments, out) -> str:
    """HLO of ``function`` for ``(shape, dtype, spec)`` arguments."""
    shaped = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, dtype, spec in arguments
    ]
    shardings = NamedSharding(mesh, PartitionSpec(*out))
    return jax.jit(function, out_shardings=shardings).lower(*shaped).compile().as_text()


def collectives(mesh, function, arguments, out) -> list[tuple[str, tuple[str, ...], int, int]]:
    return [
        (c.kind, c.mesh_axes((2, 4), ("a", "b")), c.bytes_per_device, c.count)
        for c in parse_collectives(compiled_text(mesh, function, arguments, out))
    ]


F32 = jnp.float32


def test_row_parallel_matmul_reduces(mesh) -> None:
    arguments = [((64, 128), F32, ("a", "b")), ((128, 32), F32, ("b", None))]
    local = 32 * 32 * 4
    assert collectives(mesh, jnp.matmul, arguments, ("a",)) == [("all-reduce", ("b",), 2 * 3 * local // 4, 1)]


def test_column_parallel_matmul_is_silent(mesh) -> None:
    arguments = [((64, 128), F32, ("a", None)), ((128, 32), F32, (None, "b"))]
    assert collectives(mesh, jnp.matmul, arguments, ("a", "b")) == []


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_gather_of_a_sharded_weight(mesh, axes) -> None:
    arguments = [((64, 128), F32, (axes,))]
    n = math.prod({"a": 2, "b": 4}[axis] for axis in axes)
    expected = [("all-gather", axes, (n - 1) * 64 * 128 * 4 // n, 1)]
    assert collectives(mesh, lambda w: w * 1.5, arguments, ()) == expected


def test_transposed_layout_is_an_all_to_all(mesh) -> None:
    expected = [("all-to-all", ("b",), 3 * (64 * 128 * 4 // 4) // 4, 1)]
    assert collectives(mesh, lambda x: x * 1.5, [((64, 128), F32, ("b", None))], (None, "b")) == expected


def test_roll_is_a_permute(mesh) -> None:
    expected = [("collective-permute", ("b",), 128 * 4, 1)]
    assert collectives(mesh, lambda x: jnp.roll(x, 1, 0), [((64, 128), F32, ("b",))], ("b",)) == expected


def test_scan_multiplies_by_its_length(mesh) -> None:
    def layers(x, weights):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    arguments = [((64, 128), F32, ("a",)), ((5, 128, 128), F32, (None, ("a", "b")))]
    assert collectives(mesh, layers, arguments, ("a",)) == [("all-gather", ("a", "b"), 7 * 128 * 128 * 4 // 8, 5)]
    text = compiled_text(mesh, layers, arguments, ("a",))
    assert matmul_flops(parse_module(text)) == 5 * 2 * 32 * 128 * 128


def test_explicit_collectives_of_shard_map(mesh) -> None:
    def program(x):
        def local(x):
            x = lax.psum_scatter(x, "a", scatter_dimension=0, tiled=True)
            return lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)])

        spec = PartitionSpec("a", "b")
        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    expected = [("reduce-scatter", ("a",), 32 * 32 * 4 // 2, 1), ("collective-permute", ("b",), 16 * 32 * 4, 1)]
    assert collectives(mesh, program, [((64, 128), F32, ("a", "b"))], ("a", "b")) == expected


def test_flops_of_convolutions_and_their_gradients(mesh) -> None:
    def loss(w, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return (lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=dims) ** 2).sum()

    def step(w, x):
        return jax.grad(loss)(w, x)

    arguments = [((3, 3, 8, 16), F32, ()), ((8, 12, 12, 8), F32, (("a", "b"),))]
    # Of the 6 x 3 pairs of an output and a tap in one dimension, one tap falls on the padding.
    pairs = sum(0 <= 2 * out + tap < 12 for out, tap in itertools.product(range(6), range(3)))
    assert pairs == 17
    forward = 2 * 16 * 8 * pairs**2
    assert matmul_flops(parse_module(compiled_text(mesh, step, arguments, ()))) == 2 * forward
