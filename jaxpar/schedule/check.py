"""Replays a table symbolically, phase by phase as an executor would, and refuses it if a single value goes wrong."""

from __future__ import annotations

import numpy as np

from jaxpar.schedule.table import NOTHING, Schedule

_Unit = tuple[int, int]
"""(microbatch, virtual stage): in the activation buffer, the input of that virtual stage; in the gradient buffer, the
gradient of its output."""


class ScheduleError(ValueError):
    """A table that would not compute what it should; says in which tick, on which stage, and what is wrong."""


def check(schedule: Schedule) -> None:
    """Follow every value through the slots and around the ring.

    Every unit must run once in each direction, on the inputs that are its own; no arrival may overwrite what is still
    to be read; the columns that all stages share must say what the stages do.

    Raises:
        ScheduleError: The first thing that is wrong.
    """
    _check_columns(schedule)
    replay = _Replay(schedule)
    for tick in range(schedule.num_ticks):
        replay.run(tick)
    replay.finish()


def _check_columns(schedule: Schedule) -> None:
    """Shapes agree, and every number is in its range."""
    for name, table in {**schedule.stage_tables(), **schedule.tick_tables()}.items():
        shape = (schedule.num_ticks, schedule.num_stages)[: table.ndim]
        if table.shape != shape:
            raise ScheduleError(f"{name} has shape {table.shape}, not {shape}")
        of_gradients = name.startswith(("gradient", "loss"))
        slots = schedule.num_gradient_slots if of_gradients else schedule.num_activation_slots
        counts = {
            "microbatch": schedule.num_microbatches,
            "chunk": schedule.num_chunks,
            "slot": slots,
            "arrival": slots,
        }
        what = name.rpartition("_")[2]
        first, end = (0 if what == "arrival" else NOTHING), counts.get(what, 2)
        if table.size and not (first <= table.min() and table.max() < end):
            raise ScheduleError(f"{name} holds {table.min()} to {table.max()}, but {first} to {end - 1} are allowed")


class _Replay:
    """State of all stages between two phases."""

    def __init__(self, schedule: Schedule):
        self.num_stages = schedule.num_stages
        self.num_virtual = schedule.num_stages * schedule.num_chunks
        self.num_microbatches = schedule.num_microbatches
        # Python numbers: reading numpy's one by one takes several times as long.
        self.columns = {name: table.tolist() for name, table in schedule.stage_tables().items()}
        self.shared = {name: table.tolist() for name, table in schedule.tick_tables().items()}
        self.activations: list[list[_Unit | None]] = self._empty(schedule.num_activation_slots)
        self.gradients: list[list[_Unit | None]] = self._empty(schedule.num_gradient_slots)
        self.from_before: list[_Unit | None] = [None] * self.num_stages
        self.from_behind: list[_Unit | None] = [None] * self.num_stages
        self.done: dict[str, set[_Unit]] = {"forward": set(), "backward": set()}
        self.tick = 0

    def _empty(self, num_slots: int) -> list[list[_Unit | None]]:
        return [[None] * num_slots for _ in range(self.num_stages)]

    def run(self, tick: int) -> None:
        """The five phases of a tick."""
        self.tick = tick
        for stage in range(self.num_stages):
            self._store(self.activations, stage, self._at("activation_arrival", stage), self.from_before[stage])
            self._store(self.gradients, stage, self._at("gradient_arrival", stage), self.from_behind[stage])
        forward = [self._forward(stage) for stage in range(self.num_stages)]
        self._loss(forward[-1])
        backward = [self._backward(stage) for stage in range(self.num_stages)]
        self._shared_column("embed_microbatch", forward[0], 0)
        self._shared_column("embed_grad_microbatch", backward[0], 0)
        self.from_before = [self._next(forward[stage - 1], +1) for stage in range(self.num_stages)]
        self.from_behind = [self._next(backward[(stage + 1) % self.num_stages], -1) for stage in range(self.num_stages)]

    def finish(self) -> None:
        """Every unit has run."""
        every = set(np.ndindex(self.num_microbatches, self.num_virtual))
        for lane, done in self.done.items():
            if missing := sorted(every - done):
                raise ScheduleError(f"{len(missing)} units never run {lane}, the first is {_name(missing[0])}")

    def _at(self, column: str, stage: int) -> int:
        return self.columns[column][self.tick][stage]

    def _error(self, stage: int, message: str) -> ScheduleError:
        return ScheduleError(f"tick {self.tick}, stage {stage}: {message}")

    def _store(self, buffers: list[list[_Unit | None]], stage: int, slot: int, value: _Unit | None) -> None:
        kept = buffers[stage][slot]
        if kept is not None and kept not in self.done["backward"]:
            kind = "activation" if buffers is self.activations else "gradient"
            raise self._error(stage, f"an arrival overwrites the {kind} of {_name(kept)} in slot {slot}, still needed")
        buffers[stage][slot] = value

    def _unit(self, lane: str, stage: int) -> _Unit | None:
        """The unit of a lane, marked as done; None if the lane has nothing to do on this stage."""
        microbatch, chunk = self._at(f"{lane}_microbatch", stage), self._at(f"{lane}_chunk", stage)
        if (microbatch == NOTHING) != (chunk == NOTHING):
            raise self._error(stage, f"{lane} lane has microbatch {microbatch} but chunk {chunk}")
        if microbatch == NOTHING:
            return None
        unit = (microbatch, chunk * self.num_stages + stage)
        if unit in self.done[lane]:
            raise self._error(stage, f"{_name(unit)} runs {lane} a second time")
        self.done[lane].add(unit)
        return unit

    def _read(self, buffers: list[list[_Unit | None]], stage: int, column: str, unit: _Unit | None) -> None:
        """The slot that a column names holds what belongs to the unit; no slot is named where nothing is read."""
        slot = self._at(column, stage)
        held = None if slot == NOTHING else buffers[stage][slot]
        if (slot == NOTHING) != (unit is None) or held != unit:
            found = "nothing" if held is None else _name(held)
            wanted = "nothing" if unit is None else _name(unit)
            raise self._error(stage, f"{column} = {slot} holds {found}, but {wanted} is to be read")

    def _forward(self, stage: int) -> _Unit | None:
        unit = self._unit("forward", stage)
        self._read(self.activations, stage, "forward_slot", self._stored_input(unit))
        return unit

    def _loss(self, unit: _Unit | None) -> None:
        """The last virtual stage's output has its loss taken in the same tick."""
        last, slot = self.num_stages - 1, self.shared["loss_slot"][self.tick]
        self._shared_column("loss_microbatch", unit, self.num_virtual - 1)
        ends = unit is not None and unit[1] == self.num_virtual - 1
        if ends != (slot != NOTHING):
            raise self._error(last, f"loss_slot is {slot}, but there is {'a' if ends else 'no'} loss")
        if ends:
            self._store(self.gradients, last, slot, unit)

    def _backward(self, stage: int) -> _Unit | None:
        unit = self._unit("backward", stage)
        if unit is not None and unit not in self.done["forward"]:
            raise self._error(stage, f"{_name(unit)} runs backward before it ran forward")
        self._read(self.activations, stage, "backward_slot", self._stored_input(unit))
        self._read(self.gradients, stage, "gradient_slot", unit)
        return unit

    def _stored_input(self, unit: _Unit | None) -> _Unit | None:
        """What the activation buffer must hold for a unit; virtual stage 0 embeds its tokens instead."""
        return None if unit is None or unit[1] == 0 else unit

    def _shared_column(self, column: str, unit: _Unit | None, virtual: int) -> None:
        """A column that all stages see names the microbatch that a virtual stage runs, or nothing."""
        expected = unit[0] if unit is not None and unit[1] == virtual else NOTHING
        given = self.shared[column][self.tick]
        if given != expected:
            raise self._error(virtual % self.num_stages, f"{column} is {given}, but the stages run {expected}")

    def _next(self, unit: _Unit | None, step: int) -> _Unit | None:
        """What the ring delivers of a unit's result: the neighbour's input, or nothing past either end."""
        if unit is None or not 0 <= unit[1] + step < self.num_virtual:
            return None
        return unit[0], unit[1] + step


def _name(unit: _Unit) -> str:
    return f"microbatch {unit[0]} of virtual stage {unit[1]}"
