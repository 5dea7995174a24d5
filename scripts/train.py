"""`python scripts/train.py CONFIG [key=value ...]` is `jaxpar train`."""

import sys

from jaxpar.cli.main import main

sys.argv.insert(1, "train")
main()
