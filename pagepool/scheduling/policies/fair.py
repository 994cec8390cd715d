"""Token-fair among tenants: whoever was served least goes next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
counter of the tokens served to it, prompt tokens once and output tokens twice, over its weight; a tenant that comes
back from idleness begins no lower than those that are busy. While two tenants have requests waiting, their counters
differ by no more than what is admitted at a time can add.
"""

from __future__ import annotations

from pagepool.scheduling.policies.base import Facts, Policy
from pagepool.scheduling.policies.fcfs import arrival
from pagepool.scheduling.request import Sequence

__all__ = ["FAIR"]


def least_served(seq: Sequence, view: Facts) -> tuple[float, int]:
    """The first request of the tenant with the lowest counter, which never falls; equals in the order of arrival."""
    return view.served(seq.tenant), seq.id


FAIR = Policy(rank=arrival, key=least_served)
