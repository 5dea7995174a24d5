"""How far the attention kernels of this machine are from a float32 reference: output and gradients of q, k and v.

    python scripts/attention_numerics.py results.jsonl [--small]

One line of JSON per kernel and case is written as soon as it is known, so that what came before a crash is kept. A case
is one that trains: bfloat16, grouped heads, head dims, rows of one document or packed; padding at the end of a row. The
kernels are reached through the functions that training calls; one that cannot do a case says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import Config, ConfigError
from jaxpar.model.attention import attend
from jaxpar.model.kernels import fused_attention, segment_starts
from jaxpar.plan.attention import KERNELS, choose_attention
from jaxpar.program import accelerator_of

LIMIT = 0.01
"""Largest difference of an array, as a share of its own norm: some four times the rounding of bfloat16 (2**-9 at most
for each of its values). A wrong mask, scale or head is far beyond."""

ROWS = 2
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""q [B, S, H, h], k and v [B, S, K, h] -> [B, S, H, h]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What attention is computed of."""

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    packed: bool

    def __str__(self) -> str:
        rows = "packed" if self.packed else "one document a row"
        return f"{ROWS} x {self.seq_len}, {self.heads} heads, {self.kv_heads} kv, head_dim {self.head_dim}, {rows}"

    @property
    def segment_ids(self) -> np.ndarray:
        """int32 [ROWS, S]: one full row or three documents, of which one is a token; then a row with padding."""
        length, ids = self.seq_len, np.ones((ROWS, self.seq_len), np.int32)
        if self.packed:
            ids[0, length // 3 :] = 2
            ids[0, length // 3 + 1 :] = 3
            ids[1, length // 2 :] = 2
        ids[1, -length // 5 :] = 0
        return ids


def cases(*, small: bool) -> list[Case]:
    """Head dims of published models; more query heads than kv heads, as many, and one kv head."""
    shapes = [(8, 8, 64), (8, 2, 128), (4, 1, 256)]
    if small:
        shapes = [(4, 2, 16)]
    return [
        Case(seq_len=64 if small else 1024, heads=heads, kv_heads=kv_heads, head_dim=head_dim, packed=packed)
        for heads, kv_heads, head_dim in shapes
        for packed in (False, True)
    ]


def reference(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Softmax attention written out, causal and inside a document, with full float32 products."""
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    seen = (segment_ids[:, :, None] == segment_ids[:, None]) & jnp.tri(length, dtype=bool)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")


def variant_of(kernel: str, case: Case) -> str:
    """The kernel that training would use, e.g. ``mosaic_gpu`` for tokamax on Hopper.

    Raises:
        ConfigError: it cannot do the case on this device.
    """
    config = Config(
        model={"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim},
        data={"seq_len": case.seq_len, "pack": case.packed},
        precision={"compute": "bfloat16"},
        train={"attention": kernel},
    )
    return choose_attention(config, 1, accelerator_of(jax.devices()[0])).kernel


def attention_of(kernel: str, segment_ids: jax.Array) -> Attention:
    """The function that a training step calls."""
    if kernel == "xla":
        return lambda q, k, v: attend(q, k, v, segment_ids)
    return lambda q, k, v: fused_attention(kernel, q, k, v, segment_starts(segment_ids))


def output_and_gradients(attention: Attention, arrays: list[jax.Array], weight: jax.Array) -> tuple[jax.Array, ...]:
    """[output, gradients of q, k, v] of a weighted sum of the output, which leaves padding out."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(attention, *arrays)
        output = jnp.where(weight != 0, output, 0)
        return output, *pull(weight.astype(output.dtype))

    return jax.jit(run)(*arrays)


def differences(actual: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> dict[str, float]:
    """|a - b| / |b| of each array, in float64."""
    found = {}
    for name, got, want in zip(("output", "dq", "dk", "dv"), actual, expected, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        found[name] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return found


def compare(case: Case) -> Iterator[dict[str, object]]:
    """A result for each kernel: ``differences`` and ``ok``, or why there are none."""
    rng = np.random.default_rng(0)
    segment_ids = jnp.asarray(case.segment_ids)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    # Rounded first, so that all compute with the same numbers.
    *arrays, weight = (
        jnp.asarray(rng.normal(size=(ROWS, case.seq_len, n, case.head_dim)), jnp.bfloat16) for n in heads
    )
    weight = jnp.where((segment_ids != 0)[..., None, None], weight, 0)
    exact = output_and_gradients(
        lambda q, k, v: reference(q, k, v, segment_ids), [a.astype(jnp.float32) for a in arrays], weight
    )
    for kernel in reversed(KERNELS):
        result: dict[str, object] = {"case": str(case), "kernel": kernel}
        try:
            result["kernel"] = variant_of(kernel, case)
            found = differences(
                output_and_gradients(attention_of(result["kernel"], segment_ids), arrays, weight), exact
            )
            yield {**result, "differences": found, "ok": all(value <= LIMIT for value in found.values())}
        except ConfigError as error:
            yield {**result, "left_out": error.problems[0].message}
        except Exception as error:  # a kernel that fails in its own way must not hide the others
            yield {**result, "ok": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def main() -> None:
    """Compare all, a line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="file of JSON lines")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a rehearsal")
    options = parser.parse_args()
    with options.results.open("w", encoding="utf-8") as file:
        for case in cases(small=options.small):
            for result in compare(case):
                print(json.dumps(result), file=file, flush=True)


if __name__ == "__main__":
    main()
