"""The compile worker with experts multiplied by ``lax.ragged_dot``, which becomes a masked dense product."""

import sys

from jax import lax

from jaxpar.experiments.compile.worker import main
from jaxpar.model import grouped

if __name__ == "__main__":
    grouped.GROUPED_PRODUCTS["mosaic_gpu"] = lax.ragged_dot
    main(*sys.argv[1:])
