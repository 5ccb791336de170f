"""Checkpoints that outlive their plan: saved under one layout, restored under any other, bit for bit.

Three formats, told apart by the name of the file or folder:

* ``"model.keras"`` and ``"model.weights.h5"``: Keras's own. One process gathers one variable after the other on its
  host. :func:`save_checkpoint` only adds that a crash cannot damage the file that was there before.
* anything else is a folder written by Orbax (extra ``checkpoint``): every device's shards are written by the process
  that holds them, and read by the process that needs them, so no host ever holds a whole variable.

A folder holds ``checkpoint.json`` and one ``data-<n>`` beside it. New data is written and flushed first, then
``checkpoint.json``, which names the data that counts, is exchanged in one step, and only then old data goes. A crash at
any moment therefore leaves the old checkpoint or the new one, whole.
"""

from autoshard_ilp.checkpoint.restoring import restore_checkpoint as restore_checkpoint
from autoshard_ilp.checkpoint.saving import save_checkpoint as save_checkpoint
