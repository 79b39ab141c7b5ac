"""The group of commands: what they print, and with which exit code they end."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import click
import jax
from rich.console import Console

from autopar.errors import InfeasiblePlanError, UserError
from autopar.runtime.launcher import leave_job
from autopar.runtime.processes import is_of_peer, this_job

NO, MISTAKE, BUG = 1, 2, 3  # exit codes; 0 is fine


class Answer(Protocol):
    """What a command has found out."""

    def __str__(self) -> str: ...

    def to_json(self) -> str: ...


class _Commands(click.Group):
    """Ends with an exit code; of a mistake it prints one line, of a bug the traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except click.ClickException as error:
            code = _end(error, error.format_message(), MISTAKE)
        except InfeasiblePlanError as error:
            code = _end(error, str(error), NO)
        except UserError as error:
            code = _end(error, str(error), MISTAKE)
        except click.Abort as error:
            code = _end(error, "interrupted", 130)
        except Exception as error:
            if not is_of_peer(error):
                click.echo(traceback.format_exc(), err=True)
            leave_job(error, BUG)
            code = BUG
        sys.exit(code)


def _end(error: Exception, message: str, code: int) -> int:
    """Say what is wrong, once in a job, whose other processes are told."""
    if not is_of_peer(error):
        click.echo(f"Error: {' '.join(message.split())}", err=True)
    leave_job(error, code)
    return code


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="autopar")
@click.pass_context
def main(context: click.Context) -> None:
    """Plan how a JAX train step runs on many devices, hold the plan against XLA, compare and run.

    TARGET is package.module:function or path/to/file.py:function, a function without arguments that returns
    (step, args) or (step, args, kwargs): the step, plain or made by autopar.parallelize, and its arguments, of which
    shapes are enough (jax.ShapeDtypeStruct, jax.eval_shape). Modules of the current folder are found.

    \b
      def train():  # in model.py
          return train_step, (jax.eval_shape(init, jax.random.key(0)), abstract_batch)

    \b
      autopar plan model:train --cluster dgx-h100:4 -o plan.json
      autopar report model:train --plan plan.json --html report.html
      autopar verify model:train --plan plan.json
      autopar compare model:train --cluster dgx-a100
      autopar run model.py:train --devices 8
      autopar run --processes 4 train.py
      autopar replay model:train bad_steps
      autopar calibrate -o mine.json

    Exit codes: 0 fine, 1 the answer is no (nothing fits), 2 a mistake in what was asked, 3 a bug, with its traceback.

    \b
    Completion of commands, presets and recipes, in ~/.bashrc (or zsh, fish alike):
      eval "$(_AUTOPAR_COMPLETE=bash_source autopar)"
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def on_target(body: Callable[..., tuple[Answer, bool]]) -> click.Command:
    """A command about a target."""
    return answering(click.argument("target")(body))


def answering(body: Callable[..., tuple[Answer, bool]]) -> click.Command:
    """A command of a function that returns an answer, and whether it is yes."""

    @main.command(name=body.__name__, short_help=(body.__doc__ or "").partition("\n")[0])
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
    @functools.wraps(body)
    def command(as_json: bool, **options: Any) -> int:
        return give_answer(functools.partial(body, **options), as_json)

    return command


def give_answer(find: Callable[[], tuple[Answer, bool]], as_json: bool) -> int:
    """Print what is found; the exit code. Of several processes that find it together the first says it."""
    try:
        with contextlib.redirect_stdout(sys.stderr), _short_warnings():
            answer, is_yes = find()
    except InfeasiblePlanError as error:
        if as_json and not is_of_peer(error):
            click.echo(json.dumps({"fits": False, "error": str(error)}))
        raise
    if this_job() is not None and jax.process_index():
        pass
    elif as_json:
        click.echo(answer.to_json().rstrip())
    elif sys.stdout.isatty() and hasattr(answer, "__rich_console__"):
        Console().print(answer)
    else:
        click.echo(str(answer))
    return 0 if is_yes else NO


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Warnings as a line each, without the source line that raised them."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        click.echo(f"{category.__name__}: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
