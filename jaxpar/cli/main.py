"""The ``jaxpar`` command: one function per subcommand, and what every exit code means."""

from __future__ import annotations

import sys

import typer

from jaxpar.cli.config import config
from jaxpar.cli.exit_codes import BAD_INPUT, FAILED
from jaxpar.cli.schedule import schedule
from jaxpar.cli.train import EPILOG, train
from jaxpar.config import ConfigError

app = typer.Typer(
    name="jaxpar",
    help="Train Transformers with JAX on named device meshes: data, FSDP, hybrid and tensor parallelism.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad input, 75 preempted and saved, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train", epilog=EPILOG)(train)
app.command("config")(config)
app.command("schedule")(schedule)


def main() -> None:
    """Run the command and leave with its exit code. What the user can mend is told without a traceback."""
    try:
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except Exception as error:
        if type(error).__name__ not in ("RunFailed", "StartError", "CheckpointError"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
