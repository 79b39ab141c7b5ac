"""What a benchmark's figures depend on: the modules that it imports, and the data that these read, as one hash.

1. The modules are found without running any: from the benchmark's own along all import statements but those under
   `if TYPE_CHECKING`, as far as they name modules of this repository, along strings that are the name of a file beside
   it, which it runs as a script, and along those that follow "-m" in a command. A package on the way counts only where
   something is imported from the package itself, since importing has no effects here (`tests/test_house.py`).
2. Of a module the syntax tree counts, without docstrings, comments and layout.
3. Of the data, the files beside the modules of a package (`_DATA`): a file or folder that modules name in a string
   counts for the benchmarks that import one of these; one that none names (presets are found by listing) for all.

The hash depends on no commit, and on no version of Python or of anything else that is installed.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
_ROOMS = ("autopar", "benchmarks")
_DATA = {
    "autopar.cost_model": "cost_model/data", "autopar.reporting": "autopar/reporting", "benchmarks": "benchmarks/data",
}  # fmt: skip
_NO_DATA = ("", ".md", ".py", ".pyc")  # suffixes: licences, notes, code


@dataclasses.dataclass(frozen=True)
class _Module:
    """What counts of one file."""

    path: pathlib.Path
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]  # (level, module, names) of `from`; no names of `import`
    strings: frozenset[str]
    digest: str


class Sources:
    """The modules of a checkout, as they are when this is made."""

    def __init__(self, root: pathlib.Path = ROOT) -> None:
        self._root = root
        self._modules = {name: _read(path) for name, path in _all_modules(root)}

    def fingerprint(self, module: str) -> str:
        """Of all that the figures of a module such as `benchmarks.overhead` depend on."""
        digests = {self._modules[name].path: self._modules[name].digest for name in self.modules(module)}
        digests |= {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in self.data(module)}
        lines = sorted(f"{path.relative_to(self._root).as_posix()} {digest}\n" for path, digest in digests.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    def files(self, module: str) -> list[pathlib.Path]:
        """All that `fingerprint` looks at."""
        return [*(self._modules[name].path for name in self.modules(module)), *self.data(module)]

    def modules(self, module: str) -> list[str]:
        """All modules of ours that a module imports or runs, itself first, imports of imports included.

        Raises:
          KeyError: there is no such module.
        """
        found, waiting = dict.fromkeys([module]), [module]
        while waiting:
            new = [name for name in self._imports(waiting.pop()) if name in self._modules and name not in found]
            found |= dict.fromkeys(new)
            waiting += new
        return list(found)

    def data(self, module: str) -> list[pathlib.Path]:
        """The files of data that a module depends on."""
        mine = self.modules(module)
        found = []
        for package, folder in _DATA.items():
            if any(name.startswith(f"{package}.") for name in mine) and (self._root / folder).is_dir():
                for entry in (self._root / folder).iterdir():
                    readers = {name for name, each in self._modules.items() if entry.name in each.strings}
                    if not readers or not readers.isdisjoint(mine):
                        inside = entry.rglob("*") if entry.is_dir() else [entry]
                        found += [file for file in inside if file.is_file() and file.suffix not in _NO_DATA]
        return found

    def _imports(self, importer: str) -> Iterator[str]:
        found = self._modules[importer]
        package = found.path.parent.relative_to(self._root).parts
        scripts = sorted(name.removesuffix(".py") for name in found.strings if name.endswith(".py"))
        yield from (".".join([*package, name]) for name in scripts)
        for level, module, names in found.imports:
            parts = [*(package[: len(package) + 1 - level] if level else ()), *(module.split(".") if module else ())]
            if not names:  # `import a.b.c`: all of `a`, `a.b` and `a.b.c` can be used then
                yield from (".".join(parts[:i]) for i in range(1, len(parts) + 1))
            for name in names:
                inner = ".".join([*parts, name])
                yield inner if inner in self._modules else ".".join(parts)


def _all_modules(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    for room in _ROOMS:
        links = (path for path in (root / room).glob("*") if path.is_symlink())  # which `rglob` does not follow
        for folder in (root / room, *links):
            for path in folder.rglob("*.py"):
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _read(path: pathlib.Path) -> _Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    strings = set()
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        elif isinstance(node, ast.List | ast.Tuple):
            words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
            for option, name in itertools.pairwise(words):
                if option == "-m" and isinstance(name, str):
                    imports += [(0, name, ()), (0, f"{name}.__main__", ())]
    return _Module(path, tuple(imports), frozenset(strings), hashlib.sha256(_plain(tree).encode()).hexdigest())


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a syntax tree, without what only checkers of types read: the body of `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in child.orelse:
                yield from _executed(statement)
        else:
            yield from _executed(child)


def _plain(node: Any) -> str:
    """A syntax tree as text, alike in all versions of Python: what is empty is left out, since some add it.

    >>> _plain(ast.parse('def f():  # why\\n "A docstring."\\n return 1'))
    "Module(body=[FunctionDef(name='f',args=arguments(),body=[Return(value=Constant(value=1,kind=None))])])"
    """
    if isinstance(node, list):
        return f"[{','.join(_plain(each) for each in node if not _is_text(each))}]"
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({','.join(_plain(each) for each in node.values if getattr(each, 'value', None) != '')})"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = (
        f"{name}={_plain(value)}"
        for name, value in ast.iter_fields(node)
        if value not in (None, []) or isinstance(node, ast.Constant)
    )
    return f"{type(node).__name__}({','.join(fields)})"


def _is_text(node: Any) -> bool:
    """A docstring, or another string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
