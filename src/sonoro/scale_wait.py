"""Predicts how long listeners wait for their first packet, and how many replicas keep that below a target. No Ray."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

HEADROOM = 1.25
"""A replica takes longer to start than a load to grow by some percent; close to its capacity waits grow fast."""

_RECENT = 1 / 30
"""Weight of the newest second in what is told of a replica."""

_FORGOTTEN = 0.05
"""What is left of one first packet after a minute and a half without another: by then nobody waits."""

_LEARNT = 1 / 600
"""Weight of the newest second in what is learnt of how times grow with the load."""

_DOUBT = 5e-4
"""Variance of the load, over its mean squared, at which half of what is learnt counts: less may be chance."""


@dataclass(frozen=True)
class ReplicaLoad:
    """The last half minute of a replica, in the mean: how many requests ran, and waited for one of its `capacity`
    permits; how long after a request came its first packet was sent; and how long it took in all.

    Of these times a part grows in proportion to the requests that run: by what is known at least `least_growth` and at
    most `growth`, between 0 and 1."""

    running: float
    waiting: float
    capacity: float
    first_packet_s: float
    held_s: float
    growth: float
    least_growth: float

    @classmethod
    def mean(cls, loads: Sequence["ReplicaLoad"]) -> "ReplicaLoad":
        """The mean of replicas."""
        return cls(*(sum(getattr(load, entry.name) for load in loads) / len(loads) for entry in fields(cls)))

    @property
    def wait_s(self) -> float:
        """The predicted mean wait for a first packet of the requests that come now; infinite without an engine."""
        queued_s = self.waiting * self.held_s / self.capacity if self.capacity else math.inf
        return self.first_packet_s + queued_s

    def wait_with_s(self, times: float, growth: float) -> float:
        """The predicted mean wait if `times` as many come; infinite if that is more than a replica can do."""
        wanting = self.running + self.waiting
        if not wanting or not self.capacity:
            return self.wait_s
        if times * growth >= 1:
            return math.inf
        # As many run as come in the time for which one runs, which grows with them in turn.
        grown = times * (1 - growth) / (1 - times * growth)
        longer = 1 - growth + growth * grown
        return self.wait_s * longer + _queue_s(wanting * grown, self.capacity, self.held_s * longer)


def replicas_for(loads: Sequence[ReplicaLoad], target_s: float) -> int:
    """How many replicas there should be in place of those with `loads`, at least one and at most twice as many: those
    whose predicted wait would hold `target_s` with `HEADROOM` times the requests of now."""
    load, count = ReplicaLoad.mean(loads), len(loads)

    def is_enough(replicas: int, growth: float) -> bool:
        return load.wait_with_s(HEADROOM * count / replicas, growth) <= target_s

    if load.wait_s > target_s or not is_enough(count, load.least_growth):
        more = range(count + 1, 2 * count)
        return next((replicas for replicas in more if is_enough(replicas, load.least_growth)), 2 * count)
    return count - 1 if count > 1 and is_enough(count - 1, load.growth) else count


class LoadEstimate:
    """Makes a `ReplicaLoad` of what is seen each second."""

    def __init__(self) -> None:
        self._running, self._waiting, self._held_s, self._rtf = 0.0, 0.0, 0.0, 0.0
        self._first_packets, self._first_packets_s = 0.0, 0.0
        self._seconds = 0
        self._mean_running, self._mean_rtf, self._variance, self._covariance = 0.0, 0.0, 0.0, 0.0

    def note(self, running: float, waiting: float, first_packets: float, first_packets_s: float) -> None:
        """Note how many requests ran and waited in the mean of a second; how many first packets were sent in it, and
        the sum of their waits."""
        self._running += _RECENT * (running - self._running)
        self._waiting += _RECENT * (waiting - self._waiting)
        self._first_packets += first_packets - _RECENT * self._first_packets
        self._first_packets_s += first_packets_s - _RECENT * self._first_packets_s

    def note_ended(self, running: float, held_s: float, rtf: float) -> None:
        """Note the means of the requests that ended in a second in which so many ran: how long they took, and that over
        the length of their audio."""
        self._seconds += 1
        newest = max(_RECENT, 1 / self._seconds)
        self._held_s += newest * (held_s - self._held_s)
        self._rtf += newest * (rtf - self._rtf)
        # A line through the times by the load, whose oldest points are forgotten.
        weight = max(_LEARNT, 1 / self._seconds)
        by_running, by_rtf = running - self._mean_running, rtf - self._mean_rtf
        self._mean_running += weight * by_running
        self._mean_rtf += weight * by_rtf
        self._variance = (1 - weight) * (self._variance + weight * by_running**2)
        self._covariance = (1 - weight) * (self._covariance + weight * by_running * by_rtf)

    def load(self, capacity: float) -> ReplicaLoad:
        """What is known now of a replica that may run `capacity` requests at once."""
        is_recent = self._first_packets > _FORGOTTEN
        first_packet_s = self._first_packets_s / self._first_packets if is_recent else 0.0
        seen = self._running, self._waiting, capacity, first_packet_s, self._held_s
        return ReplicaLoad(*seen, growth=self._growth(doubt=1.0), least_growth=self._growth(doubt=0.0))

    def _growth(self, doubt: float) -> float:
        """What is learnt counts as much as the load varied, beside a growth of `doubt`."""
        running, rtf = self._mean_running, self._mean_rtf
        if not running or not self._rtf:
            # Nothing has ended yet; requests that come one at a time do not slow each other.
            return doubt * min(1.0, self._running)
        slope = (self._covariance + doubt * _DOUBT * running * rtf) / (self._variance + _DOUBT * running**2)
        return min(1.0, max(0.0, slope * self._running / self._rtf))


def _queue_s(busy: float, places: float, held_s: float) -> float:
    """The mean wait for one of so many `places`, of which `busy` would be taken if there were more: by Erlang's C."""
    if busy >= places:
        return math.inf
    blocked = 1.0
    for place in range(1, math.floor(places) + 1):
        blocked = busy * blocked / (place + busy * blocked)
    queued = blocked / (1 - busy / places * (1 - blocked))
    return queued * held_s / (places - busy)
