"""Rules of the house: what importing does, and that every module says what it is for."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
LINKED_ROOMS = ("passes", "cost_model", "runtime")

MODULES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for room in ("autopar", *LINKED_ROOMS)  # not through the links, so that each file comes once
    for path in (REPOSITORY / room).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)


def module_name(path: str) -> str:
    """`passes/rules/__init__.py` is imported as `autopar.passes.rules`."""
    parts = Path(path).with_suffix("").parts
    parts = parts if parts[0] == "autopar" else ("autopar", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter; its environment is `environment` and nothing else."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("room", LINKED_ROOMS)
def test_rooms_are_links_to_the_folders_at_the_top(room: str) -> None:
    link = REPOSITORY / "autopar" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_docstring(module: str) -> None:
    tree = ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{module} does not say what it is for"


@pytest.mark.parametrize("name", [module_name(path) for path in MODULES if not path.endswith("__main__.py")])
def test_every_module_can_be_imported(name: str) -> None:
    # Without this, coverage would not know of modules in the linked rooms that no test reaches.
    module = importlib.import_module(name)
    assert module.__name__ == name


def test_importing_starts_no_backend() -> None:
    # JAX raises for an unknown platform as soon as a backend is looked up, so the first line is proof for the second.
    run_python(
        """
import autopar

import jax
try:
    jax.devices()
except RuntimeError as error:
    assert "nonexistent" in str(error), error
else:
    raise SystemExit("JAX accepted an unknown platform: this test proves nothing")
""",
        JAX_PLATFORMS="nonexistent",
    )


def test_importing_changes_neither_the_environment_nor_the_configuration_of_jax() -> None:
    output = run_python(
        """
import json, os, warnings
import jax

def configuration():
    return {name: repr(value) for name, value in jax.config.values.items()}

environment, before, filters = dict(os.environ), configuration(), list(warnings.filters)
import autopar
print(json.dumps([
    dict(os.environ) == environment, configuration() == before, warnings.filters == filters, len(before) > 100
]))
""",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
    )
    assert json.loads(output) == [True, True, True, True]
