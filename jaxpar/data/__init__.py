"""Sources, tokenizers, packing, the global order of rows, and the loader that any mesh and process count can share.

The loader needs JAX and is imported when it is first named, so that preparing data starts without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jaxpar.data.dataset import Datasets, TokenDataset, load_dataset
from jaxpar.data.order import PADDED, GlobalOrder, Position
from jaxpar.data.packing import PackedRows
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from jaxpar.data.loader import Batch as Batch
    from jaxpar.data.loader import Loader as Loader
    from jaxpar.data.loader import rows_of_devices as rows_of_devices
    from jaxpar.data.loader import validation_loader as validation_loader

_OF_LOADER = ("Batch", "Loader", "rows_of_devices", "validation_loader")
__all__ = [
    "PADDED",
    "Batch",
    "Datasets",
    "GlobalOrder",
    "Loader",
    "PackedRows",
    "Position",
    "TokenDataset",
    "Tokenizer",
    "load_dataset",
    "load_tokenizer",
    "rows_of_devices",
    "validation_loader",
]


def __getattr__(name: str) -> object:
    if name not in _OF_LOADER:
        raise AttributeError(f"module 'jaxpar.data' has no attribute {name!r}")
    return getattr(importlib.import_module("jaxpar.data.loader"), name)
