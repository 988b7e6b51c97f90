"""A few daemon threads for calls that may never come back: whoever waits gives up, not they.

A thread that hangs in a remote's client is lost until that returns; so there are never more than a
fixed number, and none keeps the program from ending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
MANY = 16


class Crew:
    """Runs what is submitted in at most ``most`` threads, made when they are needed. A future that
    is cancelled before its turn is never run."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._idle = 0
        self._threads = 0
        self._closed = False
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._condition = threading.Condition()

    def submit(self, action: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._condition:
            if self._closed:
                future.cancel()
                return future
            if len(self._work) >= MANY:  # behind calls that hang: what was given up is forgotten
                self._work = deque(each for each in self._work if not each[0].cancelled())
            self._work.append((future, action))
            if self._idle >= len(self._work):
                self._condition.notify()
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Let threads end that are idle or come back; nobody is waited for."""
        with self._condition:
            self._closed = True
            for future, _ in self._work:
                future.cancel()
            self._work.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                self._condition.wait_for(lambda: self._work or self._closed)
                self._idle -= 1
                if not self._work:
                    self._threads -= 1
                    return
                future, action = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = action()
            except BaseException as error:  # it belongs to who asks for the result
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, action
