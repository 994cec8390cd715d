"""Continuous batching in plain Python."""

from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.scheduler import Scheduler

__all__ = [
    "ScheduledBatch",
    "Scheduler",
    "SeqState",
    "Sequence",
]
