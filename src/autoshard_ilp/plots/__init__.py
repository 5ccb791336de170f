"""Looking at a plan: the notebook page (:mod:`~autoshard_ilp.plots.page`) and figures (``plan.plot``).

Figures are matplotlib's: a figure is an object that can be changed and saved in any format, it needs no display and no
browser, and a notebook keeps it as a plain image that every viewer shows, offline. (Plotly's figures carry megabytes of
script, or fetch it.) Their ground is transparent and their ink a middle grey, legible on light and on dark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoshard_ilp.course import without_course
from autoshard_ilp.errors import InputShapeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plots:
    """Figures of a plan, as ``plan.plot``. Every method returns a ``matplotlib.figure.Figure``.

    A figure shows itself in a notebook; elsewhere ``figure.savefig("memory.svg")``. All need the extra ``notebook``.
    """

    def __init__(self, plan: Any) -> None:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ImportError('plan.plot needs matplotlib: pip install "autoshard-ilp[notebook]".') from error
        self._plan = plan

    def __repr__(self) -> str:
        return "plan.plot: .memory() .communication() .timeline() .mesh(path) .graph(layer)"

    def memory(self) -> Figure:
        """Bytes per device over the predicted step by part, against the budget, and what fills the peak.

        Raises:
            InputShapeError: the plan was loaded from a file without the course of its step.
        """
        from autoshard_ilp.plots.steps import memory

        return memory(self._with_course())

    def timeline(self) -> Figure:
        """What one device does when: layers, compute, and communication by mesh axis, in predicted seconds.

        Communication that the profile declares to overlap is drawn pale, beside the compute nearest to it.

        ``plan.to_perfetto(path)`` writes the same, operation by operation, for https://ui.perfetto.dev.

        Raises:
            InputShapeError: the plan was loaded from a file without the course of its step.
        """
        from autoshard_ilp.plots.steps import timeline

        return timeline(self._with_course())

    def communication(self) -> Figure:
        """Seconds of communication by kind, mesh axis and layer, and the dearest collectives."""
        from autoshard_ilp.plots.communication import communication

        return communication(self._plan)

    def mesh(self, path: str) -> Figure:
        """Which part of a tensor lies on which device.

        Args:
            path: of a variable, an input or an output (``plan.specs``); its end will do where that names one.

        Raises:
            InputShapeError: no tensor, or several, have this path, or it is a scalar.
        """
        from autoshard_ilp.plots.mesh import mesh

        return mesh(self._plan, path)

    def graph(self, layer: str | None = None, *, phase: str = "forward") -> Figure:
        """The operations of a layer with their layouts, and the collectives between them.

        Operations that only move or fuse (reshapes, elementwise chains) are left out where nothing is communicated.

        Args:
            layer: its name, or a part of its path (the first layer that has it), such as ``"transformer_layer_0"`` or
                ``"self_attention/query"``; None: the layer that takes most time.
            phase: "forward", "backward" or "update".

        Raises:
            InputShapeError: no layer has this name, or the plan holds no graph (loaded from a file and not bound).
        """
        from autoshard_ilp.plots.graph import graph

        return graph(self._plan, layer, phase)

    def _with_course(self) -> Any:
        if not self._plan.course.segments:
            raise InputShapeError(f"This figure shows the course of a step. Received: {without_course(self._plan)}")
        return self._plan
