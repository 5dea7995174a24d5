"""The ``jaxpar`` command: one function per subcommand, and what every exit code means."""

from __future__ import annotations

import importlib
import sys

import typer
from typer.core import TyperGroup

from jaxpar.cli.exit_codes import BAD_INPUT, FAILED

COMMANDS = {
    "train": ("jaxpar.cli.train", "train"),
    "config": ("jaxpar.cli.config", "config"),
    "plan": ("jaxpar.cli.plan", "plan"),
    "schedule": ("jaxpar.cli.schedule", "schedule"),
    "plot": ("jaxpar.cli.plot", "plot"),
    "sweep": ("jaxpar.cli.sweep", "sweep"),
    "verify": ("jaxpar.cli.verify", "verify"),
    "bench": ("jaxpar.cli.bench", "bench"),
    "doctor": ("jaxpar.cli.doctor", "doctor"),
    "data": ("jaxpar.cli.data", "data"),
    "inspect": ("jaxpar.cli.checkpoints", "inspect"),
    "verify-checkpoint": ("jaxpar.cli.checkpoints", "verify_checkpoint"),
    "reshard": ("jaxpar.cli.checkpoints", "reshard"),
}
"""Name -> where its function, or group of functions, is; ``EPILOG`` of that module ends its help."""


class Commands(TyperGroup):
    """Imports the command that is asked for, and no other: they start at once, without what the others need."""

    def __init__(self, **options: object):
        super().__init__(**options)
        self.commands = dict.fromkeys(COMMANDS)  # names, for the help and for "did you mean"

    def get_command(self, ctx: typer.Context, cmd_name: str):
        """A command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        place, attribute = COMMANDS[cmd_name]
        module = importlib.import_module(place)
        found, alone = getattr(module, attribute), typer.Typer(rich_markup_mode=None, add_completion=False)
        if isinstance(found, typer.Typer):
            alone.add_typer(found, name=cmd_name)
        else:
            alone.command(cmd_name, epilog=getattr(module, "EPILOG", None))(found)
        alone.callback()(_nothing)
        return typer.main.get_group(alone).get_command(ctx, cmd_name)


def _nothing() -> None:
    """Makes a program with a single command a group."""


app = typer.Typer(
    name="jaxpar",
    cls=Commands,
    help="Train Transformers with JAX on named device meshes: data, FSDP, hybrid and tensor parallelism.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad input, 75 preempted and saved, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback()(_nothing)

EXIT_CODES = {
    "ConfigError": BAD_INPUT,
    "NoCheckpointError": BAD_INPUT,
    "CheckpointError": FAILED,
    "DamagedCheckpointError": FAILED,
    "RunFailed": FAILED,
    "StartError": FAILED,
    "StoreError": FAILED,
    "CompileFailed": FAILED,
}
"""Errors whose message is all that a user needs, by name: their modules may need JAX, which is not imported here."""


def main() -> None:
    """Run the command and leave with its exit code. What the user can mend is told without a traceback."""
    try:
        app()
    except Exception as error:
        code = EXIT_CODES.get(type(error).__name__)
        if code is None:
            raise
        # A note tells of what failed besides: the save that was in progress.
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.exit(code)
