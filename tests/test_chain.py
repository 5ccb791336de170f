"""Programs that repeat themselves: their layers, what is stamped from one of them, the bound of the chain."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.program import solve
from autoshard_ilp.program.model import Edge, Node, Program, SolverOptions
from autoshard_ilp.program.nets.minimum import minimum
from autoshard_ilp.program.nets.net import build_net
from autoshard_ilp.program.nets.presolve import Presolve
from autoshard_ilp.program.repeated import whole
from autoshard_ilp.program.repeated.chain import _potentials, chain_bound
from autoshard_ilp.program.repeated.repeats import Alike, copies_in
from autoshard_ilp.program.repeated.stamping import stamped_net
from autoshard_ilp.program.repeated.whole import SOLVE_SECONDS, Sight, solve_repeated

WIDTH = 3  # strategies of a node


class Chain:
    """A forward and a backward stream through equal layers, with a head, a tail, and a node that all layers read.

    A layer has the nodes in, out and back; in and out, and out and back, share an edge. Out leads to the next layer's
    in, and back to the layer's before.
    """

    def __init__(self, layers: int, seed: int, free_layer: int | None = None, forbid: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.forbid = forbid
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.kinds: list[int] = []
        self.edge_kinds: list[int] = []
        self.backward: list[bool] = []
        self.tables: dict[int, np.ndarray] = {}
        costs = [self._costs() for _ in range(3)]
        head, shared = self._node(self._costs(), 0), self._node(self._costs(), 1)
        ins = [self._node(costs[0], 2) for _ in range(layers)]
        outs = [self._node(costs[1] if i != free_layer else self._costs(), 3) for i in range(layers)]
        backs = [self._node(costs[2], 4, backward=True) for _ in range(layers)][::-1]  # the last layer comes first
        tail = self._node(self._costs(), 5)
        self._edge(head, ins[0], 0)
        for i in range(layers):
            self._edge(ins[i], outs[i], 1)
            self._edge(outs[i], backs[i], 2)
            self._edge(shared, ins[i], 3)
            if i + 1 < layers:
                self._edge(outs[i], ins[i + 1], 4)
                self._edge(backs[i + 1], backs[i], 5)
        self._edge(outs[-1], tail, 6)
        self._edge(tail, backs[-1], 7)
        self.program = Program(tuple(self.nodes), tuple(self.edges))
        self.alike = Alike(np.array(self.kinds), np.array(self.edge_kinds), np.array(self.backward))

    def _costs(self) -> np.ndarray:
        return self.rng.integers(0, 20, WIDTH).astype(float)

    def _node(self, costs: np.ndarray, kind: int, backward: bool = False) -> int:
        self.nodes.append(Node(f"node {len(self.nodes)}", costs))
        self.kinds.append(kind)
        self.backward.append(backward)
        return len(self.nodes) - 1

    def _edge(self, u: int, v: int, kind: int) -> None:
        if kind not in self.tables:
            table = self.rng.integers(0, 20, (WIDTH, WIDTH)).astype(float)
            if self.forbid:
                table[self.rng.random((WIDTH, WIDTH)) < 0.2] = np.inf
                np.fill_diagonal(table, 5.0)
            self.tables[kind] = table
        labels = np.arange(WIDTH)
        self.edges.append(Edge(u, v, labels, labels, self.tables[kind]))
        self.edge_kinds.append(kind)

    @property
    def known(self) -> np.ndarray:
        """All nodes choose the first strategy."""
        return np.zeros(len(self.nodes), np.int64)

    def tied(self) -> float:
        """The cheapest assignment in which nodes of a kind choose the same."""
        kinds = self.alike.nodes
        sizes = (WIDTH,) * (int(kinds.max()) + 1)
        return min(self.program.cost(np.array(choice)[kinds]) for choice in np.ndindex(*sizes))


def test_a_layer_is_cut_where_least_passes() -> None:
    chain = Chain(6, 0)
    (copies,) = copies_in(chain.program, chain.alike)
    assert copies.nodes.shape == (6, 3)
    assert copies.edges.shape == (6, 2), "in-out and out-back stay within; what leads to the next layer is cut"
    for nodes in copies.nodes.tolist():
        assert [chain.kinds[v] for v in nodes] == [2, 3, 4]
    outs, backs = copies.nodes[:, 1].tolist(), copies.nodes[:, 2].tolist()
    assert outs == sorted(outs)
    assert backs == sorted(backs, reverse=True), "the backward pass meets the layers from the last to the first"
    for nodes, edges in zip(copies.nodes.tolist(), copies.edges.tolist(), strict=True):
        for e in edges:
            assert {chain.edges[e].u, chain.edges[e].v} <= set(nodes)


def test_a_layer_of_its_own_cost_is_a_group_of_its_own() -> None:
    chain = Chain(6, 1, free_layer=2)
    groups = copies_in(chain.program, chain.alike)
    assert sorted(len(g.nodes) for g in groups) == [1, 5]
    assert len({g.chain for g in groups}) == 1
    assert sorted(np.concatenate([g.layers for g in groups]).tolist()) == list(range(6))


def test_nothing_repeats_in_a_program_of_different_nodes() -> None:
    chain = Chain(3, 2)
    n, m = len(chain.nodes), len(chain.edges)
    assert copies_in(chain.program, Alike(np.arange(n), np.arange(m), np.zeros(n, bool))) == []
    assert copies_in(Program(chain.program.nodes, ()), chain.alike) == []


def test_kinds_that_come_twice_in_a_layer_are_told_apart() -> None:
    chain = Chain(5, 3)
    merged = np.where(chain.alike.nodes == 3, 2, chain.alike.nodes)  # in and out are of one kind
    order = np.argsort([i if k not in (2, 3) else 2 + (i - 2) % 5 + 0.1 * k for i, k in enumerate(chain.kinds)])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    nodes = tuple(chain.nodes[v] for v in order)
    edges = tuple(Edge(int(place[e.u]), int(place[e.v]), e.u_labels, e.v_labels, e.table) for e in chain.edges)
    alike = Alike(merged[order], chain.alike.edges, chain.alike.backward[order])
    groups = copies_in(Program(nodes, edges), alike)
    largest = max(groups, key=lambda g: g.nodes.size)
    assert largest.nodes.shape == (3, 3), "all but the first and the last, whose edges are others"


def test_open_nodes_keep_their_strategies() -> None:
    chain = Chain(4, 4)
    net = build_net(chain.program)
    Presolve(net, max_degree=99, open_nodes=frozenset({2, 6})).run()
    assert net.live == [2, 6]
    assert len(net.alive[2]) == len(net.alive[6]) == WIDTH


@given(st.integers(2, 9), st.integers(0, 10_000), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_stamped_and_chained_programs_have_the_same_optimum(layers: int, seed: int, free: bool, forbid: bool) -> None:
    chain = Chain(layers, seed, layers // 2 if free else None, forbid)
    best = solve(chain.program, SolverOptions(time_limit=30))
    assert best.status == "optimal"
    repeated = copies_in(chain.program, chain.alike)
    net = stamped_net(chain.program, repeated)
    lower, choices = minimum(net.copy(), net.complete(chain.known), float("inf"), 0.0)
    assert lower == pytest.approx(best.objective)
    assert chain.program.cost(choices) == pytest.approx(best.objective), "records undo what one layer's presolve did"
    found = chain_bound(chain.program, chain.alike.edges, repeated, chain.known)
    assert found is not None
    assert found.lower_bound <= best.objective * (1 + 1e-12)
    assert found.layers == layers
    answer = solve_repeated(chain.program, chain.alike, chain.known, SolverOptions(time_limit=30))
    assert answer.status == "optimal"
    assert answer.objective == pytest.approx(best.objective)
    assert best.objective <= chain.tied() + 1e-9


def test_the_bound_of_a_long_chain_takes_one_layer_for_all() -> None:
    short, long = (Chain(layers, 7) for layers in (12, 400))
    found = [chain_bound(c.program, c.alike.edges, copies_in(c.program, c.alike), c.known) for c in (short, long)]
    assert all(f is not None for f in found)
    (a, b) = (f for f in found if f is not None)
    assert (a.layers, b.layers) == (12, 400)
    assert a.solved == b.solved <= 3, "the first, the last, and one for all between"
    best = solve(long.program, SolverOptions(time_limit=60))
    assert best.objective * 0.97 <= b.lower_bound <= best.objective * (1 + 1e-12)


def test_without_time_there_is_no_bound() -> None:
    chain = Chain(5, 8)
    copies = copies_in(chain.program, chain.alike)
    assert chain_bound(chain.program, chain.alike.edges, copies, chain.known, lambda cells: 0.0) is None
    assert chain_bound(chain.program, chain.alike.edges, [], chain.known) is None


def test_a_program_too_large_to_solve_has_the_bound() -> None:
    for seed in range(40):
        chain = Chain(6, seed)
        answer = solve_repeated(chain.program, chain.alike, chain.known, SolverOptions(time_limit=30), most_cells=0)
        best = solve(chain.program, SolverOptions(time_limit=30))
        assert answer.lower_bound <= best.objective * (1 + 1e-12) <= answer.objective * (1 + 2e-12)
        assert "descent" not in answer.report
        assert answer.report["chain"]["layers"] == 6
        near = answer.objective - answer.report["chain"]["bound"] <= whole.FAR * answer.objective
        assert ("stamping" in answer.report["seconds"]) == (not near), "it is not written down where nothing follows"


def test_without_a_bound_of_its_chain_a_program_too_large_to_solve_has_that_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole, "chain_bound", lambda *arguments: None)
    options = SolverOptions(time_limit=30)
    for seed in range(20):
        chain = Chain(6, seed)
        best = solve(chain.program, options)
        answer = solve_repeated(chain.program, chain.alike, chain.known, options, most_cells=0)
        least = sum(float(n.costs.min()) for n in chain.program.nodes)
        least += sum(float(e.table.min()) for e in chain.program.edges)
        assert least < answer.lower_bound <= best.objective * (1 + 1e-12)
        assert best.objective - answer.lower_bound < 0.5 * (best.objective - least)
        monkeypatch.setattr(whole, "MOST_CELLS", -1)
        larger = solve_repeated(chain.program, chain.alike, chain.known, options, most_cells=-2)
        assert larger.lower_bound == pytest.approx(least)
        monkeypatch.undo()
        monkeypatch.setattr(whole, "chain_bound", lambda *arguments: None)


def test_of_a_large_program_a_bound_that_leaves_hardly_a_gap_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leaves more, and in a small program, what is left is solved."""
    options, open_ = SolverOptions(time_limit=30), 0
    for seed in range(10):
        chain = Chain(6, seed)
        found = chain_bound(chain.program, chain.alike.edges, copies_in(chain.program, chain.alike), chain.known)
        assert found is not None
        least = min(chain.program.cost(found.choices), chain.program.cost(chain.known))
        gap = 1 - found.lower_bound / least
        if gap < 1e-6:
            continue
        open_ += 1
        count, cells = len(chain.program.nodes), sum(edge.table.size for edge in chain.program.edges)
        for nodes, more, hardly, solved in (
            (-1, 0, 2 * gap, False),
            (0, -1, 2 * gap, False),
            (-1, -1, 0.5 * gap, True),
            (0, 0, 2 * gap, True),
        ):
            monkeypatch.setattr(whole, "MANY_NODES", count + nodes)
            monkeypatch.setattr(whole, "MANY_CELLS", cells + more)
            monkeypatch.setattr(whole, "HARDLY", hardly)
            answer = solve_repeated(chain.program, chain.alike, chain.known, options)
            assert ("stamping" in answer.report["seconds"]) == solved
            assert answer.gap == (pytest.approx(0.0, abs=1e-9) if solved else pytest.approx(gap))
    assert open_ > 2


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10_000))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_potentials_are_what_has_been_moved(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = rng.random((rows, columns))
    before[rng.random(before.shape) < 0.3] = np.inf
    p, q = rng.random(rows), rng.random(columns)
    after = before - p[:, None] - q
    found_p, found_q = _potentials(before, after)
    finite = np.isfinite(before)
    # Rows and columns that no chain of finite entries joins to the first are unknown: 0.
    joined = finite & (np.abs(p[:, None] + q - found_p[:, None] - found_q) < 1e-9)
    assert not finite.all() or joined.all()
    assert joined.any() == finite.any()


@pytest.mark.parametrize(
    ("gaps", "lost"),
    [
        # the gap in percent, second by second, of twenty
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], False),
        ([9.0, 8.0, 7.0, 6.99, 6.98, 6.97], True),  # it has risen fast, and does not any more
        ([9.0, 8.99, 8.98], False),  # in the first seconds nobody asks
        ([0.06, 0.055, 0.05, 0.045, 0.04], True),  # next to nothing is left
    ],
)
def test_a_proof_goes_on_while_it_is_in_sight(gaps: list[float], lost: bool) -> None:
    now = 0.0
    search: Any = SimpleNamespace(upper=1.0, lower=0.0, deadline=20.0)
    sight = Sight(search, lambda: now)
    for gap in gaps:
        now += 1.0
        search.lower = 1.0 - gap / 100
        given_up = sight.lost()
    assert given_up == lost and (not lost or now > SOLVE_SECONDS)


def test_a_piece_without_time_still_has_the_bound_of_a_few_messages() -> None:
    chain = Chain(5, 8)
    net = build_net(chain.program)
    bound, found = minimum(net, chain.known, -math.inf, 0.0)
    best = solve(chain.program, SolverOptions(time_limit=60)).objective
    assert 0.5 * best < bound <= best * (1 + 1e-12)
    assert chain.program.cost(found) <= chain.program.cost(chain.known)


def test_the_deadline_knows_the_cells_of_all_layers() -> None:
    asked = list[int]()

    def until(cells: int) -> float:
        asked.append(cells)
        return math.inf

    for layers in (5, 10):
        chain = Chain(layers, 8)
        chain_bound(chain.program, chain.alike.edges, copies_in(chain.program, chain.alike), chain.known, until)
    assert 0 < asked[0] < asked[1]
