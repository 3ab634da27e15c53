"""SIGINT and SIGTERM as requests: a run finishes its step, saves, and only then ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While inside, the first SIGINT or SIGTERM is only noted in `received`; a second one acts at once.

    Ask `received` between steps, save, leave the block, then `deliver`. Outside the main thread Python lets nobody
    handle signals, and this changes nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            # what a parent has told us to ignore (nohup, jobs in the background of a script) stays ignored
            heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, which Python cannot set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def deliver(self) -> None:
        """Hand the noted signal to whoever handled it before: Ctrl-C raises KeyboardInterrupt, as ever.

        A SIGTERM that nobody handles becomes `SystemExit(143)`, so that temporary files are cleaned up.
        """
        if self.received is None:
            return
        if self.received == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            raise SystemExit(128 + signal.SIGTERM)
        signal.raise_signal(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:  # asked twice: a step may take long, or hang
            self.__exit__(None, None, None)
            self.deliver()
        self.received = number
