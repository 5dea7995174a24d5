"""The ``jaxpar`` command: one function per subcommand, and what every exit code means."""

from __future__ import annotations

import sys

import typer

from jaxpar.cli.bench import bench
from jaxpar.cli.checkpoints import inspect, reshard, verify_checkpoint
from jaxpar.cli.config import config
from jaxpar.cli.data import data
from jaxpar.cli.doctor import EPILOG as DOCTOR_EPILOG
from jaxpar.cli.doctor import doctor
from jaxpar.cli.exit_codes import BAD_INPUT, FAILED
from jaxpar.cli.plan import EPILOG as PLAN_EPILOG
from jaxpar.cli.plan import plan
from jaxpar.cli.plot import EPILOG as PLOT_EPILOG
from jaxpar.cli.plot import plot
from jaxpar.cli.schedule import schedule
from jaxpar.cli.sweep import EPILOG as SWEEP_EPILOG
from jaxpar.cli.sweep import sweep
from jaxpar.cli.train import EPILOG, train
from jaxpar.cli.verify import EPILOG as VERIFY_EPILOG
from jaxpar.cli.verify import verify

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
app.command("plan", epilog=PLAN_EPILOG)(plan)
app.command("schedule")(schedule)
app.command("plot", epilog=PLOT_EPILOG)(plot)
app.command("sweep", epilog=SWEEP_EPILOG)(sweep)
app.command("verify", epilog=VERIFY_EPILOG)(verify)
app.add_typer(bench, name="bench")
app.command("doctor", epilog=DOCTOR_EPILOG)(doctor)
app.add_typer(data, name="data")
app.command("inspect")(inspect)
app.command("verify-checkpoint")(verify_checkpoint)
app.command("reshard")(reshard)

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
