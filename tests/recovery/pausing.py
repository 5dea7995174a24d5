"""``python -m tests.recovery.pausing PLACE STEP ARGUMENTS...``: the jaxpar command, which stops for ever at a place in
the save of a step, and makes the file ``paused`` when it gets there; so that it can be killed just then.

From then on it takes a second longer for each training step, so that the kill comes before the next save.
"""

import functools
import importlib
import inspect
import sys
import time
from pathlib import Path

from jaxpar.checkpoint.store import Store
from jaxpar.cli.main import main

PLACES = {
    # Orbax 0.12.8, on every process: its arrays are being written into the temporary directory.
    "arrays": ("orbax.checkpoint.experimental.v1._src.handlers.pytree_handler", "PyTreeHandler", "_background_save"),
    # On process 0: all arrays are written, by all processes; they become one tree and then a step directory.
    "tree": ("orbax.checkpoint.experimental.v1._src.handlers.pytree_handler", "PyTreeHandler", "_finalize"),
    # On process 0: the step directory is there; jaxpar declares it complete.
    "mark": ("jaxpar.checkpoint.commit", "write_commit_mark"),
}
PAUSED = Path("paused")


def pause_at(place: str, step: int) -> None:
    """Changes the function of ``place`` so that it never ends while ``step`` is being saved."""
    save, saving = Store.save, []

    def save_step(self: Store, number: int, *args, **options) -> None:
        self.wait()  # what the save before still does, it does under its own number
        saving[:] = [number]
        save(self, number, *args, **options)

    def pause() -> None:
        if saving == [step]:
            Store.check = lambda self: time.sleep(1)
            PAUSED.touch()
            time.sleep(3600)

    module, *owners, name = PLACES[place]
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, name)
    if inspect.iscoroutinefunction(function):

        async def paused(*args, **options):
            pause()
            return await function(*args, **options)

    else:

        def paused(*args, **options):
            pause()
            return function(*args, **options)

    Store.save = save_step
    setattr(owner, name, paused)


if __name__ == "__main__":
    place, step = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    pause_at(place, step)
    main()
