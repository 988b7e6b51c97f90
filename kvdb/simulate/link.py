"""A line of one bandwidth: what is sent waits for what was sent before."""

from __future__ import annotations


class Link:
    """First come, first served. Rates are in bytes a second, ``inf`` for no limit; times are in
    seconds."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0
        self.busy_seconds = 0.0
        self.nbytes = 0

    def end_of(self, at: float, nbytes: int) -> float:
        """When something handed over now would have arrived."""
        return max(at, self.free_at) + nbytes / self.rate

    def send(self, at: float, nbytes: int) -> float:
        """Send it, and return when it has arrived."""
        self.free_at = end = self.end_of(at, nbytes)
        self.busy_seconds += nbytes / self.rate
        self.nbytes += nbytes
        return end


def through(links: tuple[Link, ...], at: float, nbytes: int) -> float:
    """Send through several links at once, as through a switch: the slowest says when it ends."""
    return max(link.send(at, nbytes) for link in links)


def end_through(links: tuple[Link, ...], at: float, nbytes: int) -> float:
    """When :func:`through` would end."""
    return max(link.end_of(at, nbytes) for link in links)
