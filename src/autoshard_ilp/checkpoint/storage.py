"""A checkpoint folder on disk: Orbax for the arrays, one small JSON file that says which of them count."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard_ilp.checkpoint.entries import Entry
from autoshard_ilp.errors import CheckpointError
from autoshard_ilp.files import write_whole
from autoshard_ilp.saved.signature import key_implementation

FORMAT = "autoshard-ilp checkpoint"
VERSION = 1
INDEX = "checkpoint.json"


def orbax() -> Any:
    """The module ``orbax.checkpoint``; CheckpointError where it is not installed."""
    try:
        import orbax.checkpoint as module
    except ImportError as error:
        raise CheckpointError(
            "Checkpoint folders are written and read by Orbax. Received: no module orbax.checkpoint. Install it with "
            'pip install "autoshard-ilp[checkpoint]", or save to a name that ends in .keras or .weights.h5.'
        ) from error
    return module


def read_index(folder: Path) -> Mapping[str, Any]:
    """The index of a checkpoint folder.

    Raises:
        CheckpointError: there is none, it is damaged, foreign, or of a newer version.
    """
    try:
        data = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"A checkpoint is a folder with {INDEX}, or a file that ends in .keras or .weights.h5. Received: {folder} "
            f"({error})."
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{INDEX} is JSON. Received: {folder / INDEX}, which is damaged ({error}).") from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise CheckpointError(
            f'{INDEX} says "format": "{FORMAT}". Received: {folder / INDEX}, which is something else.'
        )
    if not isinstance(data.get("version"), int) or data["version"] > VERSION:
        raise CheckpointError(
            f"This release reads checkpoints up to version {VERSION}. Received: {folder} of version "
            f"{data.get('version')!r}. Upgrade autoshard-ilp."
        )
    return data


def stored_entries(folder: Path, index: Mapping[str, Any]) -> list[Entry]:
    """What the checkpoint holds, without the arrays."""
    try:
        return [Entry(e["name"], e["kind"], tuple(map(int, e["shape"])), e["dtype"]) for e in index["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{INDEX} lists entries with name, kind, shape and dtype. Received: {folder / INDEX} ({error!r})."
        ) from error


def next_number(folder: Path) -> int:
    """A number for new data, one above that of the data that counts; the folder is made where it is missing.

    Raises:
        CheckpointError: the folder holds something else than a checkpoint.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {p.name for p in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(f"A checkpoint is saved to a folder. Received: {folder} ({error}).") from error
    foreign = sorted(n for n in names if n != INDEX and not n.startswith(("data-", f".{INDEX}.")))
    if foreign:
        raise CheckpointError(
            f"A checkpoint has a folder of its own. Received: {folder}, which holds {', '.join(foreign[:3])}. Name "
            "another one."
        )
    return 1 + _number(str(read_index(folder).get("data", ""))) if INDEX in names else 0


def _number(name: str) -> int:
    digits = name.removeprefix("data-")
    return int(digits) if digits.isdigit() else 0


def _plain(entry: Entry, value: Any) -> Any:
    """The numbers of an array; a random key's words."""
    import jax

    return jax.random.key_data(value) if entry.dtype.startswith("key<") else value


def stores(entry: Entry) -> bool:
    """Whether an entry has numbers at all; Orbax refuses arrays without elements."""
    return 0 not in entry.shape


def write_data(data: Path, entries: Sequence[Entry]) -> None:
    """Writes the arrays of all processes; every process calls this."""
    ocp = orbax()
    tree = {f"{i:06d}": _plain(e, e.value) for i, e in enumerate(entries) if stores(e)}
    if not tree:
        return
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(data, args=ocp.args.StandardSave(tree))


def flush(folder: Path) -> None:
    """Waits until every file below a folder has reached the disk."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_others(folder: Path, kept: str | None) -> None:
    """Removes data that does not count (any more)."""
    for path in folder.glob("data-*"):
        if path.name != kept:
            shutil.rmtree(path, ignore_errors=True)


def write_index(folder: Path, data: str, entries: Sequence[Entry], about: Mapping[str, Any]) -> None:
    """Makes ``data`` the data that counts, in one step."""
    index = {"format": FORMAT, "version": VERSION, "data": data, **about, "entries": [e.describe() for e in entries]}
    write_whole(folder / INDEX, json.dumps(index, indent=1).encode("utf-8"))


def read_data(data: Path, stored: Sequence[Entry], wanted: Mapping[int, Entry]) -> dict[int, Any]:
    """Arrays of a checkpoint, each read straight into its layout.

    Args:
        data: the folder that counts.
        stored: what it holds.
        wanted: position in ``stored`` -> entry whose sharding the array gets.

    Raises:
        CheckpointError: the data is missing or damaged.
    """
    import jax

    ocp = orbax()
    targets = {i: _target(stored[i], e.sharding) for i, e in wanted.items() if stores(stored[i])}
    found: dict[int, Any] = {}
    if targets:
        names = {f"{i:06d}": target for i, target in targets.items()}
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                arguments = ocp.args.PyTreeRestore(
                    item=names,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(names),
                    partial_restore=True,
                )
                restored = checkpointer.restore(data, args=arguments)
        except Exception as error:
            raise CheckpointError(
                f"A checkpoint's data is complete. Received: {data}, which cannot be read ({type(error).__name__}: "
                f"{str(error)[:500]})."
            ) from error
        found = {i: restored[f"{i:06d}"] for i in targets}
    for i, entry in wanted.items():
        if stored[i].dtype.startswith("key<") and i in found:
            found[i] = jax.random.wrap_key_data(found[i], impl=key_implementation(stored[i].dtype))
        if i not in found:
            target = _target(entry, entry.sharding)
            found[i] = jax.device_put(jax.numpy.zeros(target.shape, target.dtype), target.sharding)
    return found


def _target(entry: Entry, sharding: Any) -> Any:
    """What Orbax shall make of an array: its shape, dtype and sharding."""
    import jax
    from jax.sharding import SingleDeviceSharding

    where = SingleDeviceSharding(jax.local_devices()[0]) if sharding is None else sharding
    if not entry.dtype.startswith("key<"):
        return jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=where)
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key_implementation(entry.dtype))))
    return jax.ShapeDtypeStruct((*entry.shape, *words.shape), words.dtype, sharding=where)
