"""From the order in which every stage runs its units to the ticks and slots of a table."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from jaxpar.schedule.check import check
from jaxpar.schedule.kinds import Kind, schedule_problems
from jaxpar.schedule.table import NOTHING, Schedule


def build_schedule(kind: Kind, *, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of one optimizer step, checked.

    Each stage runs its units in a fixed order, each as early as its inputs allow. Arguments as in
    :func:`schedule_problems`.

    Raises:
        ValueError: There is no such schedule.
    """
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    if problems := schedule_problems(kind, **sizes):
        raise ValueError("\n".join(map(str, problems)))
    groups = _groups(kind, num_stages, num_microbatches)
    forward_order = [(m, chunk) for group in groups for chunk in range(num_chunks) for m in group]
    backward_order = [(m, chunk) for group in groups for chunk in reversed(range(num_chunks)) for m in group]
    shape = (num_microbatches, num_stages * num_chunks)
    forward = _earliest_ticks(forward_order, num_stages, -1, np.zeros(shape, np.int64))
    # GPipe drains the pipeline before it turns around. The others turn each microbatch around as soon as they can.
    not_before = np.maximum(forward, forward.max()) if kind == "gpipe" else forward
    backward = _earliest_ticks(backward_order, num_stages, +1, not_before)
    schedule = Schedule(kind=kind, **sizes, **_tables(forward, backward, num_stages))
    check(schedule)
    return schedule


def _groups(kind: Kind, num_stages: int, num_microbatches: int) -> list[range]:
    """Microbatches that pass one chunk before the first of them goes on to the next chunk.

    A group smaller than ``num_stages`` leaves stages waiting for its first microbatch to come around the ring, and so
    does a group that is larger than the one before it. So the groups are as small as memory wants, never smaller than
    that, and the larger ones come first: 11 microbatches on 4 stages make 6 + 5, not 4 + 4 + 3. No stage then waits but
    while the pipeline fills and drains, whether or not the stages divide the microbatches.
    """
    num_groups = 1 if kind == "breadth_first" else max(1, num_microbatches // num_stages)
    size, larger = divmod(num_microbatches, num_groups)
    ends = [group * size + min(group, larger) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _earliest_ticks(order: list[tuple[int, int]], num_stages: int, source: int, not_before: np.ndarray) -> np.ndarray:
    """Tick of every unit of one lane, [microbatches, virtual stages].

    Args:
        order: (microbatch, chunk) in the order in which every stage runs them.
        num_stages: Stages of the pipeline.
        source: Where a unit's input comes from: -1 the virtual stage before it, +1 the one after it.
        not_before: First tick allowed for each unit.
    """
    num_virtual = not_before.shape[1]
    ticks = np.full(not_before.shape, NOTHING)
    position, free = [0] * num_stages, [0] * num_stages
    while min(position) < len(order):
        progress = False
        for stage in range(num_stages):
            if position[stage] == len(order):
                continue
            microbatch, chunk = order[position[stage]]
            virtual = chunk * num_stages + stage
            earliest = max(free[stage], not_before[microbatch, virtual])
            if 0 <= virtual + source < num_virtual:
                sent = ticks[microbatch, virtual + source]
                if sent == NOTHING:
                    continue
                earliest = max(earliest, sent + 1)
            ticks[microbatch, virtual] = earliest
            free[stage] = earliest + 1
            position[stage] += 1
            progress = True
        assert progress, "the orders of two stages wait for each other"
    return ticks


def _tables(forward: np.ndarray, backward: np.ndarray, num_stages: int) -> dict[str, np.ndarray | int]:
    """Fields of a Schedule from the tick of every unit, [microbatches, virtual stages]."""
    num_virtual, num_ticks = forward.shape[1], int(backward.max()) + 1
    activations, gradients = _waits(forward, backward)
    activation_slots, activation_arrival, num_activation_slots = _slots(activations, num_stages, num_ticks)
    gradient_slots, gradient_arrival, num_gradient_slots = _slots(gradients, num_stages, num_ticks)
    lanes = [f"{lane}_{column}" for lane in ("forward", "backward") for column in ("microbatch", "chunk", "slot")]
    table = {name: np.full((num_ticks, num_stages), NOTHING, np.int32) for name in (*lanes, "gradient_slot")}
    shared = ("embed_microbatch", "loss_microbatch", "loss_slot", "embed_grad_microbatch")
    table |= {name: np.full(num_ticks, NOTHING, np.int32) for name in shared}
    for microbatch, virtual in np.ndindex(forward.shape):
        chunk, stage = divmod(virtual, num_stages)
        for lane, tick in (("forward", forward[microbatch, virtual]), ("backward", backward[microbatch, virtual])):
            table[f"{lane}_microbatch"][tick, stage] = microbatch
            table[f"{lane}_chunk"][tick, stage] = chunk
            table[f"{lane}_slot"][tick, stage] = activation_slots.get((microbatch, virtual), NOTHING)
        table["gradient_slot"][backward[microbatch, virtual], stage] = gradient_slots[microbatch, virtual]
        if virtual == 0:
            table["embed_microbatch"][forward[microbatch, virtual]] = microbatch
            table["embed_grad_microbatch"][backward[microbatch, virtual]] = microbatch
        if virtual == num_virtual - 1:
            table["loss_microbatch"][forward[microbatch, virtual]] = microbatch
            table["loss_slot"][forward[microbatch, virtual]] = gradient_slots[microbatch, virtual]
    return table | {
        "activation_arrival": activation_arrival,
        "gradient_arrival": gradient_arrival,
        "num_activation_slots": num_activation_slots,
        "num_gradient_slots": num_gradient_slots,
    }


# The moments of a tick at which a slot is written or read, in order: arrivals, loss, backward lane.
_ARRIVALS, _LOSS, _BACKWARD, _MOMENTS = 0, 1, 2, 3

_Waits = dict[tuple[int, int], tuple[int, int]]
"""(microbatch, virtual stage) -> the moments at which its input, or its output's gradient, lands and is last read."""


def _waits(forward: np.ndarray, backward: np.ndarray) -> tuple[_Waits, _Waits]:
    """How long each activation and each gradient waits in a slot."""
    activations, gradients = {}, {}
    for microbatch, virtual in np.ndindex(forward.shape):
        last_read = _MOMENTS * backward[microbatch, virtual] + _BACKWARD
        if virtual > 0:
            landing = _MOMENTS * (forward[microbatch, virtual - 1] + 1) + _ARRIVALS
            activations[microbatch, virtual] = (landing, last_read)
        if virtual < forward.shape[1] - 1:
            landing = _MOMENTS * (backward[microbatch, virtual + 1] + 1) + _ARRIVALS
        else:
            landing = _MOMENTS * forward[microbatch, virtual] + _LOSS
        gradients[microbatch, virtual] = (landing, last_read)
    return activations, gradients


def _slots(waits: _Waits, num_stages: int, num_ticks: int) -> tuple[dict[tuple[int, int], int], np.ndarray, int]:
    """Slot of every waiting value, slot that every arrival is written to [ticks, stages], and slots needed.

    Each value takes the lowest free slot when it lands, which needs no more slots than there are values at one time.
    Where nothing arrives something is written all the same, so that takes a free slot too: a spare one, if need be.
    """
    landings = {(landing, virtual % num_stages): (m, virtual) for (m, virtual), (landing, _) in waits.items()}
    slots: dict[tuple[int, int], int] = {}
    arrival = np.full((num_ticks, num_stages), NOTHING, np.int32)
    num_slots = 1
    for stage in range(num_stages):
        free: list[int] = []
        taken: list[tuple[int, int]] = []  # (last read, slot)
        num_used = 0
        for tick, moment in itertools.product(range(num_ticks), (_ARRIVALS, _LOSS)):
            now = _MOMENTS * tick + moment
            while taken and taken[0][0] < now:
                heapq.heappush(free, heapq.heappop(taken)[1])
            lowest = free[0] if free else num_used
            if moment == _ARRIVALS:
                arrival[tick, stage] = lowest
            if (unit := landings.get((now, stage))) is not None:
                slots[unit] = heapq.heappop(free) if free else num_used
                num_used = max(num_used, lowest + 1)
                heapq.heappush(taken, (waits[unit][1], lowest))
        num_slots = max(num_slots, num_used)
    return slots, arrival, max(num_slots, int(arrival.max()) + 1)
