"""What needs the real training step but trains nothing: compiling it for hardware that is not there."""
