"""``python -m tests.recovery.counting FILE ARGUMENTS...``: the jaxpar command; writes how often it compiled what."""

import json
import sys
from pathlib import Path

from jaxpar.audit.compiler_log import record_compilations
from jaxpar.cli.main import main

if __name__ == "__main__":
    counts = Path(sys.argv.pop(1))
    with record_compilations() as compilations:
        try:
            main()
        finally:
            counts.write_text(json.dumps({name: compilations.count(name) for name in compilations.compile_s}))
