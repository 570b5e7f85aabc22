"""SIGTERM and Ctrl-C become a flag, which the loop reads where it can save: at a step boundary."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

MESSAGES = {
    signal.SIGTERM: b"\nSIGTERM: finishing the step and saving\n",
    signal.SIGINT: b"\nCtrl-C: finishing the step and saving (once more stops at once)\n",
}


class Signals:
    """A context manager. `received` is the number of the first signal that came, or None.

    A second Ctrl-C raises KeyboardInterrupt as usual. Outside the main thread, where Python delivers no signals, it
    does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._previous.clear()

    def install(self) -> None:
        """Take the handlers, again if somebody else has taken them since."""
        if not self._on_main_thread():
            return
        for number in MESSAGES:
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, signal.SIG_DFL if previous is None else previous)

    @property
    def exit_code(self) -> int:
        """What a shell reports for the signal: 143 for SIGTERM, 130 for Ctrl-C; 0 without one."""
        return 128 + self.received if self.received else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            os.write(2, MESSAGES[signal.Signals(number)])  # print() may be interrupted inside its own buffer
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    @staticmethod
    def _on_main_thread() -> bool:
        return threading.current_thread() is threading.main_thread()


class Interrupted(Exception):
    """Raised at the step boundary once everything is saved; unwinds Lightning's loop."""
