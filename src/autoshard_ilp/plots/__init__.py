"""Looking at a plan: the notebook page (:mod:`~autoshard_ilp.plots.page`) and figures (:class:`Plots`)."""
