"""Bytes of the training state per parameter, by optimizer: what each keeps of which parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxpar.config.optimizers import with_optimizer_defaults
from jaxpar.config.schema import Config, ModelConfig, OptimConfig
from jaxpar.plan.memory import StateBytes
from jaxpar.plan.param_views import is_factored, is_hidden_matrix, view_of
from jaxpar.plan.parameters import ParamKind, dim_sizes, param_kinds

_TABLES = ("embedding", "head")


def state_bytes(config: Config) -> StateBytes:
    """Bytes per parameter of a config's state.

    Two moments: adamw. One: lion, sgd with momentum, and muon for the matrices of blocks. Adafactor keeps the row and
    column means of a matrix, and with momentum one moment more. ``optim.ema_decay`` adds four bytes everywhere.

    Args:
        config: With the model's dimensions complete.
    """
    value = 2.0 if config.precision.params == "bfloat16" else 4.0
    optim = with_optimizer_defaults(config.optim)
    kinds = param_kinds(config.model)
    tables = [kind for kind in kinds if kind.group in _TABLES]
    vectors = [kind for kind in kinds if kind.replicated or kind.group == "positions"]
    matrices = [kind for kind in kinds if kind not in tables and kind not in vectors]
    average = 4.0 if optim.ema_decay else 0.0
    kept = [average + value * _values_kept(optim, config.model, part) for part in (matrices, tables, vectors)]
    return StateBytes(params=value, grads=value, optimizer=kept[0], optimizer_tables=kept[1], optimizer_vectors=kept[2])


def _values_kept(optim: OptimConfig, model: ModelConfig, kinds: Iterable[ParamKind]) -> float:
    """Values that the optimizer keeps per parameter of some arrays, on average."""
    sizes = dim_sizes(model)
    params = kept = 0.0
    for kind in kinds:
        shape = tuple(sizes[dim] for dim in kind.dims)
        params, kept = params + math.prod(shape), kept + math.prod(shape) * _kept_of(optim, kind, shape)
    return kept / params if params else 0.0


def _kept_of(optim: OptimConfig, kind: ParamKind, shape: tuple[int, ...]) -> float:
    if optim.name == "adafactor":
        return (1.0 if optim.momentum else 0.0) + _second_moment(optim, kind, shape)
    if optim.name == "muon":
        return 1.0 if is_hidden_matrix(kind.name, kind.dims) else 2.0
    if optim.name == "sgd":
        return 1.0 if optim.momentum else 0.0
    return 1.0 if optim.name == "lion" else 2.0


def _second_moment(optim: OptimConfig, kind: ParamKind, shape: tuple[int, ...]) -> float:
    """Values of adafactor's second moment per parameter: (m + n) / (m n) for an [m, n] matrix that is factored."""
    view = view_of(kind.dims)
    if not is_factored(optim, view, shape):
        return 1.0
    rows, columns = view.count(shape, view.row_dims), view.count(shape, view.column_dims)
    return (rows + columns) / (rows * columns)
