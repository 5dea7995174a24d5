"""Sources, tokenizers, packing, the global order of rows, and the loader that any mesh and process count can share."""

from jaxpar.data.dataset import Datasets, TokenDataset, load_dataset
from jaxpar.data.loader import Batch, Loader, rows_of_devices, validation_loader
from jaxpar.data.order import PADDED, GlobalOrder, Position
from jaxpar.data.packing import PackedRows
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer

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
