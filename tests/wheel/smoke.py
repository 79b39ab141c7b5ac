"""Use an installed autopar as its users would; run it from another folder, with `python -I`.

Imports every module (a dependency that is not declared shows here), reads the presets out of the
package, plans an MLP from shapes alone, and runs a planned step beside `jax.jit`.
"""

import importlib
import importlib.resources
import json
import pkgutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import autopar

_ORBAX = ("etils", "orbax", "tensorstore")
OF_EXTRAS = {f"autopar.checkpointing.{name}": _ORBAX for name in ("checkpoints", "state_handler", "stored_leaves")}


def check_installation() -> None:
    """The files come from site-packages, as regular packages, with type information and data."""
    root = Path(autopar.__file__).parent
    if root.parent.name != "site-packages" or root.is_symlink():
        raise SystemExit(f"autopar is imported from {root}, not from an installed wheel")
    for room in ("passes", "cost_model", "runtime"):
        if (root / room).is_symlink():
            raise SystemExit(f"{root / room} is a link")
    if not (root / "py.typed").is_file():
        raise SystemExit("py.typed is missing")


def import_everything() -> int:
    """Import all modules; how many there are. Those of an extra that is not installed say so, and no others."""
    names = [module.name for module in pkgutil.walk_packages(autopar.__path__, "autopar.")]
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name not in OF_EXTRAS or error.name not in OF_EXTRAS[name]:
                raise
    importlib.import_module("autopar.passes.rules.table")
    return len(names)


def check_extras() -> None:
    """What needs an extra names it."""
    try:
        _ = autopar.save
    except ModuleNotFoundError as error:
        if "pip install 'autopar[checkpoint]'" not in str(error):
            raise
    else:
        raise SystemExit("autopar.save is there without the extra that it needs")


def read_presets() -> list[str]:
    """Parse every preset that the wheel carries; their names."""
    data = importlib.resources.files("autopar.cost_model") / "data"
    presets = sorted(entry.name for entry in data.iterdir() if entry.name.endswith(".json"))
    for preset in presets:
        json.loads((data / preset).read_text(encoding="utf-8"))
    if not presets:
        raise SystemExit(f"no presets in {data}")
    return presets


def plan_and_run() -> str:
    """A step of plain SGD on an MLP: planned from shapes, saved, loaded, run; its plan as a table."""
    import jax
    import jax.numpy as jnp

    def loss_of(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ weights["up"]) @ weights["down"] - y) ** 2)

    def step(
        weights: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"up": (16, 64), "down": (64, 4)}
    weights = {name: 0.1 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys[:2], strict=True)}
    batch = (jax.random.normal(keys[2], (8, 16)), jax.random.normal(keys[3], (8, 4)))

    parallel = autopar.parallelize(step)
    plan = parallel.plan(*jax.eval_shape(lambda *arrays: arrays, weights, batch))
    if not (plan.step_time > 0 and plan.peak_memory > 0):
        raise SystemExit(f"a plan without costs: {plan}")
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        if autopar.Plan.load(Path(folder) / "plan.json") != plan:
            raise SystemExit("a plan changes when it is saved and loaded")

    expected, _ = jax.jit(step)(weights, batch)
    found, _ = parallel(weights, batch)
    for name in shapes:
        error = float(jnp.max(jnp.abs(expected[name] - found[name])))
        if not error < 1e-5:
            raise SystemExit(f"{name} is {error} off after one step")
    return str(plan)


if __name__ == "__main__":
    check_installation()
    print(f"autopar {version('autopar')}: {import_everything()} modules imported, presets {', '.join(read_presets())}")
    check_extras()
    print(plan_and_run())
