"""A window of steps that is profiled: an XProf trace under the run's directory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax

from jaxpar.config.schema import ObserveConfig


class ProfileWindow:
    """Steps ``profile_start`` to ``profile_start + profile_steps - 1``, traced by process 0.

    The loop asks ``begins`` before a step and ``ends`` after it, and waits for the devices at both, so that the trace
    holds whole steps. A trace that cannot be written is a warning: a run does not end over it.
    """

    def __init__(self, observe: ObserveConfig, run_dir: Path, *, process_id: int, say: Callable[[str], None]):
        self._first = observe.profile_start
        self._last = observe.profile_start + observe.profile_steps - 1
        self._directory = run_dir / "profile"
        self._traces, self._say = process_id == 0, say
        self._open_since: int | None = None

    def check_reached(self, first_step: int, last_step: int) -> None:
        """Says so if this process, which trains steps ``first_step`` to ``last_step``, will not profile anything."""
        if self._first and not first_step <= self._first <= last_step:
            steps = f"steps {first_step} to {last_step}"
            self._say(f"observe.profile_start = {self._first} is not among the {steps} that are left: no profile")

    def begins(self, step: int) -> bool:
        """Whether the trace starts right before ``step``."""
        return step == self._first

    def ends(self, step: int) -> bool:
        """Whether ``step`` is the last one of the trace; the same on every process."""
        return bool(self._first) and step == self._last

    def start(self, step: int) -> None:
        """Starts the trace."""
        if not self._traces:
            return
        try:
            jax.profiler.start_trace(self._directory)
        except (RuntimeError, OSError) as error:  # such as another profiler in this process
            self._say(f"warning: no profile: {error}")
        else:
            self._open_since = step

    def annotate(self, step: int) -> contextlib.AbstractContextManager:
        """Marks the dispatch of a step in the trace."""
        if self._open_since is None:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def stop(self, last_step: int) -> None:
        """Ends the trace, if there is one, after ``last_step``, and says where it is."""
        if self._open_since is None:
            return
        first, self._open_since = self._open_since, None
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:  # most often a full disk
            self._say(f"warning: the profile could not be written to {self._directory}: {error}")
            return
        cut = "" if last_step == self._last else f" (cut short: asked for up to step {self._last})"
        self._say(
            f"profile of steps {first} to {last_step}{cut}: {self._directory}; open it with XProf "
            f"(pip install xprof; xprof --logdir {self._directory}) or TensorBoard's profile plugin"
        )
