"""Random programs for the solver's tests: small ones for the oracle, a large one shaped like a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from autoshard_ilp.program import minimum_capacity, solve
from autoshard_ilp.program.kernels import loading
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program, SolverOptions


def load_in(seconds: float) -> float:
    """In place of ``load_windows``: kernels that seem to compile for so long."""
    loading._loaded[0] += seconds
    return seconds


def _values(rng: np.random.Generator, shape: tuple[int, ...], style: str, forbidden: float) -> np.ndarray:
    if style == "ties":
        out = rng.integers(0, 3, shape).astype(np.float64)
    elif style == "decades":
        out = 10.0 ** rng.uniform(-8, 1, shape)
    else:
        out = rng.random(shape)
    out[rng.random(shape) < 0.25] = 0.0
    out[rng.random(shape) < forbidden] = np.inf
    return out


def pairs_of(rng: np.random.Generator, count: int, shape: str) -> list[tuple[int, int]]:
    """Node pairs of a graph family."""
    if shape == "tree":
        return [(int(rng.integers(v)), v) for v in range(1, count)]
    if shape == "cycle":
        return [(v, (v + 1) % count) for v in range(count)] if count > 2 else [(0, 1)] * (count > 1)
    if shape == "clique":
        return [(u, v) for u in range(count) for v in range(u)]
    if shape == "parallel":
        base = [(int(rng.integers(v)), v) for v in range(1, count)]
        return base + [(v, u) for u, v in base]
    return [(u, v) for u in range(count) for v in range(u) if rng.random() < 0.4]


def random_program(
    seed: int, count: int, shape: str, style: str, forbidden: float = 0.1, memory: bool = False, most: int = 4
) -> Program:
    """A program of ``count`` nodes with up to ``most`` strategies; with ``memory`` also bytes and lifetimes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, count)

    def held(shape: tuple[int, ...]) -> np.ndarray | None:
        return rng.integers(0, 6, shape) * 10 if memory and rng.random() < 0.7 else None

    nodes = tuple(
        Node(f"n{v}", _values(rng, (int(n),), style, forbidden / 2), held((int(n),))) for v, n in enumerate(sizes)
    )
    edges = []
    for u, v in pairs_of(rng, count, shape):
        rows, columns = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        table = _values(rng, (rows, columns), style, forbidden)
        edge_bytes = held((rows, columns)) if rng.random() < 0.3 else None
        edges.append(Edge(u, v, rng.integers(0, rows, sizes[u]), rng.integers(0, columns, sizes[v]), table, edge_bytes))
    lifetimes = Lifetimes.empty()
    if memory:
        many = 3 * count
        is_edge = (rng.random(many) < 0.3) & bool(edges)
        owner = np.where(is_edge, rng.integers(0, max(1, len(edges)), many), rng.integers(0, count, many))
        start = rng.integers(0, 8, many)
        lifetimes = Lifetimes(is_edge, owner, start, start + rng.integers(1, 5, many))
    return Program(nodes, tuple(edges), lifetimes)


@st.composite
def programs(draw: st.DrawFn, memory: bool = False) -> Program:
    """Small programs for comparison with brute force."""
    return random_program(
        draw(st.integers(0, 10**6)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from(["tree", "cycle", "clique", "parallel", "random"])),
        draw(st.sampled_from(["plain", "ties", "decades"])),
        draw(st.sampled_from([0.0, 0.1, 0.4])),
        memory,
    )


TIGHT_OPTIONS = SolverOptions(time_limit=60.0)


def tight(program: Program, part: float) -> Program | None:
    """With a capacity between the least possible and what the cheapest assignment takes; None where they agree."""
    free = solve(dataclasses.replace(program, capacity=None), TIGHT_OPTIONS)
    if free.choices is None:
        return None
    least = minimum_capacity(program, TIGHT_OPTIONS)[0]
    if free.peak_bytes <= least:
        return None
    return dataclasses.replace(program, capacity=least + int(part * (free.peak_bytes - least)))


def tight_programs(
    seeds: int, count: int, shape: str, part: float, forbidden: float = 0.05
) -> Iterator[tuple[int, Program]]:
    """Seeds and random programs of ``count`` nodes whose capacity is such a part of the way; others are left out."""
    for seed in range(seeds):
        program = tight(random_program(seed, count, shape, "plain", forbidden=forbidden, memory=True), part)
        if program is not None:
            yield seed, program
