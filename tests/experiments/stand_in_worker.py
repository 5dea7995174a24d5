"""A stand-in for the compiling process that fails in a given way: environment variable FAILS = abort, raise or hang."""

import os
import sys
import time

print("the compiler's last words", file=sys.stderr)
if os.environ["FAILS"] == "abort":
    os.abort()
if os.environ["FAILS"] == "hang":
    time.sleep(60)
raise ValueError("no such option")
