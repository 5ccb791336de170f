"""A plan as people read it: its content as records, then words, tables and small pictures for a terminal.

Figures and the notebook's page are made of the same records in :mod:`autoshard_ilp.plots`.
"""
