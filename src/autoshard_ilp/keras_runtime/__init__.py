"""A Keras model under a plan: what ``plan.apply``, ``plan.scope``, ``plan.distribution`` and ``plan.layout_map`` do.

* :mod:`.runtime`: the functions that ``fit``, ``evaluate`` and ``predict`` run, and laying out a model in place;
* :mod:`.programs`: one compiled program per kind of step and shape of batch, all on the plan's layout of the variables;
* :mod:`.scope`: building a model whose variables are born sharded;
* :mod:`.layouts`: Keras's own objects, ``Distribution`` and ``LayoutMap``;
* :mod:`.mismatch`: what has changed since a plan was made, in words.
"""

from autoshard_ilp.keras_runtime.runtime import apply_plan as apply_plan
