"""A synthetic program shaped like a transformer's training step: blocks, skips, shared weights, backward, lifetimes.

Every operation is one node whose strategies assign each mesh axis to one factor (or to none); edges price the change
of layout between a producer and its consumers. Noise breaks the symmetry between blocks.
"""

from __future__ import annotations

import itertools

import numpy as np

from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program

FLOPS_PER_S, BYTES_PER_S, LATENCY = 1e14, 5e10, 1e-6


class TrainingStep:
    """Collects nodes and edges while the step is written down operation by operation."""

    def __init__(self, mesh: tuple[int, ...], sizes: dict[str, int], seed: int) -> None:
        self.mesh, self.sizes = mesh, sizes
        self.rng = np.random.default_rng(seed)
        self.nodes: list[tuple[str, np.ndarray, np.ndarray]] = []
        self.out: list[tuple[str, np.ndarray, list[tuple[int, ...]]]] = []  # dims, label per strategy, layouts
        self.edges: list[Edge] = []
        self.last: list[int] = []
        self.persistent: set[int] = set()

    def layouts(self, dims: str) -> list[tuple[int, ...]]:
        """All layouts of a tensor: per mesh axis the dimension it shards, or -1."""
        return list(itertools.product(range(-1, len(dims)), repeat=len(self.mesh)))

    def bytes_of(self, dims: str, layout: tuple[int, ...]) -> float:
        """Bytes per device of one tensor."""
        total = 2.0
        for d in dims:
            total *= self.sizes[d]
        for axis, d in enumerate(layout):
            total /= self.mesh[axis] if d >= 0 else 1
        return total

    def reshard(self, dims: str, a: tuple[int, ...], b: tuple[int, ...]) -> float:
        """Seconds to go from layout a to layout b."""
        if a == b:
            return 0.0
        cost = 0.0
        held = self.bytes_of(dims, a)
        for x, y, n in zip(a, b, self.mesh, strict=True):
            if x != y and x >= 0:
                grow = n if y < 0 else 1
                cost += LATENCY * n + held * grow * (n - 1) / n / BYTES_PER_S
                held *= grow
        return cost

    def op(self, name: str, inputs: list[tuple[int, str]], out: str, flops: float = 1.0, held: float = 1.0) -> int:
        """One operation; ``inputs`` are (node, dims); factors are the letters; letters not in ``out`` are reduced."""
        letters = "".join(dict.fromkeys(out + "".join(d for _, d in inputs)))
        strategies = list(itertools.product(range(-1, len(letters)), repeat=len(self.mesh)))
        cost, size, label = [], [], []
        layouts = self.layouts(out)
        index = {layout: i for i, layout in enumerate(layouts)}
        work = flops
        for d in letters:
            work *= self.sizes[d]
        for s in strategies:
            layout = tuple(out.find(letters[f]) if f >= 0 else -1 for f in s)
            seconds, own = work, self.bytes_of(out, layout)
            for axis, f in enumerate(s):
                if f >= 0:
                    seconds /= self.mesh[axis]
            seconds /= FLOPS_PER_S
            for axis, f in enumerate(s):
                if f >= 0 and letters[f] not in out:
                    n = self.mesh[axis]
                    seconds += LATENCY * n + 2 * own * (n - 1) / n / BYTES_PER_S
            cost.append(seconds * (1 + 0.05 * self.rng.random()))
            size.append(held * own)
            label.append(index[layout])
        v = len(self.nodes)
        self.nodes.append((name, np.array(cost), np.array(size).astype(np.int64)))
        self.out.append((out, np.array(label), layouts))
        self.last.append(v + 1)
        for u, dims in inputs:
            wanted = [tuple(dims.find(letters[f]) if f >= 0 else -1 for f in s) for s in strategies]
            self.connect(u, v, wanted)
        return v

    def connect(self, u: int, v: int, wanted: list[tuple[int, ...]]) -> None:
        """An edge that reshards the output of u to what each strategy of v wants."""
        dims, label, layouts = self.out[u]
        index = {layout: i for i, layout in enumerate(layouts)}
        table = np.array([[self.reshard(dims, a, b) for b in layouts] for a in layouts])
        self.edges.append(Edge(u, v, label, np.array([index[w] for w in wanted]), table))
        self.last[u] = max(self.last[u], v + 1)

    def program(self, capacity: int | None = None) -> Program:
        """The program; weights live for ever, activations from birth to last use."""
        end = len(self.nodes)
        start = np.array([0 if v in self.persistent else v for v in range(end)])
        stop = np.array([end if v in self.persistent else self.last[v] for v in range(end)])
        lifetimes = Lifetimes(np.zeros(end, bool), np.arange(end), start, stop)
        nodes = tuple(Node(n, c, b) for n, c, b in self.nodes)
        return Program(nodes, tuple(self.edges), lifetimes, capacity)


def training_step(blocks: int, mesh: tuple[int, ...] = (2, 4), seed: int = 0, capacity: int | None = None) -> Program:
    """Forward and backward through ``blocks`` gated transformer blocks (about 43 nodes each)."""
    sizes = {"b": 8, "t": 1024, "d": 2048, "h": 2048, "f": 8192, "s": 1024}
    g = TrainingStep(mesh, sizes, seed)

    def weight(name: str, dims: str) -> int:
        v = g.op(name, [], dims, held=6.0)
        g.persistent.add(v)
        return v

    tape: list[tuple[int, dict[str, int]]] = []
    x = g.op("embed", [], "btd")
    for i in range(blocks):
        w = {
            k: weight(f"{i}/{k}", d) for k, d in zip("qkvougd", ("dh", "dh", "dh", "hd", "df", "df", "fd"), strict=True)
        }
        n1 = g.op(f"{i}/norm1", [(x, "btd")], "btd")
        q, k, v = (g.op(f"{i}/{m}", [(n1, "btd"), (w[m], "dh")], "bth", 2) for m in "qkv")
        scores = g.op(f"{i}/scores", [(q, "bth"), (k, "bth")], "bth", 4)
        mixed = g.op(f"{i}/mixed", [(scores, "bth"), (v, "bth")], "bth", 4)
        o = g.op(f"{i}/o", [(mixed, "bth"), (w["o"], "hd")], "btd", 2)
        y = g.op(f"{i}/add1", [(x, "btd"), (o, "btd")], "btd")
        n2 = g.op(f"{i}/norm2", [(y, "btd")], "btd")
        u, gate = (g.op(f"{i}/{m}", [(n2, "btd"), (w[m], "df")], "btf", 2) for m in "ug")
        act = g.op(f"{i}/act", [(u, "btf"), (gate, "btf")], "btf")
        down = g.op(f"{i}/d", [(act, "btf"), (w["d"], "fd")], "btd", 2)
        names = {"x": x, "n1": n1, "qo": q, "ko": k, "vo": v, "scores": scores, "mixed": mixed, "y": y}
        names |= {"n2": n2, "uo": u, "go": gate, "act": act}
        tape.append((i, names | w))
        x = g.op(f"{i}/add2", [(y, "btd"), (down, "btd")], "btd")
    grad = g.op("loss", [(x, "btd")], "btd")
    for i, t in reversed(tape):
        grad = _backward(g, i, t, grad)
    return g.program(capacity)


def _backward(g: TrainingStep, i: int, t: dict[str, int], grad: int) -> int:
    def linear(name: str, dy: int, dims_y: str, x: int, dims_x: str) -> int:
        inner, outer = dims_x[-1], dims_y[-1]
        dx = g.op(f"{i}/d_{name}", [(dy, dims_y), (t[name], inner + outer)], dims_x, 2)
        dw = g.op(f"{i}/w_{name}", [(x, dims_x), (dy, dims_y)], inner + outer, 2)
        layouts = g.layouts(inner + outer)
        v = t[name]
        table = np.array([[g.reshard(inner + outer, a, b) for b in layouts] for a in layouts])
        g.edges.append(Edge(dw, v, g.out[dw][1], g.out[v][1], table))
        return dx

    d_act = linear("d", grad, "btd", t["act"], "btf")
    d_u = g.op(f"{i}/d_act_u", [(d_act, "btf"), (t["go"], "btf")], "btf")
    d_g = g.op(f"{i}/d_act_g", [(d_act, "btf"), (t["uo"], "btf"), (t["go"], "btf")], "btf")
    d_n2 = g.op(
        f"{i}/sum_n2",
        [(linear("u", d_u, "btf", t["n2"], "btd"), "btd"), (linear("g", d_g, "btf", t["n2"], "btd"), "btd")],
        "btd",
    )
    d_y = g.op(f"{i}/d_norm2", [(d_n2, "btd"), (t["y"], "btd"), (grad, "btd")], "btd")
    d_mixed = linear("o", d_y, "btd", t["mixed"], "bth")
    d_scores = g.op(f"{i}/d_scores", [(d_mixed, "bth"), (t["vo"], "bth"), (t["scores"], "bth")], "bth", 4)
    d_v = g.op(f"{i}/d_v", [(d_mixed, "bth"), (t["scores"], "bth")], "bth", 4)
    d_q = g.op(f"{i}/d_q", [(d_scores, "bth"), (t["ko"], "bth")], "bth", 4)
    d_k = g.op(f"{i}/d_k", [(d_scores, "bth"), (t["qo"], "bth")], "bth", 4)
    parts = [linear(m, dy, "bth", t["n1"], "btd") for m, dy in (("q", d_q), ("k", d_k), ("v", d_v))]
    d_n1 = g.op(f"{i}/sum_n1", [(p, "btd") for p in parts], "btd")
    return g.op(f"{i}/d_norm1", [(d_n1, "btd"), (t["x"], "btd"), (d_y, "btd")], "btd")
