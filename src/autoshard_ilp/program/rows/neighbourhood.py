"""Large neighbourhood search: a better plan, a few connected nodes at a time.

Where memory binds, a plan is often poor in many small ways that have nothing to do with each other: a weight split here
that might as well be whole, a tensor gathered twice there. No change of one node mends any of these, and all of them
together are the whole program. All nodes but those of a region keep their choices; the region is a small program with
the memory that the others leave, and is solved exactly. Regions have two centres, so that one may take what the other
gives up, and lie where much is paid.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from autoshard_ilp.program.milp import Milp
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Held, Net, bytes_in_rows
from autoshard_ilp.program.rows.memory import Row, violated_times
from autoshard_ilp.program.rows.under import UnderRows

FIRST_NODES = 100  # of a region
MOST_NODES = 1_000
GROWTH = 1.1  # of the next region, after one that was solved and held nothing better ..
SHRINK = 0.7  # .. and after one that took too long
CELLS = 5_000  # largest table that presolve makes
MOST_CELLS = 20_000  # of what is left of a region
SECONDS = 1.0  # for one region
CENTRES = 2
EVEN = 0.2  # of the centres: anywhere
LEAST_GAIN = 1e-6  # relative: less is rounding
RECENT = 0.1  # of the time left: what was gained in it ..
LEAST_RECENT, MOST_RECENT = 0.5, 3.0  # .. in seconds ..
LEAST_REGIONS = 16  # .. and in so many regions, says whether more is worth its time: ..
WORTH = 0.2  # .. at that rate as much time as was left at first gains this part of the gap


def look_around(owner: UnderRows) -> None:
    """Improve the best plan, where there is one, a region at a time, for as long as that is worth its time."""
    since, known = time.monotonic(), owner.search.best
    if known is None:
        return
    if owner.neighbourhood is None:
        owner.neighbourhood = Neighbourhood(owner)
    owner.neighbourhood.run()
    if owner.search.best is not None and owner.search.best is not known:
        owner.remember(owner.search.best)
    owner.search.add_seconds("neighbourhood", since)


class Neighbourhood:
    """The search around the best plan known.

    Args:
        owner: the search, whose best plan is known, and its rows.
    """

    def __init__(self, owner: UnderRows) -> None:
        self.owner, self.search, self.program = owner, owner.search, owner.program
        self.rng = np.random.default_rng(owner.search.options.seed)
        self.size = float(FIRST_NODES)
        self.edges: list[list[int]] = [[] for _ in self.program.nodes]
        for e, edge in enumerate(self.program.edges):
            self.edges[edge.u].append(e)
            self.edges[edge.v].append(e)
        self.known: tuple[np.ndarray | None, np.ndarray] = None, np.zeros(0)  # a plan, and its bytes over time
        self.ends = [np.array([getattr(edge, end) for edge in self.program.edges], np.int64) for end in "uv"]
        self.least = [np.array([np.min(node.costs) for node in self.program.nodes])]
        self.least.append(np.array([np.min(edge.table) for edge in self.program.edges]))
        self.paid: tuple[np.ndarray | None, np.ndarray] = None, np.zeros(0)  # a plan, and what it pays
        self.rows: list[Row] = []
        self.held: Held = ({}, {})

    def run(self) -> None:
        """Improve the best plan for as long as that gains enough of the gap.

        Raises:
            KeyboardInterrupt: as the solver was told.
        """
        search = self.search
        self._add_rows(self.owner.rows)
        left = search.last_deadline - time.monotonic()
        window = min(max(RECENT * left, LEAST_RECENT), MOST_RECENT)
        recent = deque([(time.monotonic(), search.upper)])
        while not self.owner.stop():
            self._improve(self._region())
            now = time.monotonic()
            recent.append((now, search.upper))
            while len(recent) > LEAST_REGIONS + 1 and recent[1][0] < now - window:
                recent.popleft()
            since, upper = recent[0]
            enough = len(recent) > LEAST_REGIONS and now - since >= window
            if enough and (upper - search.upper) / (now - since) * left < WORTH * (upper - search.lower):
                break

    def _add_rows(self, rows: Iterable[Row]) -> None:
        known = {row.time for row in self.rows}
        self.rows += [row for row in rows if row.time not in known]
        self.held = bytes_in_rows(self.program, self.rows)

    def _region(self) -> list[int]:
        """Nodes around a few centres, each next one a neighbour of a random one."""
        found: dict[int, None] = {}
        for _ in range(CENTRES):
            border = [self._centre()]
            found[border[0]] = None
            wanted = len(found) + int(self.size / CENTRES)
            while border and len(found) < wanted:
                at = int(self.rng.integers(len(border)))
                fresh = [w for w in self._neighbours(border[at]) if w not in found]
                if fresh:
                    found[w := fresh[int(self.rng.integers(len(fresh)))]] = None
                    border.append(w)
                else:
                    border[at] = border[-1]
                    border.pop()
        return list(found)

    def _centre(self) -> int:
        """A node, the likelier the more is paid there; now and then any."""
        paid = np.cumsum(self._paid())
        if self.rng.random() < EVEN or paid[-1] <= 0:
            return int(self.rng.integers(len(paid)))
        return int(np.searchsorted(paid, self.rng.random() * paid[-1], side="right"))

    def _paid(self) -> np.ndarray:
        """Per node, what the best plan pays for it and its edges above the least that any choice pays, in seconds."""
        plan, program = self.search.best, self.program
        assert plan is not None
        if self.paid[0] is not plan:
            of_edges = [e.table[e.u_labels[plan[e.u]], e.v_labels[plan[e.v]]] for e in program.edges]
            paid = np.array([node.costs[s] for node, s in zip(program.nodes, plan, strict=True)]) - self.least[0]
            for end in self.ends:
                np.add.at(paid, end, np.array(of_edges) - self.least[1])
            self.paid = plan, paid
        return self.paid[1]

    def _neighbours(self, v: int) -> list[int]:
        edges = self.program.edges
        return [edges[e].u + edges[e].v - v for e in self.edges[v]]

    def _improve(self, region: list[int]) -> None:
        """The best plan that differs from the best known in a region only."""
        began, search = time.monotonic(), self.search
        assert search.best is not None
        solved = True
        while time.monotonic() < search.deadline:
            try:
                net = self._net(region, search.best)
                known = net.value(search.best)
                search.presolve(net, 3, CELLS, self.owner.capacity)
                plan, solved = self._solve(net, known, search.best)
            except EmptyNodeError:  # rounding: nothing is as good as what is known
                plan = None
            if plan is None or not self.program.cost(plan) < search.upper - LEAST_GAIN * abs(search.upper):
                break
            if search.offer(plan):
                search.tell("memory")
                return
            fresh = violated_times(self.program, plan, self.owner.capacity, {row.time for row in self.rows})
            self._add_rows(self.owner.owners.row(t) for t in fresh)
        long = not solved or time.monotonic() - began > SECONDS
        self.size = min(max(self.size * (SHRINK if long else GROWTH), CENTRES), MOST_NODES)

    def _usage(self, plan: np.ndarray) -> np.ndarray:
        """Bytes held over time."""
        if self.known[0] is not plan:
            self.known = plan, self.program.usage_over_time(plan)
        return self.known[1]

    def _net(self, region: list[int], plan: np.ndarray) -> Net:
        """The region with what the choices of all others cost and leave."""
        program = self.program
        net = Net(len(program.nodes), len(self.rows))
        net.gone[:] = True
        net.gone[region] = False
        net.base = self._usage(plan)[[row.time for row in self.rows]]
        touched = dict.fromkeys(e for v in region for e in self.edges[v])
        inside = [e for e in touched if not (net.gone[program.edges[e].u] or net.gone[program.edges[e].v])]
        for v in region:
            cost, held = self._alone(v, plan, net.gone)
            net.set_cost(v, cost)
            net.base -= held[:, plan[v]]
            net.add_used(v, held[:, net.alive[v]])
        for e in inside:
            edge = program.edges[e]
            labels = np.asarray(edge.u_labels, np.int64), np.asarray(edge.v_labels, np.int64)
            used = self.held[1].get(e)
            net.add(Factor((edge.u, edge.v), labels, np.asarray(edge.table, np.float64), used))
            if used is not None:
                net.base -= used[:, labels[0][plan[edge.u]], labels[1][plan[edge.v]]]
        return net

    def _alone(self, v: int, plan: np.ndarray, fixed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and bytes per row, of every strategy of a node, with its edges to nodes that are fixed (bool)."""
        nodes, edges = self.held
        keep = self.owner.keep[v].copy()
        keep[plan[v]] = True
        cost = np.where(keep, np.asarray(self.program.nodes[v].costs, np.float64), np.inf)
        held = nodes[v].copy() if v in nodes else np.zeros((len(self.rows), len(cost)), np.int64)
        for e in self.edges[v]:
            edge = self.program.edges[e]
            if edge.u == v and fixed[edge.v]:
                column = edge.v_labels[plan[edge.v]]
                cost += edge.table[:, column][edge.u_labels]
                held += edges[e][:, :, column][:, edge.u_labels] if e in edges else 0
            elif edge.v == v and fixed[edge.u]:
                row = edge.u_labels[plan[edge.u]]
                cost += edge.table[row][edge.v_labels]
                held += edges[e][:, row][:, edge.v_labels] if e in edges else 0
        return cost, held

    def _solve(self, net: Net, known: float, plan: np.ndarray) -> tuple[np.ndarray | None, bool]:
        """The best plan of a net, with the choices of ``plan`` elsewhere; and whether it was solved."""
        reduce.compress_all(net)
        if not net.live:
            return (None if (net.base > self.owner.capacity).any() else net.complete(plan)), True
        if net.size()["cells"] > MOST_CELLS:
            return None, False
        until = min(self.search.deadline, time.monotonic() + SECONDS)
        found = Milp(net, self.owner.capacity, known).solve(until, self.search.options.seed, 0.0)
        if found.interrupted:
            raise KeyboardInterrupt
        if found.choices is None:
            return None, found.status == "infeasible"
        choices = plan.copy()
        choices[net.live] = found.choices[net.live]
        return net.complete(choices), found.status == "optimal"
