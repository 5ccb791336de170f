"""The only place that imports private or moving parts of JAX (``jax.extend`` and what lies behind an equation).

Everything else asks these functions. When JAX renames something, this file changes and nothing else does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend import core as _core
from jax.extend import source_info_util as _source_info
from jax.sharding import AxisType

#: Equations that merely call another jaxpr, and the parameter that holds it; they are inlined.
CALL_PARAMS: Mapping[str, str] = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_jvp_call_jaxpr": "fun_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
    "xla_metadata_call": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}

LAYOUT_ONLY = frozenset({"reshard"})
"""What only moves its operand: JAX puts it around a constant that lies sharded on a mesh."""

REMAT_PRIMITIVES = frozenset({"remat", "remat2", "checkpoint"})


def in_order(eqn: Any) -> Callable[..., Any] | None:
    """What ``jax.debug.print`` or ``jax.debug.callback`` with ``ordered=True`` does, as an ordered ``io_callback``.

    JAX refuses the equation itself on more than one device; an ordered ``io_callback`` it runs there.

    Args:
        eqn: any equation.

    Returns:
        A function of the equation's operands, to be traced in its place; None for all other equations.
    """
    if not any(str(effect) == "OrderedDebug" for effect in eqn.effects):
        return None

    def on_the_host(*values: Any) -> None:
        eqn.primitive.bind(*values, **eqn.params)  # not traced, so it calls or prints at once

    def callback(*operands: Any) -> tuple[()]:
        io_callback(on_the_host, None, *operands, ordered=True)
        return ()

    return callback


@contextmanager
def without_explicit_mesh() -> Iterator[None]:
    """Leaves the mesh of ``jax.set_mesh`` if it has Explicit axes (those of ``jax.make_mesh``, unless told otherwise).

    A plan's own mesh has Auto axes, and within a context of Explicit ones JAX refuses every operation on its arrays.
    """
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        yield
        return
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


@contextmanager
def with_jit() -> Iterator[None]:
    """Leaves ``jax.disable_jit``: what a plan traces, creates sharded and compiles is traced and compiled all the same.

    Without ``jit`` a step has other equations, arrays are created whole, and nothing can be compiled ahead of time.
    """
    with jax.disable_jit(False):
        yield


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a literal (``.val``) rather than a variable."""
    return isinstance(atom, _core.Literal)


#: Primitives that only some platforms can lower; a branch with one of them is not for every platform.
_OF_ONE_PLATFORM = frozenset({"pallas_call", "ffi_call", "custom_call", "tpu_custom_call", "mosaic_gpu", "triton_call"})


def called_jaxpr(primitive: str, params: Mapping[str, Any]) -> tuple[Any, Sequence[Any], tuple[slice, ...]] | None:
    """What an equation runs that merely calls: jaxpr, constants, which of its operands; None for any other equation.

    A ``custom_linear_solve`` runs its ``solve`` (the other three only serve differentiation, which is over). A choice
    between platforms runs its default, or the first branch, that every platform can run.
    """
    everything = (slice(None),)
    if primitive == "custom_linear_solve":
        lengths = tuple(params["const_lengths"])
        first = sum(lengths[:2])
        return *open_jaxpr(params["jaxprs"].solve), (slice(first, first + lengths[2]), slice(sum(lengths), None))
    if primitive == "cond" and params.get("branches_platforms") is not None:
        platforms = params["branches_platforms"]
        branches = sorted(zip(platforms, params["branches"], strict=True), key=lambda pair: pair[0] is not None)
        portable = [b for p, b in branches if (p is None or "cpu" in p) and _primitives(b).isdisjoint(_OF_ONE_PLATFORM)]
        return (*open_jaxpr(portable[0]), (slice(1, None),)) if portable else None
    name = CALL_PARAMS.get(primitive)
    if name is None or name not in params:
        return None
    return *open_jaxpr(params[name]), everything


def _primitives(closed_jaxpr: Any) -> set[str]:
    """Names of all primitives in a jaxpr and those that it calls."""
    jaxpr, _ = open_jaxpr(closed_jaxpr)
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, (_core.Jaxpr, _core.ClosedJaxpr)):
                    found |= _primitives(inner)
    return found


#: Primitives on mutable arrays (``jax.new_ref``).
_ON_REFS = frozenset({"ref", "new_ref", "empty_ref", "get", "swap", "addupdate", "freeze"})


def without_refs(closed_jaxpr: Any) -> Any:
    """The same computation without mutable arrays: every write makes a new value, as JAX itself compiles them."""
    if _primitives(closed_jaxpr).isdisjoint(_ON_REFS):
        return closed_jaxpr
    from jax._src.state.discharge import discharge_state

    return discharge_state(closed_jaxpr)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """``(jaxpr, constants)`` of an open or a closed jaxpr."""
    if isinstance(jaxpr, _core.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def close_jaxpr(jaxpr: Any, constants: Sequence[Any]) -> Any:
    """A closed jaxpr of an open one and its constants."""
    return _core.ClosedJaxpr(jaxpr, list(constants))


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's leading operands are constants of its body, and how many then are carried.

    JAX 0.10 keeps two numbers; JAX 0.12 keeps three groups of operands (``ft_in``).
    """
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


def used_inputs(closed_jaxpr: Any) -> tuple[int, ...]:
    """Positions of the inputs that a jaxpr reads."""
    jaxpr, _ = open_jaxpr(closed_jaxpr)
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return tuple(i for i, v in enumerate(jaxpr.invars) if id(v) in read)


def run_jaxpr(closed_jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr; an input that it does not read may be None."""
    jaxpr, consts = open_jaxpr(closed_jaxpr)
    return list(jax.core.eval_jaxpr(jaxpr, consts, *args))


def decides_by_element(eqn: Any) -> bool:
    """Whether a ``while`` equation ends for every element of a batch by itself (``vmap`` makes such loops)."""
    return bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def bind_equation(eqn: Any, args: Sequence[Any], name_stack: Any, bind: Callable[..., Any]) -> list[Any]:
    """Runs one equation on ``args`` under its own source line, name stack and context.

    Args:
        eqn: a jaxpr equation.
        args: values of its operands.
        name_stack: name stack relative to the function being traced now.
        bind: what computes it, such as :func:`binder` has.

    Returns:
        its results, always as a list.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    with like_equation(eqn, name_stack):
        out = bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def platform_of(mesh: Any) -> str:
    """Platform of a mesh's devices, such as "cpu"; empty where it has none (an abstract mesh, or no mesh)."""
    return str(mesh.devices.flat[0].platform) if isinstance(mesh, jax.sharding.Mesh) else ""


def whole_slice(mesh: Any) -> tuple[int, ...]:
    """Chips along each axis of the TPU slice that a mesh is, where it is a whole one, one device per chip; else ()."""
    if platform_of(mesh) != "tpu":
        return ()
    places = {tuple(getattr(d, "coords", ())) for d in mesh.devices.flat}
    lengths = tuple(len(set(along)) for along in zip(*places, strict=True))
    return lengths if math.prod(lengths) == len(places) == mesh.devices.size else ()


def binder(eqn: Any, mesh: Any) -> Any:
    """The ``bind`` of an equation's primitive, in the memory order that its kernel needs on the mesh's devices.

    XLA:CPU (jaxlib 0.10) takes the order of a collective beside an ``fft`` over, and then refuses to run an ``fft``
    that is not in rows ("LayoutUtil::IsMonotonicWithDim0Major"). XLA:TPU knows no such constraint of complex numbers.
    """
    bind = eqn.primitive.bind
    if eqn.primitive.name != "fft" or platform_of(mesh) != "cpu":
        return bind
    return lambda value, **params: _in_rows(bind(_in_rows(value), **params))


@contextmanager
def like_equation(eqn: Any, name_stack: Any) -> Iterator[None]:
    """What is traced inside carries the equation's source line and context, under ``name_stack``."""
    stack = _source_info.current_name_stack() + name_stack
    around = _source_info.user_context(eqn.source_info.traceback, name_stack=stack)
    with around, eqn.ctx.manager, without_explicit_mesh():  # traces that JAX kept may come from within such a mesh
        yield


def trace_like(eqn: Any, function: Any, avals: Sequence[Any] | None = None) -> Any:
    """Closed jaxpr of ``function`` on ``avals`` (None: the equation's operand types), from the same source line."""
    if avals is None:
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    with _source_info.user_context(eqn.source_info.traceback, name_stack=empty_name_stack()):
        return jax.make_jaxpr(function)(*avals)


def gradient_of_max_pooling(eqn: Any, source: Any, operand: Any, zero: Any) -> Any:
    """What a ``select_and_scatter_add`` computes, added up from ``zero``, a scalar that need not be a constant.

    The image is padded before, as JAX does for GPUs, whose compiler pads none itself.

    Args:
        eqn: the equation.
        source: the cotangent of what the pooling returned.
        operand: the image.
        zero: of the cotangent's type.
    """
    from jax._src.lax.windowed_reductions import _select_and_scatter

    params, shape = eqn.params, operand.shape
    select, padding = params["select_prim"], params["padding"]
    floating = jnp.issubdtype(operand.dtype, jnp.floating)
    lowest = -jnp.inf if floating else jnp.iinfo(operand.dtype).min
    highest = jnp.inf if floating else jnp.iinfo(operand.dtype).max
    least = jnp.asarray(lowest if select is jax.lax.ge_p else highest, operand.dtype)
    padded = jax.lax.pad(operand, least, [(low, high, 0) for low, high in padding])
    out = _select_and_scatter(
        padded,
        select.bind,
        params["window_dimensions"],
        params["window_strides"],
        [(0, 0)] * len(padding),
        source,
        zero,
        jax.lax.add,
    )
    return jax.lax.slice(
        out, [low for low, _ in padding], [low + n for (low, _), n in zip(padding, shape, strict=True)]
    )


def under_name_stack(name_stack: Any) -> Any:
    """Context manager: what is traced inside carries ``name_stack`` (relative to the function being traced now)."""
    return _source_info.set_name_stack(_source_info.current_name_stack() + name_stack)


def empty_name_stack() -> Any:
    """The name stack without any name."""
    return _source_info.new_name_stack()


#: Files of Keras that every layer passes through: a line in them says nothing about the model.
_PLUMBING = re.compile(r"[/\\]keras[/\\]src[/\\](backend|ops|utils|random|tree)[/\\]")
_FRAME = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)$")


def source_line(eqn: Any) -> str:
    """The model's line behind an equation, ``"file.py:12 (function)"``; empty when it is unknown.

    It is the innermost frame outside of JAX and of Keras's own operations.
    """
    if eqn.source_info.traceback is None:
        return ""
    frames = _source_info.summarize(eqn.source_info, num_frames=16).splitlines()[::-1]
    chosen = next((f for f in frames if not _PLUMBING.search(f)), frames[0] if frames else "")
    match = _FRAME.match(chosen)
    if match is None:
        return chosen
    name = re.split(r"[/\\]", match["file"])[-1]
    return f"{name}:{match['line']} ({match['function'].split('.')[-1]})"


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is one of JAX's typed random keys."""
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


@cache
def dtype_name_and_size(dtype: Any) -> tuple[str, float]:
    """Name of a dtype and its bytes per element; sub-byte integers count their bits, keys their raw words."""
    if dtype is None:
        return "token", 0.0
    if is_key_dtype(dtype):
        return str(dtype), float(dtype.itemsize)
    name = np.dtype(dtype).name
    if name.startswith(("int", "uint")):
        return name, jax.numpy.iinfo(dtype).bits / 8
    return name, float(np.dtype(dtype).itemsize)


def compile_only_devices(platform: str, topology_name: str, **options: Any) -> tuple[Any, ...]:
    """Devices of a machine that is not there; programs can be compiled for them (``verify/targets.py`` has the names).

    Args:
        platform: ``"tpu"`` or ``"cuda"``.
        topology_name: libtpu's name of a slice, such as ``"v5e:4x4"``; empty for CUDA.
        options: what the compiler's library takes besides, such as ``wrap`` or ``target_config``.
    """
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(topology_name, platform=platform, **options)
    except NotImplementedError:
        if platform != "cuda" or not _register_cuda_without_gpu():
            raise
        described = topologies.get_topology_desc(topology_name, platform=platform, **options)
    return tuple(described.devices)


def _register_cuda_without_gpu() -> bool:
    """Registers JAX's CUDA plugin where its own discovery gave up because this machine has no GPU driver.

    That happens unless ``JAX_PLATFORMS`` leaves CUDA out. The plugin's check can be skipped; the compiler needs no
    driver. Returns whether a plugin is installed.
    """
    import importlib
    import os

    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    for module in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        try:
            plugin = importlib.import_module(module)
        except ImportError:
            continue
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            plugin.initialize()
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        return True
    return False


class Coordination:
    """The key-value store that the processes of one ``jax.distributed`` job share.

    Attributes:
        process, count: this process and how many there are.
    """

    def __init__(self, client: Any, process: int, count: int) -> None:
        self._client, self.process, self.count = client, process, count

    def put(self, key: str, value: str) -> None:
        """Stores a text under a key that nobody has used."""
        self._client.key_value_set(key, value)

    def get(self, key: str, timeout_seconds: float) -> str | None:
        """The text under a key, waited for; None when it does not come in time."""
        try:
            return str(self._client.blocking_key_value_get(key, int(timeout_seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "timed out" in str(error).lower():
                return None
            raise


def coordination() -> Coordination | None:
    """The store of this job; None where ``jax.distributed.initialize`` was not called or there is one process only.

    No backend is started by asking.
    """
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        return None
    return Coordination(state.client, state.process_id, state.num_processes)


def row_major(value: Any) -> Any:
    """``value``, to be laid out in memory with its last dimension minor.

    Complex numbers are left alone: XLA:TPU splits them into their parts, and refuses to split the constraint.
    """
    return value if value.dtype.kind == "c" else _in_rows(value)


def _in_rows(value: Any) -> Any:
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))
