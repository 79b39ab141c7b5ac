"""Eight virtual CPU devices for every test, set before JAX starts."""

import contextlib
import gc
import os
import pathlib
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

# GPUs that happen to be there are left alone unless someone asks for them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@contextlib.contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# XLA's compiler for GPUs says as it is loaded that there is no driver. pytest would print that last, after its summary.
with _nothing_on_stderr():
    import jax

jax.config.update("jax_num_cpu_devices", 8)
# A program from an earlier run's cache would hide what the compiler does now.
jax.config.update("jax_enable_compilation_cache", False)

# Traced steps and compiled programs are kept, so that Python's search through all objects takes ever longer.
gc.set_threshold(10_000, 10, 100)

# Compiling inside an example takes long without being slow; the same examples on every run.
settings.register_profile("autopar", deadline=None, derandomize=True)
settings.load_profile("autopar")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--xla-defaults",
        action="store_true",
        help="compile as users do, without the settings that make tests quick; only tests with the marker xla_defaults",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The first process that a test starts writes Python's bytecode for all that follow, wherever this is asked not to.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if config.getoption("--xla-defaults"):
        return
    # Tests compile far longer than they run. XLA's passes over the HLO stay, and LLVM's are cut short. Kernels are
    # emitted in the older of two ways, which takes a quarter of the time; newer versions do not have it, and abort on
    # the flag. LLVM gets a program as one, which takes a quarter less than parts that are compiled side by side: the
    # programs are small, and the other cores have other tests.
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # in the processes that tests start, as the flags below
    if jax.__version_info__ < (0, 11):
        flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """All cases of a test, before any are chosen: of samples one in so many is kept, the others are slow."""
    found = yield
    if isinstance(found, list):
        free = [case for case in found if not {"slow", "xla_defaults"} & {mark.name for mark in case.iter_markers()}]
        for number, case in enumerate(free):
            sampled = case.get_closest_marker("sampled")
            if sampled is not None and number % sampled.args[0]:
                case.add_marker("slow")
    return found


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Files without the marker are not imported where only tests with it are run, which takes longer than these do."""
    is_file = config.getoption("--xla-defaults") and collection_path.suffix == ".py" and collection_path.is_file()
    return True if is_file and "xla_defaults" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--xla-defaults"):
        return
    chosen = [item for item in items if item.get_closest_marker("xla_defaults")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """Python looks for garbage among the objects that the test makes: what all tests before have left takes seconds."""
    gc.collect(0)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    if jax.device_count() < 8:
        pytest.exit(f"the tests need 8 devices, there are {jax.device_count()}: {jax.devices()}", returncode=1)
