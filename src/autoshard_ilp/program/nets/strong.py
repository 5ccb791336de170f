"""Strong branching: close the gap that message passing leaves, without memory rows.

Each strategy of some nodes is tried by itself for some sweeps. Where the bound then exceeds the best plan, the
strategy goes for good. The node whose cheapest strategy raises the bound most is branched on, one branch per strategy,
the branch of least bound first. A branch whose bound no node raises by much is looked through as a window.

Which nodes: first the hubs, where most factors meet. Bounds of message passing are exact for trees; what they lack is
in cycles, and where a step is laid over several mesh axes most cycles pass through a few nodes: the layout between two
layers, the tokens that experts receive. With one of them settled, most of its strategies are out, and what is left is
nearly a tree. Of the 5 % that were open for Mixtral 8x7B on three axes, two levels of hubs closed all. Where hubs close
little, the nodes that carry the gap: it is the plan's excess over the bound, and in deep networks with few repeats
nearly all of it sits in a few factors.

Source: D. Applegate, R. Bixby, V. Chvatal, W. Cook, DIMACS Technical Report 95-05 (1995), "Finding cuts in the TSP"
(strong branching).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.kernels.compiled import load_windows
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.nets.presolve import Presolve
from autoshard_ilp.program.search import PROOF
from autoshard_ilp.program.window.window import Window

CELLS = 20_000  # largest table that presolve creates in a branch
SHRINK = 0.9  # presolve again when this part of the strategies is left
SWEEPS, STALL = 100, 0.02  # of a branch: at most, and the part of the gap that CHECK sweeps must close
TRIAL_SWEEPS, TRIAL_STALL = 10, 0.05  # of one strategy tried
CHECK = 5
HUBS, HUB_SWEEPS = 3, 40  # nodes tried, and sweeps of one strategy
LITTLE, ENOUGH = 0.1, 0.3  # of the gap, closed by hubs: they are not tried again below; no other nodes are tried
FACTORS = 30  # of the largest excess, whose nodes may be branched on
CANDIDATES = 4  # nodes tried, best first
TRIED = 2e8  # table cells times strategies of a node that is no hub: most that is tried
DEAR = 5e7  # table cells times strategies of a node, from which windows promise more than trying them ..
WINDOW_SECONDS = 1.0  # .. for a branch
SMALLER = 0.7  # of the gap of the last branch whose window was too wide: worth trying again
MOST_OPEN = 64  # branches kept before the search goes down instead of along


def trial_cells(net: Net) -> float:
    """Table cells that one sweep per strategy of a node visits: what trying them takes."""
    size = net.size()
    return size["cells"] * size["strategies"] / max(1, size["nodes"])


@dataclass(frozen=True)
class Trial:
    """A node and the bound (seconds) under each of its strategies; those that cannot beat the best plan are out."""

    node: int
    strategies: np.ndarray
    bounds: np.ndarray

    @property
    def worth(self) -> tuple[float, int]:
        """What branching here promises: the bound of all branches, then few of them."""
        return float(self.bounds.min()), -len(self.bounds)


@dataclass(frozen=True, order=True)
class Branch:
    """An open subproblem; ``size`` is its number of strategies when it was last presolved."""

    bound: float
    number: int
    net: Net = field(compare=False)
    size: float = field(compare=False)
    hubs: bool = field(compare=False)  # whether they are tried


def excess(messages: Messages, choices: np.ndarray) -> dict[tuple[int, ...], float]:
    """Seconds that each node and scope of factors contributes to a plan's cost above the bound."""
    parts: dict[tuple[int, ...], float] = {}
    for v in messages.nodes:
        parts[(v,)] = float(messages.theta[v][np.searchsorted(messages.alive[v], choices[v])])
    for n, table in messages.tables.items():
        f = messages.net.factors[n]
        cell = tuple(int(lab[choices[v]]) for v, lab in zip(f.scope, f.labels, strict=True))
        parts[f.scope] = parts.get(f.scope, 0.0) + float(table[cell])
    return parts


def candidates(messages: Messages, choices: np.ndarray) -> Iterator[int]:
    """Nodes to branch on: those in the factors of the largest excess, most excess per decision first, then any."""
    parts = sorted(excess(messages, choices).items(), key=lambda item: -item[1])[:FACTORS]
    score: dict[int, float] = {}
    for scope, seconds in parts:
        for v in scope:
            left = int(np.isfinite(messages.theta[v]).sum())
            if left > 1:
                score[v] = score.get(v, 0.0) + seconds / math.log(left + 1)
    if score:
        return iter(sorted(score, key=lambda v: (-score[v], v)))
    return iter([v for v in messages.nodes if np.isfinite(messages.theta[v]).sum() > 1][:1])


def hubs(messages: Messages) -> list[int]:
    """Nodes with a choice, those where most factors meet first, and of these the ones with the fewest strategies."""
    left = {v: int(np.isfinite(messages.theta[v]).sum()) for v in messages.nodes}
    degree = {v: len(messages.net.incident[v]) for v in messages.nodes}
    return sorted((v for v in messages.nodes if left[v] > 1), key=lambda v: (-degree[v], left[v], v))[:HUBS]


def settle(messages: Messages, upper: float, sweeps: int, stall: float, deadline: float = math.inf) -> None:
    """Sweep until ``CHECK`` sweeps close less than ``stall`` of the gap. EmptyNodeError: nothing beats ``upper``."""
    before = messages.bound
    for _ in range(0, sweeps, CHECK):
        messages.sweep(upper, CHECK)
        if messages.bound - before < stall * (upper - messages.bound) or time.monotonic() > deadline:
            return
        before = messages.bound


def trial(messages: Messages, v: int, upper: float, deadline: float, sweeps: int = TRIAL_SWEEPS) -> Trial:
    """Try every strategy of a node; those that cannot beat ``upper`` are removed from the messages.

    Args:
        messages: settled.
        v: the node.
        upper: seconds, of the best plan known.
        deadline: monotonic seconds, after which nothing more is tried.
        sweeps: of one strategy, at most.

    Raises:
        EmptyNodeError: none can.
    """
    start = messages.state()
    kept, bounds = list[int](), list[float]()
    for at in np.flatnonzero(np.isfinite(messages.theta[v])).tolist():
        bound = start.bound
        if time.monotonic() < deadline:
            only = np.full(len(messages.theta[v]), np.inf)
            only[at] = messages.theta[v][at]
            messages.theta[v][:] = only
            try:
                settle(messages, upper, sweeps, TRIAL_STALL)
                bound = messages.bound
            except EmptyNodeError:
                bound = math.inf
            messages.restore(start)
        if bound < math.inf:
            kept.append(at)
            bounds.append(bound)
    if not kept:
        raise EmptyNodeError(v)
    gone = np.ones(len(messages.theta[v]), bool)
    gone[kept] = False
    messages.theta[v][gone] = np.inf
    return Trial(v, messages.alive[v][kept], np.array(bounds))


@dataclass
class StrongBranching:
    """The search below one net. The callbacks are those of :class:`autoshard_ilp.program.nets.core.Descent`.

    Args:
        offer: takes a full assignment, returns the best known cost in seconds.
        prove: takes a lower bound in seconds.
        done: True when the gap asked for is reached.
        deadline: monotonic seconds.
    """

    offer: Callable[[np.ndarray], float]
    prove: Callable[[float], None]
    done: Callable[[], bool]
    deadline: float
    nodes: int = 0
    upper: float = math.inf
    closed: float = math.inf  # least bound of the branches left alone, within the tolerance of proofs
    open: list[Branch] = field(default_factory=list)
    number: int = 0
    too_wide: float = math.inf  # gap (seconds) of the last branch whose window was

    def run(self, net: Net, upper: float) -> None:
        """Search until proved, done or out of time.

        Raises:
            EmptyNodeError: no plan is cheaper than ``upper``, or than the best one offered meanwhile.
        """
        self.upper = upper
        self._push(net.constant, net, math.inf, True)
        self.resume()

    def resume(self) -> None:
        """Go on with the branches that are open; as :meth:`run`."""
        while self.open:
            self.prove(min(min(b.bound for b in self.open), self.closed, self.upper))
            if self.done() or time.monotonic() > self.deadline:
                return
            branch = self._next()
            if branch.bound >= self.upper * (1 - 0.5 * PROOF):
                self.closed = min(self.closed, branch.bound)
                continue
            self.nodes += 1
            try:
                self._expand(branch)
            except EmptyNodeError:
                continue
        self.prove(min(self.closed, self.upper))
        if self.closed >= self.upper:
            raise EmptyNodeError("branches")

    def _next(self) -> Branch:
        if len(self.open) < MOST_OPEN:
            return heapq.heappop(self.open)
        deepest = max(self.open, key=lambda b: (b.number, -b.bound))
        self.open.remove(deepest)
        heapq.heapify(self.open)
        return deepest

    def _push(self, bound: float, net: Net, size: float, hubs_first: bool) -> None:
        self.number += 1
        heapq.heappush(self.open, Branch(bound, self.number, net, size, hubs_first))

    def _expand(self, branch: Branch) -> None:
        """Bound one branch, look for plans in it, and split it."""
        net, size = branch.net, branch.size
        if net.size()["strategies"] < SHRINK * size:
            Presolve(net, max_degree=99, max_cells=CELLS, deadline=self.deadline).run()
            size = net.size()["strategies"]
        if not net.live:
            self.upper = self.offer(net.complete(np.zeros(len(net.cost), np.int64)))
            return
        reduce.compress_all(net)
        messages = Messages(net)
        settle(messages, self.upper, SWEEPS, STALL, self.deadline)
        choices = messages.improve(messages.decode())
        self.upper = self.offer(net.complete(choices))
        before = messages.bound
        best, hubs_help = self._tried(messages, choices, branch.hubs)
        if best is None:  # one strategy everywhere: what is left between this plan and the bound is float noise
            self.closed = min(self.closed, max(branch.bound, messages.bound))
            return
        parent = messages.apply()
        if self._closes(best, before) < ENOUGH and self._seen_through(parent):
            return
        for s, bound in zip(best.strategies.tolist(), best.bounds.tolist(), strict=True):
            part = parent.only(best.node, parent.alive[best.node] == s)
            self._push(max(branch.bound, bound), part, size, hubs_help)

    def _closes(self, found: Trial, before: float) -> float:
        """The part of the gap over ``before`` that the branches of a node close, all together."""
        gap = self.upper - before
        return (float(found.bounds.min()) - before) / gap if gap > 0 else 1.0

    def _tried(self, messages: Messages, choices: np.ndarray, hubs_first: bool) -> tuple[Trial | None, bool]:
        """The node that promises most of those tried (None: no node has a choice), and whether hubs help."""
        best: Trial | None = None
        before = messages.bound
        for v in hubs(messages) if hubs_first else ():
            found = trial(messages, v, self.upper, self.deadline, HUB_SWEEPS)
            best = found if best is None or found.worth > best.worth else best
            hubs_first = self._closes(best, before) >= LITTLE
            if not hubs_first:
                break
        if best is not None and self._closes(best, before) >= ENOUGH:
            return best, hubs_first
        most = TRIED / max(1, messages.net.size()["cells"])
        for v, _ in zip(candidates(messages, choices), range(CANDIDATES), strict=False):
            if best is not None and np.isfinite(messages.theta[v]).sum() > most:
                continue
            found = trial(messages, v, self.upper, self.deadline)
            best = found if best is None or found.worth > best.worth else best
        return best, hubs_first

    def _seen_through(self, parent: Net) -> bool:
        """Whether a window tells the best plan of a branch, or that none is better than the best one known."""
        gap = self.upper - parent.constant
        if gap > SMALLER * self.too_wide or trial_cells(parent) < DEAR:
            return False
        self.deadline += load_windows()
        net = parent.copy()
        Presolve(net, max_degree=99, max_cells=CELLS, deadline=self.deadline).run()
        if not net.live:
            self.upper = self.offer(net.complete(np.zeros(len(net.cost), np.int64)))
            return True
        reduce.compress_all(net)
        window = Window(net, 0, [np.zeros(0)], self.deadline)
        found = window.solve(self.upper, min(time.monotonic() + WINDOW_SECONDS, self.deadline))
        if found.choices is not None:
            self.upper = self.offer(net.complete(found.choices))
        if found.status == "unknown":
            self.too_wide = gap
        return found.status != "unknown"
