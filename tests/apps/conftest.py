import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apps.jobs import Started


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Started]]:
    jobs: list[Started] = []
    yield jobs
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.communicate()
