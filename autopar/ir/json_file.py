"""JSON files read strictly and written safely: what every file form of a noun has in common.

A reader takes a value and its path in the file, and gives back what the value means. It raises `FieldError`, which
names the path, the value met and what is expected; `read_text` turns it into the error of the noun.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import pathlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.errors import UserError

Reader = Callable[[Any, str], Any]  # (value met, its path in the file) -> what it means


class FieldError(Exception):
    """A value that does not fit; the message names its path."""


def bad(path: str, value: Any, expected: str) -> FieldError:
    """The error of a value that is not what it must be."""
    return FieldError(f"{path} is {_show(value)}; it must be {expected}")


def nearest(name: str, names: Iterable[str]) -> str:
    """ "did you mean ..? " for a name that looks like one of `names`, else ""."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


# Readers


def read_string(value: Any, path: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise bad(path, value, "a text")
    return value


def read_boolean(value: Any, path: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise bad(path, value, "true or false")
    return value


def number(expected: str, *, above: float | None = None, least: float | None = None, most: float = math.inf) -> Reader:
    """Finite numbers within bounds."""

    def read(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad(path, value, expected)
        try:
            met = float(value)
        except OverflowError:
            raise bad(path, value, expected) from None
        fits = (above is None or met > above) and (least is None or met >= least) and met <= most
        if not fits or not math.isfinite(met):
            raise bad(path, value, expected)
        return met

    return read


def whole(expected: str, *, least: int, most: float = math.inf) -> Reader:
    """Whole numbers within bounds; 3.0 is one."""
    read_number = number(expected, least=least, most=most)

    def read(value: Any, path: str) -> int:
        read_number(value, path)
        if isinstance(value, float) and not value.is_integer():
            raise bad(path, value, expected)
        return int(value)

    return read


def choice(names: Sequence[str]) -> Reader:
    """One of these texts."""

    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in names:
            raise bad(path, value, f"one of {', '.join(map(json.dumps, names))}")
        return value

    return read


def optional(reader: Reader) -> Reader:
    """null, or what the reader reads."""

    def read(value: Any, path: str) -> Any:
        return None if value is None else reader(value, path)

    return read


def sequence(item: Reader, expected: str, *, length: int | None = None, least: int = 0) -> Reader:
    """Lists, as tuples, of exactly `length` or of at least `least` items."""

    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) < least or length not in (None, len(value)):
            raise bad(path, value, expected)
        return tuple(item(entry, f"{path}[{index}]") for index, entry in enumerate(value))

    return read


def mapping(key: Callable[[str, str], Any], item: Reader, expected: str) -> Reader:
    """Objects whose field names mean something, too."""

    def read(value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise bad(path, value, expected)
        return {key(name, _join(path, name)): item(entry, _join(path, name)) for name, entry in value.items()}

    return read


def record(fields: Mapping[str, Reader], defaults: Mapping[str, Any] | None = None) -> Reader:
    """Objects with exactly these fields; those in `defaults` may be left out, and a text under "source" is skipped."""
    defaults = dict(defaults or {})
    names = ", ".join(fields)

    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise bad(path, value, f"an object with the fields {names}")
        for key in value:
            if key not in fields and key != "source":
                raise FieldError(
                    f"{_join(path, key)} is no field of this file (value {_show(value[key])}); "
                    f"{nearest(key, fields)}the fields here are {names}"
                )
        result = dict(defaults)
        for key, reader in fields.items():
            if key in value:
                result[key] = reader(value[key], _join(path, key))
            elif key not in defaults:
                raise FieldError(f"{_join(path, key)} is missing; add it: the fields here are {names}")
        return result

    return read


def versioned(
    format_name: str, version: int, fields: Mapping[str, Reader], remedy: str, defaults: Mapping[str, Any] | None = None
) -> Reader:
    """Records that name their format and version, both read first: another version is not blamed for its fields."""
    expected: Mapping[str, str | int] = {"format": format_name, "version": version}
    read_fields = record({"format": _kept, "version": _kept, **fields}, defaults)

    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise bad(path, value, f'an object with "format": "{format_name}"')
        for key, only in expected.items():
            met = value.get(key)
            if met != only or isinstance(met, bool):
                wanted = f"{json.dumps(only)}, the only one that this version of autopar reads; {remedy}"
                raise bad(_join(path, key), met, wanted)
        result: dict[str, Any] = read_fields(value, path)
        return {key: result[key] for key in fields}

    return read


def _kept(value: Any, path: str) -> Any:
    return value


def _show(value: Any) -> str:
    """A value as the file would write it, cut where it is long."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# Texts and files


def finite(value: Any) -> Any:
    """What JSON can hold: NaN and infinity, which it has not, become null, NumPy's scalars Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_text(text: str, where: str, reader: Reader, error: type[UserError], remedy: str) -> Any:
    """What a JSON text means. `where` names it in messages, which are of the type `error`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = sorted(key for key in result if sum(key == other for other, _ in pairs) > 1)
            raise error(f"{where}: an object gives the field {', '.join(twice)} twice; keep one of them")
        return result

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as met:
        raise error(f"{where} is not JSON: {met}; {remedy}") from met
    if not isinstance(data, dict):
        raise error(f"{where} holds {_show(data)}; it must be an object; {remedy}")
    try:
        return reader(data, "")
    except FieldError as met:
        raise error(f"{where}: {met}") from None


def read_path(path: str | os.PathLike[str], what: str, error: type[UserError]) -> str:
    """The text of a file."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as met:
        raise error(f"cannot read the {what} {os.fspath(path)!r}: {met}") from met


def write_path(path: str | os.PathLike[str], text: str, what: str, error: type[UserError]) -> None:
    """Write a file whole or not at all: beside its place first, then renamed. A link keeps pointing where it does."""
    try:
        target = pathlib.Path(os.path.realpath(path))
        beside = target.parent / f".{secrets.token_hex(8)}.tmp"
        try:
            with beside.open("xb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as met:
        raise error(
            f"cannot write the {what} {os.fspath(path)!r}: {met}; pass a file name in a folder that can be written to"
        ) from met
