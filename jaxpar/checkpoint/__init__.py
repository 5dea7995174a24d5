"""Checkpoints: the Orbax store, and Hugging Face safetensors in. Sees pytrees, shardings and key maps, never model code."""
