"""What needs the real training step: verify a layout, compare layouts by running them, measure the links.

Modules are imported by name; this file stays empty, so that commands can use the parts that need no JAX.
"""
