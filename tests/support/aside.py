"""Hands the tests that wait to one of several processes, while the others compute."""

import pytest
from durations import FILE, waits
from xdist.remote import Producer
from xdist.scheduler import WorkStealingScheduling


class Aside(WorkStealingScheduling):
    """Of three processes or more, one begins with the tests that wait. Whoever has none left takes over others' tests.

    A process more than there are cores then fills what waits leave, and hardly computes beside the others.
    """

    begun = False

    def check_schedule(self) -> None:
        if self.pending and not self.begun and len(self.nodes) > 2:
            self.begun = True
            files = [FILE.parents[2] / test.split("::")[0] for test in self.collection or ()]
            aside = {file for file in set(files) if waits(file)}
            waiting = [index for index in self.pending if files[index] in aside]
            self.pending = [index for index in self.pending if files[index] not in aside]
            self.node2pending[self.nodes[-1]] += waiting
            self.nodes[-1].send_runtest_some(waiting)
        super().check_schedule()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Aside | None:
    return Aside(config, log) if config.getoption("dist") == "worksteal" else None
