"""What a run reports: metrics, progress and log lines. Imports no JAX; everything takes plain numbers."""

from jaxpar.events.live import open_progress
from jaxpar.events.log import RunLog
from jaxpar.events.metrics import EVAL_KEYS, TRAIN_KEYS, MetricsLog, RunMetrics
from jaxpar.events.progress import NullProgress, Progress, StepReport
from jaxpar.events.sinks import check_sinks

__all__ = [
    "EVAL_KEYS",
    "TRAIN_KEYS",
    "MetricsLog",
    "NullProgress",
    "Progress",
    "RunLog",
    "RunMetrics",
    "StepReport",
    "check_sinks",
    "open_progress",
]
