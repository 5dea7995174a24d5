"""The real train step of a config, compiled for a GPU target without a GPU, or for fake CPU devices; and its report."""

from jaxpar.experiments.compile.launch import CompileFailed, compile_step
from jaxpar.experiments.compile.outcome import CollectiveRow, CompileOutcome, Lint
from jaxpar.experiments.compile.targets import GpuTarget, Target, cpu_target, gpu_target, gpu_targets

__all__ = [
    "CollectiveRow",
    "CompileFailed",
    "CompileOutcome",
    "GpuTarget",
    "Lint",
    "Target",
    "compile_step",
    "cpu_target",
    "gpu_target",
    "gpu_targets",
]
