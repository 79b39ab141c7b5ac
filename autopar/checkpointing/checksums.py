"""Checksums of the files of a checkpoint: a damaged one is found before anything is made of it.

Orbax's stores check what lies about the numbers, not the numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from autopar.errors import CheckpointError

_MANIFEST = "checksums"
_OF_PROCESS = "ocdbt.process_"  # the folders that Orbax gives the processes to write into


def record_own(folder: Any, process: int) -> None:
    """Of the files that a process has written, when they are complete; `folder`: an `etils.epath.Path`."""
    own = folder / f"{_OF_PROCESS}{process}"
    if own.exists():
        _record(folder, f"{_MANIFEST}.{process}.json", _files(own))


def record_rest(folder: Any) -> None:
    """Of all other files, the processes' checksums among them: the last that is written."""
    _record(folder, f"{_MANIFEST}.json", (f for f in _files(folder) if _OF_PROCESS not in str(f.relative_to(folder))))


def damage(folder: Any, part: int, parts: int) -> str:
    """What is wrong with the files of a checkpoint; empty if nothing is. Each of `parts` callers looks at some.

    Raises:
      CheckpointError: there are no checksums.
      OSError: a file is there, and cannot be read.
    """
    try:
        expected = _read(folder / f"{_MANIFEST}.json")
        for name in sorted(expected):
            if name.startswith(f"{_MANIFEST}."):
                expected = {**expected, **_read(folder / name)}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no list of checksums ({error}): it was not written by autopar.save, has been removed "
            "meanwhile, or is not in a folder that all processes see. Orbax itself reads what Orbax has written."
        ) from error
    except ValueError as error:
        return f"its list of checksums cannot be read ({error})"
    mine = sorted(expected)[part::parts]
    with ThreadPoolExecutor(4) as pool:
        faults = pool.map(lambda name: _wrong(folder / name, *expected[name]), mine)
        return next((f"{name} {fault}" for name, fault in zip(mine, faults, strict=True) if fault), "")


def _wrong(file: Any, size: int, checksum: str) -> str:
    if not file.exists():
        return "is not there any more"
    length = file.stat().length
    if length != size:
        return f"has {length} bytes, where {size} were written"
    return "" if _checksum(file) == checksum else "holds other bytes than were written"


def _files(folder: Any) -> Iterable[Any]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry)
        else:
            yield entry


def _record(folder: Any, name: str, files: Iterable[Any]) -> None:
    manifest = {str(f.relative_to(folder)): (f.stat().length, _checksum(f)) for f in files}
    (folder / name).write_text(json.dumps(manifest, indent=0, sort_keys=True))


def _read(file: Any) -> dict[str, tuple[int, str]]:
    manifest = json.loads(file.read_text())
    return {str(name): (int(size), str(checksum)) for name, (size, checksum) in manifest.items()}


def _checksum(file: Any) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
