"""The way of context parallelism: chosen by the length of a part, and priced as what it sends."""

import pytest

from jaxpar.config import PRESETS
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.context import resolved_context_mode, sequence_shards
from jaxpar.plan.layout import mesh_layout
from jaxpar.plan.memory import training_memory
from jaxpar.plan.shape import shape_of
from jaxpar.plan.time import step_time
from jaxpar.plan.topology import make_cluster

EIGHT_B = shape_of(PRESETS["llama-3.1-8b"].model)
MESH = {"pipeline": 1, "data": 1, "fsdp": 2, "expert": 1, "context": 4, "tensor": 1}


def test_auto_is_the_ring_for_long_parts_only():
    assert resolved_context_mode("auto", 2048) == "ring"
    assert resolved_context_mode("auto", 2047) == "allgather"
    assert resolved_context_mode("ring", 1) == "ring"
    assert resolved_context_mode("allgather", 10**6) == "allgather"


@pytest.mark.parametrize(("tensor", "context", "shards"), [(4, 1, 4), (1, 4, 8), (2, 4, 8), (4, 2, 8), (3, 2, 12)])
def test_two_chunks_per_member_and_tensor_shards_of_them(tensor, context, shards):
    assert sequence_shards(tensor=tensor, context=context) == shards


def test_gathered_keys_and_values_by_hand():
    layout = mesh_layout(MESH, global_batch_size=2, seq_len=4096)
    assert layout.context_mode == "allgather"
    time = step_time(EIGHT_B, layout, make_cluster(gpu_named("h100"), num_devices=8))
    found = {c.op: c for c in time.collectives if c.axis == "context"}
    part = 1024 * 2 * 8 * 128  # elements of keys and values of one member, which goes to three others
    assert found["all-gather"].bytes == 32 * 2 * 3 * part * 2
    assert found["reduce-scatter"].bytes == 32 * 3 * part * 4
    assert all(c.exposed_s == c.seconds > 0 for c in found.values())


def test_the_ring_holds_less_than_the_gathered_row():
    def buffers(mode: str) -> float:
        layout = mesh_layout(MESH, global_batch_size=2, seq_len=65536, context_mode=mode)
        return training_memory(EIGHT_B, layout, device_bytes=80e9).buffers

    assert buffers("auto") == 2 * 2 * 16384 * 2 * 1024
    assert buffers("allgather") == (2 + 4) * 65536 * 2 * 1024
