"""Checkpoints: the Orbax store, and Hugging Face safetensors in. Sees pytrees, shardings, key maps; no model code."""
