"""Propagation only: the layouts of a plan's arguments and results, everything between left to XLA.

What a user gets who shards the state by hand and trusts the compiler with the rest. It has no prediction.
"""

from __future__ import annotations

from typing import Any


class Propagated:
    """A plan's step without its interior constraints, in the form that ``autoshard_ilp.verify.verify`` reads.

    Args:
        plan: whose arguments' and results' layouts are kept.
    """

    collectives = ()
    memory = None

    def __init__(self, plan: Any) -> None:
        self.plan, self.mesh, self.trail, self.executable = plan, plan.mesh, plan.trail, None
        self.cost = plan.cost

    def jit(self, mesh: Any) -> Any:
        """``jax.jit`` of the step with shardings on arguments and results only."""
        import jax

        from autoshard_ilp.apply import Decisions, planned_function

        step = self.plan.executable
        run = planned_function(step.graph, Decisions(), mesh, self.mesh.axis_names)

        def unplanned(*args: Any) -> Any:
            return jax.tree.unflatten(step.out_tree, run(*jax.tree.leaves(args)))

        ins, outs = self.plan._shardings(mesh)
        return jax.jit(unplanned, in_shardings=ins, out_shardings=outs, donate_argnums=step.donated)

    def abstract_args(self, mesh: Any) -> Any:
        """As :meth:`autoshard_ilp.Plan.abstract_args`."""
        return self.plan.abstract_args(mesh)

    def verify(self, target: str) -> Any:
        """What the target's compiler makes of it; all of its collectives are unplanned."""
        from autoshard_ilp.verify import verify

        return verify(self, target)
