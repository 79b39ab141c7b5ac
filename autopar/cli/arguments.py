"""What people type on a command line, as autopar's nouns: a step with its arguments, a cluster, a method."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from autopar import recipes
from autopar.cost_model.hardware import load_preset, preset_names
from autopar.errors import ArgumentError
from autopar.ir.cluster_json import cluster_from_json
from autopar.ir.json_file import nearest
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method

RECIPES: Mapping[str, Callable[..., Method]] = {
    name: function
    for name, function in vars(recipes).items()
    if inspect.isfunction(function) and function.__module__ == recipes.__name__ and not name.startswith("_")
}
_MOST_NAMED = 8
_WANTED = "a function without arguments that returns (step, args) or (step, args, kwargs)"


@dataclasses.dataclass(frozen=True)
class TargetCall:
    """A step, and the arguments to plan it for: arrays or `jax.ShapeDtypeStruct`s."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


# Steps


def load_call(target: str) -> TargetCall:
    """The call that `package.module:function` or `path/to/file.py:function` makes; modules of this folder are found.

    Raises:
      ArgumentError: there is no such module or function, or it does not return a step with its arguments.
    """
    where, colon, name = target.rpartition(":")
    if not (where and colon and name):
        raise ArgumentError(f"TARGET {target!r} names no function: write package.module:function or file.py:function.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(where)
    if not hasattr(module, name):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ArgumentError(
            f"TARGET {target!r}: {where} has no {name!r}; {nearest(name, names)}"
            f"it has {', '.join(names[:_MOST_NAMED]) or 'no functions'}{', ..' if len(names) > _MOST_NAMED else ''}."
        )
    attribute = getattr(module, name)
    return _call_of(target, _made(target, attribute) if callable(attribute) else attribute)


def _import(name: str) -> types.ModuleType:
    try:
        return _import_file(pathlib.Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        ours = (__file__, importlib.__file__)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename not in ours and not frame.filename.startswith("<")
        ]
        line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise ArgumentError(f"TARGET: cannot import {name}: {type(error).__name__}: {error}{line}") from error


def _import_file(path: pathlib.Path) -> types.ModuleType:
    """As `python file.py` finds its neighbours, but under a name of its own, lest it hides a module of that name."""
    folder = os.fspath(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _made(target: str, function: Callable[[], Any]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in skipped]
    if needed:
        raise ArgumentError(f"TARGET {target!r} needs arguments ({', '.join(needed)}): name {_WANTED}.")
    return function()


def _call_of(target: str, made: Any) -> TargetCall:
    parts = made if isinstance(made, tuple) else ()
    match parts:
        case (step, tuple() | list() as args):
            kwargs: dict[str, Any] = {}
        case (step, tuple() | list() as args, dict() as kwargs) if all(isinstance(key, str) for key in kwargs):
            pass
        case _:
            raise ArgumentError(
                f"TARGET {target!r} gives {_described(made)}: name {_WANTED}, args a tuple of the step's arguments."
            )
    if not callable(step):
        raise ArgumentError(f"TARGET {target!r}: its step is {_described(step)}, which cannot be called.")
    return TargetCall(step, tuple(args), kwargs)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(each).__name__ for each in value[:_MOST_NAMED])})"
    return f"{type(value).__name__} {value!r:.60}"


# Clusters


def read_cluster(text: str) -> Cluster:
    """Of a preset, `dgx-h100`, so many hosts of it, `dgx-h100:8`, of so many devices, `dgx-h100:8x4`, or of a file.

    Raises:
      ArgumentError, ClusterError: there is no such preset, the counts are none, or the file cannot be read.
    """
    name, colon, counts = text.partition(":")
    if name not in preset_names() and (text.endswith(".json") or pathlib.Path(text).is_file()):
        return cluster_from_json(pathlib.Path(text))
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", counts)
    if colon and not match:
        raise ArgumentError(
            f"{text!r}: {counts!r} is no number of hosts; write {name}:8 for 8 hosts, {name}:8x4 for 8 hosts of 4 "
            "devices."
        )
    if match is None:
        return load_preset(name)
    hosts, devices = match.groups()
    return load_preset(name, num_hosts=int(hosts), devices_per_host=None if devices is None else int(devices))


# Methods


def read_method(text: str) -> Method:
    """Of a recipe with its arguments as Python writes them: `auto`, `zero(2)`, `auto(num_stages=2)`.

    Raises:
      ArgumentError, PlanError: there is no such recipe, or it does not take these arguments.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        node = None
    call = node if isinstance(node, ast.Call) else None
    named = call.func if call is not None else node
    if not isinstance(named, ast.Name):
        raise ArgumentError(f"{text!r} is no recipe with its arguments, such as auto, zero(2) or auto(num_stages=2).")
    name = named.id
    if name not in RECIPES:
        raise ArgumentError(f"there is no recipe {name!r}; {nearest(name, RECIPES)}recipes are {', '.join(RECIPES)}.")
    try:
        args = [ast.literal_eval(arg) for arg in call.args] if call is not None else []
        given = (
            [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords] if call is not None else []
        )
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"{text!r}: arguments of a recipe are literals, such as 2, True, (2, 4) or None."
        ) from error
    try:
        method = RECIPES[name](*args, **{key or "**": value for key, value in given})
    except TypeError as error:
        raise ArgumentError(f"{text!r}: {error}; the recipe is {name}{_signature(RECIPES[name])}.") from error
    for field in ("num_stages", "num_microbatches"):
        count = getattr(method, field)
        if count is not None and (type(count) is not int or count < 1):
            raise ArgumentError(f"{text!r}: {field} is {count!r}; it must be a whole number above 0.")
    return method


def _signature(function: Callable[..., Any]) -> str:
    empty = inspect.Parameter.empty
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=empty))
