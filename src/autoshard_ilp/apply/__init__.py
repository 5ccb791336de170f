"""Runs the graph of a step with the layouts that a plan decided.

The interpreter binds every equation of the graph again, in program order, under its own name scope and source line, and
puts ``jax.lax.with_sharding_constraint`` where a layout was decided. Loops and branches are rebuilt with ``lax.scan``,
``lax.while_loop`` and ``lax.switch``, with the constraints of their bodies inside. What XLA's partitioner would gather
although its rule shards it (:mod:`autoshard_ilp.rules.local`) runs device by device, under ``shard_map``, and so do the
collectives that it would replace by others (:mod:`autoshard_ilp.enforce.manual`).

Gather once or gather again: XLA merges two equal all-gathers of one weight and so keeps the gathered copy alive from
the forward to the backward pass. A hub that must gather again therefore first ties the *sharded* value to a value that
exists only in the backward pass (:mod:`.enforce.ties`). The constraint on the tied value keeps it sharded: else
propagation would move the gather in front of the tie. What is recomputed is tied alike.

* :mod:`.decisions`: what is to be enforced;
* :mod:`.planned`: a graph with its decisions on one mesh, all that does not change between two traces;
* :mod:`.values`: values on their way from one layout to the next;
* :mod:`.operations`: one operation on the values it reads;
* :mod:`.interpreter`: all of them in order, through loops and branches, as a function for ``jax.jit``.
"""

from autoshard_ilp.apply.decisions import Decisions as Decisions
from autoshard_ilp.apply.decisions import auto_mesh as auto_mesh
from autoshard_ilp.apply.decisions import mark as mark
from autoshard_ilp.apply.interpreter import planned_function as planned_function
