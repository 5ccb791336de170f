"""``python -m autoshard_ilp``: the same as the ``autoshard`` command."""

from autoshard_ilp.cli import main

main()
