"""Sparse tables over the labels of nodes, and the elimination of a node by joining all that it is in.

A row of a relation stands for one cell of a factor, or for all assignments of eliminated nodes that leave these labels
to their neighbours. Only rows survive that may be part of a wanted plan: their slack, what they add at least to the
bound of each relaxation, is within the room that the limit leaves. Elimination keeps what was joined (a bucket), for
the way back.

Source: R. Dechter, Artificial Intelligence 113 (1999), "Bucket elimination: a unifying framework for reasoning".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard_ilp.program.nets.net import MOST_CODES, EmptyNodeError, joint_labels
from autoshard_ilp.program.window import kernels
from autoshard_ilp.program.window.relaxations import Relaxations

WORK = 50  # times as many pairs are looked at as rows may be left


@dataclass(eq=False)
class Relation:
    """Rows over the labels of ``scope``.

    Attributes:
        labels: per node, the label of each of the program's strategies (-1 where it is gone), as in a factor.
        sizes: per node, how many labels there are.
        columns: per node, the label of each row.
        slack: (rows, relaxations).
        cost, used: of a factor's rows, seconds and bytes (rows, memory rows).
        bucket, group: where the rows are the groups of a bucket, its number and each row's group; -1 otherwise.
    """

    scope: tuple[int, ...]
    labels: tuple[np.ndarray, ...]
    sizes: tuple[int, ...]
    columns: list[np.ndarray]
    slack: np.ndarray
    cost: np.ndarray
    used: np.ndarray
    bucket: int = -1
    group: np.ndarray | None = None

    def keep(self, rows: np.ndarray) -> None:
        """Only these rows (bool)."""
        self.columns = [c[rows] for c in self.columns]
        self.slack, self.cost, self.used = self.slack[rows], self.cost[rows], self.used[rows]
        self.group = None if self.group is None else self.group[rows]


@dataclass(eq=False)
class Bucket:
    """All that an eliminated node was in, joined; rows of a group leave the same labels to the neighbours.

    Attributes:
        node: the eliminated node; -1 for the last bucket, which joins what is left of separate parts.
        strategy: of the node, per row.
        group: per row, ascending.
        groups: how many.
        cost, used: of the node and the factors, seconds and bytes (rows, memory rows).
        children: bucket numbers, and per row their group.
    """

    node: int
    strategy: np.ndarray
    group: np.ndarray
    groups: int
    cost: np.ndarray
    used: np.ndarray
    children: list[tuple[int, np.ndarray]]

    def keep(self, rows: np.ndarray) -> None:
        """Only these rows (bool)."""
        self.strategy, self.group = self.strategy[rows], self.group[rows]
        self.cost, self.used = self.cost[rows], self.used[rows]
        self.children = [(b, group[rows]) for b, group in self.children]


class Relations:
    """What is left to decide: nodes, their strategies alive with the slack of each, and relations.

    Args:
        relaxed: relaxations of the net, with messages.
        room: largest slack wanted, per relaxation.

    Raises:
        EmptyNodeError: no plan is wanted.
    """

    def __init__(self, relaxed: Relaxations, room: np.ndarray) -> None:
        net = relaxed.net
        self.net, self.room, self.rows = net, room, len(net.base)
        self.alive = {v: net.alive[v] for v in net.live}
        self.theta = {v: np.column_stack([m.theta[v] for m in relaxed.messages]) for v in net.live}
        self.relations: dict[int, Relation] = {}
        self.incident: dict[int, dict[int, None]] = {v: dict(net.incident[v]) for v in net.live}
        self.next = net.next_factor
        self.buckets: list[Bucket] = []
        for number, f in net.factors.items():
            slack = np.stack([m.tables[number] for m in relaxed.messages], axis=-1)
            cells = np.argwhere((slack <= room).all(axis=-1) & np.isfinite(f.table))
            at = tuple(cells.T)
            used = np.zeros((len(cells), self.rows), np.int64)
            if f.used is not None:
                used = np.column_stack([own[at] for own in f.used])
            self.relations[number] = Relation(
                f.scope, f.labels, f.table.shape, list(cells.T), slack[at], f.table[at], used
            )
        self.prune()

    def branches(self) -> list[Relations]:
        """Two copies that share all plans: each has half of the strategies of the node that most rows are of.

        Strategies that are alike in the widest relation of the node stay together; none where all are, of every node.
        """
        rows = {v: sum(len(self.relations[n].slack) for n in self.incident[v]) for v in self.live}
        for v in sorted(rows, key=lambda w: (-rows[w], w)):
            if not self.incident[v]:
                continue
            widest = max((self.relations[n] for n in self.incident[v]), key=lambda r: len(r.slack))
            k = widest.scope.index(v)
            label = widest.labels[k][self.alive[v]]
            labels = np.unique(label)
            if len(labels) > 1:
                counts = np.bincount(widest.columns[k], minlength=widest.sizes[k])[labels]
                half = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
                first = label <= labels[min(half, len(labels) - 2)]
                return [self._copy(v, part) for part in (first, ~first)]
        return []

    def _copy(self, v: int, strategies: np.ndarray) -> Relations:
        """A copy with these strategies of ``v`` (bool, of those alive)."""
        other = copy.copy(self)
        other.alive, other.theta = dict(self.alive), {w: t.copy() for w, t in self.theta.items()}
        other.relations = {n: replace(r, slack=r.slack.copy()) for n, r in self.relations.items()}
        other.incident = {w: dict(i) for w, i in self.incident.items()}
        other.buckets = [replace(b) for b in self.buckets]
        other.alive[v], other.theta[v] = self.alive[v][strategies], other.theta[v][strategies]
        return other

    @property
    def live(self) -> list[int]:
        """Nodes left, ascending."""
        return sorted(self.alive)

    def left(self) -> dict[int, np.ndarray]:
        """Strategies of each node, eliminated or not, that may be in a wanted plan."""
        return {b.node: np.unique(b.strategy) for b in self.buckets if b.node >= 0} | self.alive

    def count(self) -> int:
        """Rows left."""
        return sum(len(r.slack) for r in self.relations.values())

    def prune(self) -> None:
        """Drop strategies and rows that are in no wanted plan.

        Raises:
            EmptyNodeError: nothing is left of one.
        """
        for v, theta in self.theta.items():
            fits = (theta <= self.room).all(axis=1)
            if not fits.all():
                self.theta[v], self.alive[v] = theta[fits], self.alive[v][fits]
            if not fits.any():
                raise EmptyNodeError(v)
        for number, r in self.relations.items():
            total = r.slack
            for v, labels, size, column in zip(r.scope, r.labels, r.sizes, r.columns, strict=True):
                total = total + kernels.least_by(labels[self.alive[v]], self.theta[v], size)[column]
            fits = np.asarray((total <= self.room).all(axis=1))
            if not fits.any():
                raise EmptyNodeError(number)
            if not fits.all():
                r.keep(fits)

    def eliminate(self, v: int, most: int) -> list[int] | None:
        """Join all relations of ``v`` and leave one over its neighbours; these, or None where rows exceed ``most``.

        Raises:
            EmptyNodeError: nothing is left.
        """
        join = _Join(self, v, most)
        left = dict(self.incident[v])
        while left:
            number = min(left, key=join.next_cost)
            del left[number]
            if not join.add(number):
                return None
        if not len(join.strategy):
            raise EmptyNodeError(v)
        scope, sizes = list(join.joint), [int(j.max()) + 1 for j in join.joint.values()]
        (code,) = _codes(sizes, [[join.columns[w] for w in scope]], len(join.strategy))
        order = np.argsort(code, kind="stable")
        begins = np.concatenate(([True], np.diff(code[order]) != 0))
        least = np.minimum.reduceat(join.slack[order], np.flatnonzero(begins), axis=0)
        children = [(b, group[order]) for b, group in join.children]
        group, strategy = np.cumsum(begins) - 1, self.alive[v][join.strategy[order]]
        self.buckets.append(Bucket(v, strategy, group, len(least), join.cost[order], join.used[order], children))
        for number in list(self.incident[v]):
            for w in self.relations.pop(number).scope:
                del self.incident[w][number]
        del self.alive[v], self.theta[v], self.incident[v]
        columns = [join.columns[w][order][begins] for w in scope]
        self._leave(tuple(scope), [join.joint[w] for w in scope], sizes, columns, least)
        return scope

    def _leave(
        self,
        scope: tuple[int, ...],
        labels: list[np.ndarray],
        sizes: list[int],
        columns: list[np.ndarray],
        least: np.ndarray,
    ) -> None:
        """The last bucket's groups, as a relation of its neighbours."""
        count = len(least)
        none = np.zeros((count, self.rows), np.int64)
        self.relations[self.next] = Relation(
            scope,
            tuple(labels),
            tuple(sizes),
            columns,
            least.copy(),
            np.zeros(count),
            none,
            len(self.buckets) - 1,
            np.arange(count),
        )
        for w in scope:
            self.incident[w][self.next] = None
        self.next += 1

    def finish(self) -> np.ndarray:
        """One bucket more, with one row, for the parts that are left without nodes; their slack per relaxation.

        Raises:
            EmptyNodeError: no plan is wanted.
        """
        one = np.zeros(1, np.int64)
        parts = list(self.relations.values())
        slack = np.sum([np.zeros(len(self.room)), *(r.slack[0] for r in parts)], axis=0)
        if (slack > self.room).any():
            raise EmptyNodeError(-1)
        children = [(r.bucket, one) for r in parts]
        used = np.zeros((1, self.rows), np.int64)
        self.buckets.append(Bucket(-1, one, one, 1, np.zeros(1), used, children))
        return slack


class _Join:
    """The rows of one bucket as its relations are joined one by one.

    Attributes:
        joint: per neighbour, the joint label of each of its strategies over all relations of the node.
        strategy: per row, the place of its strategy among those alive.
        columns: per neighbour met, the joint label of each row.
    """

    def __init__(self, owner: Relations, v: int, most: int) -> None:
        self.owner, self.node, self.most = owner, v, most
        meets: dict[int, list[int]] = {}
        for number in owner.incident[v]:
            for w in owner.relations[number].scope:
                if w != v:
                    meets.setdefault(w, []).append(number)
        self.joint: dict[int, np.ndarray] = {}
        self.own: dict[tuple[int, int], np.ndarray] = {}  # by relation and neighbour: its label of each joint label
        for w, numbers in meets.items():
            axes = [(owner.relations[n], owner.relations[n].scope.index(w)) for n in numbers]
            labels, sizes = [r.labels[k] for r, k in axes], [r.sizes[k] for r, k in axes]
            self.joint[w], own = joint_labels(owner.alive[w], len(owner.net.cost[w]), labels, sizes)
            self.own.update({(n, w): o for n, o in zip(numbers, own, strict=True)})
        alive, held = owner.alive[v], owner.net.used[v]
        self.strategy = np.arange(len(alive))
        self.slack, self.cost = owner.theta[v], owner.net.cost[v][alive]
        self.used = np.zeros((len(alive), owner.rows), np.int64) if held is None else held[:, alive].T
        self.columns: dict[int, np.ndarray] = {}
        self.children: list[tuple[int, np.ndarray]] = []

    def next_cost(self, number: int) -> tuple[int, int]:
        """What to join first: what meets the fewest new nodes, in the fewest rows."""
        r = self.owner.relations[number]
        return sum(w != self.node and w not in self.columns for w in r.scope), len(r.slack)

    def add(self, number: int) -> bool:
        """Join one relation; False where rows exceed the most."""
        r = self.owner.relations[number]
        mine, its, sizes, fresh = [], [], [], []
        for k, w in enumerate(r.scope):
            if w == self.node:
                mine.append(r.labels[k][self.owner.alive[w]][self.strategy])
            elif w in self.columns:
                mine.append(self.own[number, w][self.columns[w]])
            else:
                fresh.append((k, w))
                continue
            its.append(r.columns[k])
            sizes.append(r.sizes[k])
        left_code, right_code = _codes(sizes, [mine, its])
        order = np.argsort(right_code, kind="stable")
        ordered = right_code[order]
        first, last = np.searchsorted(ordered, left_code, "left"), np.searchsorted(ordered, left_code, "right")
        found, left, right, slack = kernels.join_rows(
            first, last, order, self.slack, r.slack, self.owner.room, self.most, WORK * self.most
        )
        if not found:
            return False
        self._take(left)
        self.slack = slack
        self.cost, self.used = self.cost + r.cost[right], self.used + r.used[right]
        if r.group is not None:
            self.children.append((r.bucket, r.group[right]))
        for k, w in fresh:
            self.columns[w] = r.columns[k][right]
        return all(self._refine(w, self.own[number, w]) for _, w in fresh)

    def _refine(self, w: int, own: np.ndarray) -> bool:
        """From a relation's own labels of ``w`` to the joint ones, of which several may stand for one of its own."""
        if np.array_equal(own, np.arange(len(own))):
            return True
        order = np.argsort(own, kind="stable")
        ordered = own[order]
        first = np.searchsorted(ordered, self.columns[w], "left")
        counts = np.searchsorted(ordered, self.columns[w], "right") - first
        total = int(counts.sum())
        if total > WORK * self.most:
            return False
        rows = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        self._take(rows)
        self.columns[w] = order[np.repeat(first, counts) + within]
        return total <= self.most

    def _take(self, rows: np.ndarray) -> None:
        self.strategy, self.slack = self.strategy[rows], self.slack[rows]
        self.cost, self.used = self.cost[rows], self.used[rows]
        self.columns = {w: c[rows] for w, c in self.columns.items()}
        self.children = [(b, group[rows]) for b, group in self.children]


def _codes(sizes: Sequence[int], sides: Sequence[Sequence[np.ndarray]], count: int = 0) -> list[np.ndarray]:
    """One number per row and side, equal where all columns are.

    Args:
        sizes: labels of each column.
        sides: columns, per side.
        count: rows, where there are no columns.
    """
    ends = np.cumsum([len(columns[0]) if columns else count for columns in sides])
    code, most = np.zeros(ends[-1], np.int64), 1
    for i, size in enumerate(sizes):
        if most * size > MOST_CODES:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
            most = int(code.max(initial=0)) + 1
        code, most = code * size + np.concatenate([columns[i] for columns in sides]), most * size
    return np.split(code, ends[:-1])
