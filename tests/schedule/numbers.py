"""Runs a table on plain integers, buffers and ring and all: an executor small enough to be checked by eye."""

import itertools

import numpy as np


class Garbage:
    """What a slot holds before anything of value landed there; any use of it in arithmetic is an error."""


GARBAGE = Garbage()


def run(schedule):
    """(loss, gradient of each weight, gradient of each embedding).

    Virtual stage s multiplies by ``weights[s]``; microbatch m starts as ``inputs[m]``, and its loss is ``scales[m]``
    times its output. Python integers, so that every result is exact.
    """
    stages, virtuals = schedule.num_stages, schedule.num_stages * schedule.num_chunks
    weights, inputs, scales = _problem(schedule)
    tables = schedule.stage_tables() | schedule.tick_tables()
    activations = [[GARBAGE] * schedule.num_activation_slots for _ in range(stages)]
    gradients = [[GARBAGE] * schedule.num_gradient_slots for _ in range(stages)]
    sent_forward, sent_backward = [GARBAGE] * stages, [GARBAGE] * stages
    loss, weight_grads, input_grads = 0, [0] * virtuals, [0] * schedule.num_microbatches
    for tick in range(schedule.num_ticks):
        at = {name: table[tick] for name, table in tables.items()}
        for i in range(stages):
            activations[i][at["activation_arrival"][i]] = sent_forward[i - 1]
            gradients[i][at["gradient_arrival"][i]] = sent_backward[(i + 1) % stages]
        outputs, input_gradients = [GARBAGE] * stages, [GARBAGE] * stages
        for i in range(stages):
            if at["forward_microbatch"][i] >= 0:
                virtual = at["forward_chunk"][i] * stages + i
                embedded = virtual == 0
                x = inputs[at["embed_microbatch"]] if embedded else activations[i][at["forward_slot"][i]]
                outputs[i] = weights[virtual] * x
        if at["loss_microbatch"] >= 0:
            scale = scales[at["loss_microbatch"]]
            loss += scale * outputs[-1]
            gradients[-1][at["loss_slot"]] = scale
        for i in range(stages):
            if at["backward_microbatch"][i] >= 0:
                virtual = at["backward_chunk"][i] * stages + i
                embedded = virtual == 0
                x = inputs[at["embed_grad_microbatch"]] if embedded else activations[i][at["backward_slot"][i]]
                gradient = gradients[i][at["gradient_slot"][i]]
                weight_grads[virtual] += gradient * x
                input_gradients[i] = gradient * weights[virtual]
                if embedded:
                    input_grads[at["embed_grad_microbatch"]] += input_gradients[i]
        sent_forward, sent_backward = outputs, input_gradients
    return loss, weight_grads, input_grads


def expected(schedule):
    """The same by the product rule, without any schedule."""
    weights, inputs, scales = _problem(schedule)
    product = 1
    for weight in weights:
        product *= weight
    total = sum(scale * x for scale, x in zip(scales, inputs, strict=True))
    weight_grads = [total * product // weight for weight in weights]
    return total * product, weight_grads, [scale * product for scale in scales]


def _problem(schedule):
    """(weights, inputs, scales), all different primes: nothing that is mixed up comes out the same."""
    virtuals, microbatches = schedule.num_stages * schedule.num_chunks, schedule.num_microbatches
    primes = (n for n in itertools.count(2) if all(n % d for d in range(2, int(n**0.5) + 1)))
    return tuple(list(itertools.islice(primes, count)) for count in (virtuals, microbatches, microbatches))


def waiting(schedule):
    """(activations, gradients): the most values that wait on one stage at one moment, counted from the units' ticks."""
    stages, last = schedule.num_stages, schedule.num_stages * schedule.num_chunks - 1
    ticks = {"forward": {}, "backward": {}}
    for lane, of in ticks.items():
        microbatch, chunk = (schedule.stage_tables()[f"{lane}_{column}"] for column in ("microbatch", "chunk"))
        for tick, stage in np.argwhere(microbatch >= 0).tolist():
            of[int(microbatch[tick, stage]), int(chunk[tick, stage]) * stages + stage] = tick
    forward, backward = ticks["forward"], ticks["backward"]
    counts = []
    for landing in (
        {unit: forward[unit[0], unit[1] - 1] + 1 for unit in forward if unit[1] > 0},
        {unit: backward[unit[0], unit[1] + 1] + 1 if unit[1] < last else forward[unit] for unit in backward},
    ):
        held = np.zeros((schedule.num_ticks, stages), int)
        for unit, tick in landing.items():
            held[tick : backward[unit] + 1, unit[1] % stages] += 1
        counts.append(int(held.max()))
    return tuple(counts)
