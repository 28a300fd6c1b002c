"""Says what is being done where it takes long."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
SECONDS = 3.0  # before anything is said


@contextmanager
def saying(what: str) -> Iterator[None]:
    """A line of the log says `what`, if what stands inside takes longer than `SECONDS`."""
    timer = threading.Timer(SECONDS, log.info, ["%s ...", what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
