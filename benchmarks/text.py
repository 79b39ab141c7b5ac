"""Real text that every machine has: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sysconfig

import numpy as np

VOCABULARY = 256  # bytes
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """A corpus, split file by file."""

    train: np.ndarray  # uint8
    held_out: np.ndarray  # uint8, of files none of which is in `train`
    num_files: int


def standard_library(max_bytes: int = 6_000_000, held_out_share: float = 0.1, root: pathlib.Path | None = None) -> Text:
    """Whole files in an order that only their names decide, up to `max_bytes`, split file by file.

    The order is that of a hash of the name, so that the cap takes a fair sample rather than the first letters
    of the alphabet. The same Python installation always gives the same text.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib")) if root is None else root
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    ordered = sorted(
        (hashlib.sha256(name.as_posix().encode()).hexdigest(), name)
        for name in names
        if not _EXCLUDED.intersection(name.parts)
    )
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    size = 0
    for digest, name in ordered:
        content = (root / name).read_bytes()
        if size + len(content) > max_bytes:
            break
        # Other digits than those that order the files: the last eight, uniform in [0, 1).
        parts[int(digest[-8:], 16) / 16**8 < held_out_share].append(content)
        size += len(content)
    if not parts[True] or not parts[False]:
        raise FileNotFoundError(f"fewer Python source files below {root} than a train/held-out split needs")
    train, held_out = (np.frombuffer(b"\n".join(parts[key]), np.uint8) for key in (False, True))
    return Text(train, held_out, len(parts[True]) + len(parts[False]))


def _windows(text: np.ndarray, starts: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
    window = text[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int32)
    return {"inputs": window[:, :-1], "targets": window[:, 1:]}


def train_batch(text: Text, batch_size: int, sequence_length: int, seed: int, step: int) -> dict[str, np.ndarray]:
    """The batch of this step: random windows; a function of its arguments alone."""
    random = np.random.default_rng((seed, step))
    starts = random.integers(0, len(text.train) - sequence_length, batch_size)
    return _windows(text.train, starts, sequence_length)


def held_out_batches(text: Text, batch_size: int, sequence_length: int, count: int) -> list[dict[str, np.ndarray]]:
    """`count` batches of windows spread evenly over the held-out text."""
    starts = np.linspace(0, len(text.held_out) - sequence_length - 1, batch_size * count).astype(int)
    return [_windows(text.held_out, part, sequence_length) for part in np.split(starts, count)]
