"""Deliberate faults of context parallelism: each must break the comparison with one device."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import jaxpar.loss
import jaxpar.model.decoder
import jaxpar.model.ring as ring
import jaxpar.strategy
from tests.model import test_ring
from tests.mutants.test_mutants import Lax, scaled_where_partial
from tests.parity.harness import assert_same, build, model_key, single_device, train
from tests.parity.test_context import config_on

pytestmark = pytest.mark.proof


def one_turn_less(walk):
    """The last rotation dropped: nobody meets the keys of the next member."""

    def faulty(absorb, so_far, kv):
        last = lax.axis_size("context") - 1
        return walk(lambda so_far, kv, turn: keep_at(turn != last, absorb(so_far, kv, turn), so_far), so_far, kv)

    return faulty


def keep_at(keep, new, old):
    return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)


def turned_back(x):
    """Keys and values passed to the previous member, while masks expect the next one's."""
    members = lax.axis_size("context")
    return lax.ppermute(x, "context", [(member, (member - 1) % members) for member in range(members)])


def gradients_left_behind(gradients, grad_q, own, kv, reduce):
    """The last permute of the key and value gradients dropped: they are added to the wrong member's."""
    honest = ring._pass_on
    sent = []

    def counted(x):
        sent.append(x)
        return x if x.dtype == own.dtype and len(sent) == 6 else honest(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_pass_on", counted)
        return HONEST_BACKWARD(gradients, grad_q, own, kv, reduce)


HONEST_BACKWARD = ring._ring_backward

RING_FAULTS = {
    "the last rotation dropped": lambda m: m.setattr(ring, "_ring", one_turn_less(ring._ring)),
    "the wrong way around": lambda m: m.setattr(ring, "_pass_on", turned_back),
    "gradients of keys and values not home": lambda m: m.setattr(ring, "_ring_backward", gradients_left_behind),
    "the documents of visiting keys taken for one's own": lambda m: m.setattr(
        ring._Row, "segments_of", lambda self, member: lax.dynamic_slice_in_dim(
            self._segment_ids, self.member * self._length, self._length, 1
        )
    ),
    "chunks of later members seen instead of earlier ones": lambda m: m.setattr(
        ring, "_key_pairs", lambda halves, earlier, honest=ring._key_pairs: honest(halves, ~earlier)
    ),
    "shares of two blocks not weighed": lambda m: m.setattr(
        ring, "merge", lambda a, b: ring.Partial(0.5 * (a.out + b.out), jnp.logaddexp(a.log_sum, b.log_sum))
    ),
    "own block sees the future": lambda m: m.setattr(
        ring, "attend_block", lambda *blocks, causal, honest=ring.attend_block: honest(*blocks, causal=False)
    ),
    "correction of the scores' gradient left out": lambda m: m.setattr(
        ring,
        "attend_block_backward",
        lambda *blocks, causal, honest=ring.attend_block_backward: honest(
            *blocks[:-1], jnp.zeros_like(blocks[-1]), causal=causal
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RING_FAULTS)
def test_ring_fault_breaks_attention(name, monkeypatch):
    test_ring.on_one_device()
    RING_FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_ring.assert_equal(test_ring.split(4, "ring"), test_ring.TOLERANCE)


def cut_in_order(x):
    """Contiguous parts where attention expects zig-zag."""
    batch, _, *rest = jax.typeof(x).sharding.spec.partitions
    return reshard(x, P(batch, "context", *rest))


STEP_FAULTS = {
    "labels in another order than tokens": lambda m: m.setattr(jaxpar.loss, "split_sequence", cut_in_order),
    "tokens and positions in another order than documents": lambda m: m.setattr(
        jaxpar.model.decoder, "split_sequence", cut_in_order
    ),
    "loss not summed over context": lambda m: m.setattr(
        jaxpar.loss, "lax", Lax(psum=lambda x, axes: lax.psum(x, axes) / (4.0 if "context" in axes else 1.0))
    ),
    "gradients of norm scales not summed over context": lambda m: m.setattr(
        jaxpar.strategy, "finish_reduction", scaled_where_partial(1 / 4)
    ),
}


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_step_fault_breaks_parity(name, monkeypatch):
    expected = single_device(model_key({}), 1, "full")
    STEP_FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(train(build(config_on({"fsdp": 2, "context": 4, "context_mode": "ring"}, 1))), expected)
