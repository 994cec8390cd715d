"""Who goes next, and who gives way: a policy is a few small pure functions, one file each."""

from pagepool.scheduling.policies.base import Policy, View
from pagepool.scheduling.policies.fair import FAIR
from pagepool.scheduling.policies.fcfs import FCFS
from pagepool.scheduling.policies.lpm import LPM
from pagepool.scheduling.policies.priority import PRIORITY

__all__ = ["POLICIES", "Policy", "View"]

POLICIES = {"priority": PRIORITY, "fcfs": FCFS, "lpm": LPM, "fair": FAIR}
