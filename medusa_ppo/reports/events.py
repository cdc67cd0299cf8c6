"""What our own code warned of while a run went on: kept in run.json, shown by the report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


class Events(logging.Handler):
    """Each event has its `step`, its `text`, and how many `times` it was said.

    Attributes:
        fresh: something came since this was last set to False.
        next_step: the step that goes on.
        told: the events.
    """

    LOGGERS = ("heads", "medusa_ppo")
    MOST, LONGEST = 50, 500

    def __init__(self, next_step: int, before: object, clean: Callable[[str], Any]) -> None:
        """Listen until `close`.

        Args:
            next_step: as the attribute.
            before: the events of the run until now, as they stand in its file.
            clean: takes out of a text what no file may hold.
        """
        super().__init__(logging.WARNING)
        self.next_step, self.fresh, self._clean = next_step, False, clean
        self.told = [event for event in before if isinstance(event, dict)] if isinstance(before, list) else []
        for name in self.LOGGERS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = str(self._clean(record.getMessage()))[: self.LONGEST]
        known = next((event for event in self.told if event.get("text") == text), None)
        if known is not None:
            known["times"] = known.get("times", 1) + 1
        elif len(self.told) < self.MOST:
            self.told.append({"step": self.next_step, "text": text, "times": 1})
        self.fresh = True
        alone = not logging.root.handlers and all(logging.getLogger(name).handlers == [self] for name in self.LOGGERS)
        if alone and logging.lastResort:  # Where nobody set up logging, Python shows warnings only as long as there is no handler at all.
            logging.lastResort.handle(record)

    def close(self) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeHandler(self)
        super().close()
