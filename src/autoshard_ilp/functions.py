"""Plans for any JAX function: a hand-written training step, a forward pass, a step of another library.

The arguments of ``fn`` are named ``args/<position>/<keys>``, its results ``outputs/<keys>``; a result that is the new
value of a donated argument has that argument's name, and, like it, one layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.arguments import integer
from autoshard_ilp.errors import AutoshardError, InputShapeError, UnsupportedModelError
from autoshard_ilp.plan import Plan
from autoshard_ilp.processes import announced
from autoshard_ilp.program.model import SolverOptions
from autoshard_ilp.traced import ArgumentInfo, ResultInfo

Donate = str | int | Sequence[int]


@dataclass(frozen=True)
class TracedFunction:
    """One traced JAX function.

    Attributes:
        closed_jaxpr: ``jax.core.ClosedJaxpr`` on flat arguments.
        args: pytree of ``jax.ShapeDtypeStruct`` per positional argument.
        arguments, results: in flat order; role "parameter" for donated arguments and their new values, else "input"
            and "output".
        out_tree: tree structure of the result.
        aliases: flat result index -> flat argument index, for donated arguments.
        donated: positional arguments whose buffers the results take over.
    """

    closed_jaxpr: Any
    args: tuple[Any, ...]
    arguments: tuple[ArgumentInfo, ...]
    results: tuple[ResultInfo, ...]
    out_tree: Any
    aliases: dict[int, int]
    donated: tuple[int, ...]


@announced
def optimize_fn(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Any,
    memory_budget: str | int | None = None,
    *,
    hardware: Any = None,
    donate_argnums: Donate = "auto",
    pins: Mapping[str, Any] | None = None,
    objective: str = "step_time",
    solver: SolverOptions | None = None,
    strict: bool = False,
    while_trip_count: int | None = None,
    progress: Any = None,
) -> Plan:
    """Finds the fastest layout of every tensor of a JAX function within a memory budget, and proves it.

    Args:
        fn: any function of arrays that ``jax.jit`` could compile; it is traced once.
        args: its positional arguments, pytrees of arrays or ``jax.ShapeDtypeStruct``; nothing is computed.
        mesh, memory_budget, hardware, objective, solver, strict, progress: as for :func:`autoshard_ilp.optimize`.
        donate_argnums: arguments whose buffers the results take over, as in ``jax.jit``; () for none. "auto": the
            leading results that are like the leading arguments (same tree structure, shapes and dtypes) are taken as
            their new values: ``(params, opt_state, batch) -> (params, opt_state, loss)`` donates the first two. A
            function that returns its first argument's structure alone donates that, unless it is a single array.
        while_trip_count: iterations that each ``jax.lax.while_loop`` is priced at; None: what its own constants say (a
            counter from, by and to known integers), else one. A scan's own count is known.
        pins: ``{regex on a path: PartitionSpec or tuple}``; paths are "args/<i>/<keys>" and "outputs/<keys>".

    Returns:
        The plan, of mode "function". ``plan.step`` has the signature of ``fn``, ``plan.in_shardings`` one pytree per
        argument, and ``plan.jit()`` is the compiled step with shardings and donation.

    Raises:
        InputShapeError: arguments, mesh, budget, pins or ``donate_argnums`` that make no sense.
        UnsupportedModelError: ``fn`` is not a function, or cannot be traced.
        InfeasibleError: no plan fits the budget and the pins; carries the smallest budget that does.
    """
    from autoshard_ilp import agreement, processes
    from autoshard_ilp.graph.equal import has_one_copy
    from autoshard_ilp.graph.step import check_trip_count, step_of
    from autoshard_ilp.planning import plan_step
    from autoshard_ilp.program.kernels.ahead import compile_ahead
    from autoshard_ilp.progress import Progress
    from autoshard_ilp.request import check_request

    check_function(fn, args)
    check_trip_count(while_trip_count)
    request = check_request(mesh, memory_budget, hardware, pins, objective, solver, strict)
    with Progress(progress).running() as shown:
        compile_ahead()
        with shown.stage("trace"):
            traced = trace_function(fn, args, donate_argnums)
        with shown.stage("graph"):
            one_copy = has_one_copy(request.profile)
            own = traced, traced.args, traced.donated
            step = step_of(*own, while_trip_count=while_trip_count, one_copy=one_copy)
        with processes.together("planning a function") as meeting:
            plan = agreement.planned_once(
                meeting,
                lambda: agreement.facts_of_step(step, traced, request, "function"),
                lambda: plan_step(step, traced, request, shown, mode="function", batch_size=0),
                lambda policy: step,
            )
    return replace(plan, notes=(_donation_note(traced.donated), *plan.notes))


@compat.without_explicit_mesh()
@compat.with_jit()
def trace_function(fn: Callable[..., Any], args: tuple[Any, ...], donate_argnums: Donate = "auto") -> TracedFunction:
    """Traces a function once; see :func:`optimize_fn` for the arguments and errors."""
    import jax

    check_function(fn, args)
    specs = tuple(_specs(arg, f"args/{i}") for i, arg in enumerate(args))
    try:
        closed_jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*specs)
        closed_jaxpr = compat.without_refs(closed_jaxpr)
    except AutoshardError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"The function must be traceable by jax.jit with these arguments. Received: {_name(fn)}, which failed with "
            f"{type(error).__name__}: {error}\nTry jax.make_jaxpr(fn)(*args); bind arguments that are not arrays with "
            "functools.partial."
        ) from error
    donated, pairs = _donation(specs, out, donate_argnums)
    arguments = _arguments(specs, donated)
    results, aliases = _results(arguments, specs, out, pairs)
    return TracedFunction(closed_jaxpr, specs, arguments, results, jax.tree.structure(out), aliases, donated)


def check_function(fn: Any, args: Any) -> None:
    """Raises UnsupportedModelError or InputShapeError where ``fn(*args)`` is no call of a plain function."""
    keras = sys.modules.get("keras")  # a Keras model can only come from a Keras that is loaded
    if keras is not None and isinstance(fn, keras.Model):
        raise UnsupportedModelError(
            f"optimize_fn plans JAX functions, whose weights are arguments. Received: the Keras model {fn.name!r}, "
            "which holds its weights. Use autoshard_ilp.optimize(model, mesh)."
        )
    if not callable(fn):
        raise UnsupportedModelError(
            f"optimize_fn plans a JAX function. Received: {fn!r} of type {type(fn).__name__}, which cannot be called."
        )
    if not isinstance(args, tuple):
        raise InputShapeError(
            f"args is a tuple with one entry per positional argument of the function. Received: {type(args).__name__}. "
            "For a single argument write args=(x,)."
        )


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or repr(fn))


def _specs(arg: Any, path: str) -> Any:
    """``jax.ShapeDtypeStruct`` of every leaf: dtypes as JAX takes them, Python scalars weakly typed."""
    import jax

    from autoshard_ilp.batch import leaf_name

    def spec(key: Any, leaf: Any) -> Any:
        try:
            found = jax.eval_shape(lambda x: x, leaf)
        except (TypeError, ValueError) as error:
            name = "/".join(filter(None, (path, leaf_name(key))))
            raise InputShapeError(
                "Arguments are pytrees of arrays or jax.ShapeDtypeStruct. Received: "
                f"{name} = {leaf!r} of type {type(leaf).__name__}. Bind what is no array with functools.partial."
            ) from error
        return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=getattr(found, "weak_type", False))

    return jax.tree_util.tree_map_with_path(spec, arg)


# -- which results replace which arguments ---------------------------------------------------------------------------


def _signature(tree: Any) -> Any:
    import jax

    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(x.shape), str(x.dtype)) for x in leaves)


def _donation(specs: tuple[Any, ...], out: Any, donate_argnums: Donate) -> tuple[tuple[int, ...], dict[int, int]]:
    """Donated positions, and argument position -> position in the result that is its new value (-1: all of it)."""
    import jax

    wanted = _positions(donate_argnums, len(specs))
    alone = len(specs) > 0 and _signature(out) == _signature(specs[0]) and not hasattr(out, "shape")
    if alone and (wanted is None or 0 in wanted):
        return wanted or (0,), {0: -1}
    parts = list(out) if isinstance(out, (tuple, list)) else []
    if wanted is None:
        count = 0
        for arg, part in zip(specs, parts, strict=False):
            if not jax.tree.leaves(arg) or _signature(arg) != _signature(part):
                break
            count += 1
        return tuple(range(count)), {i: i for i in range(count)}
    pairs: dict[int, int] = {}
    if not isinstance(out, (tuple, list)):
        return wanted, {i: -1 for i in wanted[:1] if _signature(specs[i]) == _signature(out)}
    free = list(range(len(parts)))
    for i in wanted:
        # The result at the argument's own position first, then the next one that is like it.
        for j in sorted(free, key=lambda j: (j != i, j)):
            if _signature(specs[i]) == _signature(parts[j]):
                pairs[i] = j
                free.remove(j)
                break
    return wanted, pairs


def _positions(donate_argnums: Donate, n_args: int) -> tuple[int, ...] | None:
    """Donated positions as a sorted tuple; None for "auto"."""
    if isinstance(donate_argnums, str):
        if donate_argnums == "auto":
            return None
        positions: tuple[Any, ...] = (donate_argnums,)
    else:
        positions = tuple(donate_argnums) if isinstance(donate_argnums, Iterable) else (donate_argnums,)
    numbers = [integer(p) for p in positions]
    if any(p is None or not -n_args <= p < n_args for p in numbers):
        raise InputShapeError(
            f'donate_argnums is "auto" or positions of the {n_args} arguments. Received: {donate_argnums!r}.'
        )
    return tuple(sorted({p % n_args for p in numbers if p is not None}))


def _donation_note(donated: tuple[int, ...]) -> str:
    if not donated:
        return "No argument is donated."
    return (
        f"Donated, so that results may take over their buffers: arguments {', '.join(map(str, donated))}. "
        "donate_argnums=() keeps them."
    )


# -- names -----------------------------------------------------------------------------------------------------------


def _leaves(tree: Any, prefix: str) -> list[tuple[str, Any]]:
    import jax

    from autoshard_ilp.batch import leaf_name

    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [("/".join(filter(None, (prefix, leaf_name(key)))), leaf) for key, leaf in found]


def _unique(names: Sequence[str]) -> list[str]:
    """Names of which no two are equal (the keys 1 and "1" of a dictionary look the same)."""
    seen: set[str] = set()
    found = []
    for name in names:
        candidate, count = name, 1
        while candidate in seen:
            count += 1
            candidate = f"{name}#{count}"
        seen.add(candidate)
        found.append(candidate)
    return found


def _arguments(specs: tuple[Any, ...], donated: Sequence[int]) -> tuple[ArgumentInfo, ...]:
    leaves = [(i, name, leaf) for i, arg in enumerate(specs) for name, leaf in _leaves(arg, f"args/{i}")]
    paths = _unique([name for _, name, _ in leaves])
    return tuple(
        ArgumentInfo(path, "parameter" if i in donated else "input", tuple(leaf.shape), str(leaf.dtype))
        for path, (i, _, leaf) in zip(paths, leaves, strict=True)
    )


def _results(
    arguments: Sequence[ArgumentInfo], specs: tuple[Any, ...], out: Any, pairs: Mapping[int, int]
) -> tuple[tuple[ResultInfo, ...], dict[int, int]]:
    """Results in flat order, those that replace an argument under its name, and the aliases."""
    import jax

    first_argument, first_result = [0], [0]
    for arg in specs:
        first_argument.append(first_argument[-1] + len(jax.tree.leaves(arg)))
    for part in out if isinstance(out, (tuple, list)) else ():
        first_result.append(first_result[-1] + len(jax.tree.leaves(part)))
    aliases: dict[int, int] = {}
    for i, j in pairs.items():
        start = 0 if j < 0 else first_result[j]
        for k in range(first_argument[i + 1] - first_argument[i]):
            aliases[start + k] = first_argument[i] + k
    leaves = _leaves(out, "outputs")
    names = _unique([f"{name}/0" if name == "outputs" else name for name, _ in leaves])
    results = []
    for position, (name, (_, leaf)) in enumerate(zip(names, leaves, strict=True)):
        shape, dtype = tuple(leaf.shape), str(leaf.dtype)
        if position in aliases:
            argument = arguments[aliases[position]]
            results.append(ResultInfo(argument.path, argument.role, shape, dtype))
        else:
            results.append(ResultInfo(name, "output", shape, dtype))
    return tuple(results), aliases
