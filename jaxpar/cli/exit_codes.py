"""Exit codes of every command."""

DONE = 0
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75
"""SIGTERM came; the state is saved and the same command goes on (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""Ctrl-C."""
