"""Pipeline schedules as data: what every stage runs in every tick, and where each value waits. numpy only.

A model is cut into ``num_stages x num_chunks`` pieces, the *virtual stages*; a microbatch passes them in order. Virtual
stage s is chunk ``s // num_stages`` of stage ``s % num_stages``, so each hop, forward or backward, is one step around
the ring of stages. All stages work in lock step, in ticks of five phases:

1. *Arrivals*: what the ring brought is stored, activations in slot ``activation_arrival`` and gradients in slot
   ``gradient_arrival``. Both are always valid: when nothing came, they name a slot that holds nothing of value.
2. *Forward lane*: chunk ``forward_chunk`` runs on microbatch ``forward_microbatch``. Its input is in activation slot
   ``forward_slot``, or, on virtual stage 0, the embedding of ``embed_microbatch``.
3. *Loss*: the output that the last virtual stage has just made of ``loss_microbatch`` goes through head and loss. Its
   gradient lands in gradient slot ``loss_slot`` of the last stage.
4. *Backward lane*: the same chunk's backward pass, ``backward_microbatch`` and ``backward_chunk``. It runs the forward
   pass again, from activation slot ``backward_slot`` (virtual stage 0: from the embedding of ``embed_grad_microbatch``,
   whose gradient it makes), and reads the gradient of its output from slot ``gradient_slot``.
5. *Ring*: outputs of the forward lane go to the next stage, input gradients of the backward lane to the previous one.

Schedules (M microbatches, p stages, v chunks): GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, PipeDream), its
interleaved form (Narayanan et al. 2021, Megatron-LM, section 2.2) and breadth first (Lamy-Poirier 2023).
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np

from jaxpar.schedule.kinds import Kind

NOTHING = -1
"""In a table: nothing runs here, or nothing is read."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A schedule as int32 tables; the module says what each column means. ``NOTHING`` (-1) where there is nothing."""

    kind: Kind
    num_stages: int
    num_microbatches: int
    num_chunks: int
    """Chunks per stage."""
    num_activation_slots: int
    """Slots of the activation buffer of every stage."""
    num_gradient_slots: int
    """Slots of the gradient buffer of every stage."""

    # [ticks, stages]
    activation_arrival: np.ndarray
    gradient_arrival: np.ndarray
    forward_microbatch: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    backward_microbatch: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    gradient_slot: np.ndarray

    # [ticks]
    embed_microbatch: np.ndarray
    loss_microbatch: np.ndarray
    loss_slot: np.ndarray
    embed_grad_microbatch: np.ndarray

    @property
    def num_ticks(self) -> int:
        """Ticks of one optimizer step."""
        return len(self.forward_microbatch)

    @property
    def forward_runs(self) -> np.ndarray:
        """Bool [ticks]: whether any stage needs the forward lane. Every stage then runs it, and masks its result."""
        return (self.forward_microbatch != NOTHING).any(1)

    @property
    def backward_runs(self) -> np.ndarray:
        """Bool [ticks]: the same for the backward lane."""
        return (self.backward_microbatch != NOTHING).any(1)

    def stage_tables(self) -> dict[str, np.ndarray]:
        """The tables with a column per stage, int32 [ticks, stages], by name."""
        return {name: table for name, table in self._tables().items() if table.ndim == 2}

    def tick_tables(self) -> dict[str, np.ndarray]:
        """The tables that are the same on every stage, int32 or bool [ticks], by name."""
        shared = {name: table for name, table in self._tables().items() if table.ndim == 1}
        return shared | {"forward_runs": self.forward_runs, "backward_runs": self.backward_runs}

    def idle_share(self, forward_cost: int = 1, backward_cost: int = 3) -> Fraction:
        """Share of the step in which a stage does nothing useful, exact.

        A lane takes its time on all stages when any stage needs it. The costs are in any unit; the default counts a
        backward pass as two forward passes and the forward pass that it repeats.
        """
        work = self.num_microbatches * self.num_chunks * (forward_cost + backward_cost)
        spent = int(self.forward_runs.sum()) * forward_cost + int(self.backward_runs.sum()) * backward_cost
        return 1 - Fraction(work, spent)

    def peak_in_flight(self) -> tuple[int, ...]:
        """Per stage: most (microbatch, chunk) whose forward pass has begun and whose backward pass has not ended."""
        begun = np.cumsum(self.forward_microbatch != NOTHING, axis=0)
        ended = np.cumsum(self.backward_microbatch != NOTHING, axis=0)
        ended_before = np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])
        return tuple(int(most) for most in (begun - ended_before).max(0))

    def _tables(self) -> dict[str, np.ndarray]:
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in values if isinstance(value, np.ndarray)}
