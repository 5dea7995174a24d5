"""The ``jaxpar`` command, whose sweeps start ``light_trial`` in place of a training."""

from jaxpar.cli.main import main
from jaxpar.experiments import sweep, sweep_plots

honest = sweep.run_child


def run_light(arguments, **settings):
    return honest(["tests.experiments.light_trial", *arguments[1:]], **settings)


if __name__ == "__main__":
    sweep.run_child = run_light
    # Importing matplotlib takes longer than all the rest.
    sweep_plots.save_plots = lambda _rows, _path: False
    main()
