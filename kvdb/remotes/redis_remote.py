"""Objects as strings in Redis. Large ones are read in pieces, which is bounded in memory and faster
than one large reply; small ones share a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import Any, NamedTuple, TypeVar

from kvdb.remotes.redis_client import PAGE_KEYS, WRONG_TYPE, RedisClient
from kvdb.remotes.redis_connections import Value
from kvdb.remotes.redis_room import Room
from kvdb.remotes.remote import Get, Got, Listed, Put, PutState

# Two connections read faster than one; more were no faster on loopback.
THREADS = 2
PIECE_BYTES = 2 << 20
# What a server takes in one string (proto-max-bulk-len).
MAX_VALUE_BYTES = 512 << 20


class Reading(NamedTuple):
    number: int
    get: Get
    nbytes: int


class Writing(NamedTuple):
    number: int
    put: Put
    nbytes: int


Job = TypeVar("Job", Reading, Writing)


class RedisRemote:
    """See :class:`kvdb.remotes.remote.Remote`. An object of no bytes is not put, and counts as
    absent; a key that holds something else than a string is neither there nor free."""

    def __init__(
        self, client: RedisClient, *, max_bytes: int | None = None, ttl_seconds: int | None = None
    ) -> None:
        self._client = client
        self._ttl_seconds = ttl_seconds
        self._room = Room(client, max_bytes=max_bytes, expires=ttl_seconds is not None)
        # Of their own: what is put behind a request must not keep the next one from reading.
        self._readers = ThreadPoolExecutor(THREADS, "kvdb-redis-get")
        self._writers = ThreadPoolExecutor(THREADS, "kvdb-redis-put")

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        return [size > 0 for size in self._client.sizes(keys)]

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        readings = []
        sizes = self._client.sizes([get.key for get in gets])
        for index, (get, size) in enumerate(zip(gets, sizes, strict=True)):
            if size <= 0:
                yield Got(index, None, "not a string" if size == WRONG_TYPE else None)
            elif size > get.buffer.nbytes:
                yield Got(index, None, "too large")
            else:
                readings.append(Reading(index, get, size))
        jobs = [self._readers.submit(self._read, batch) for batch in _batches(readings)]
        try:
            for done in as_completed(jobs):
                yield from done.result()
        finally:
            _stop(jobs)

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        if not puts:
            return []
        states: dict[int, PutState] = {}
        writings = []
        sizes = self._client.sizes([put.key for put in puts])
        room = self._room.look()
        for index, (put, size) in enumerate(zip(puts, sizes, strict=True)):
            nbytes = sum(buffer.nbytes for buffer in put.buffers)
            if size and not put.replace:
                states[index] = "failed" if size == WRONG_TYPE else "present"
            elif not 0 < nbytes <= MAX_VALUE_BYTES:
                states[index] = "failed"
            elif not room.take(put.key, nbytes):
                states[index] = "full"
            else:
                writings.append(Writing(index, put, nbytes))
        jobs = [self._writers.submit(self._write, batch) for batch in _batches(writings)]
        try:
            for job in jobs:
                states.update(job.result())
        finally:
            _stop(jobs)
        return [states[index] for index in range(len(puts))]

    def list(self, prefix: str) -> Iterator[Listed]:
        """A key may come twice where the server's table changes its size meanwhile."""
        for keys in self._client.scan(prefix):
            for key, size in zip(keys, self._client.sizes(keys), strict=True):
                if size > 0:
                    yield Listed(key, size)

    def close(self) -> None:
        self._client.close()
        self._readers.shutdown()
        self._writers.shutdown()

    def _read(self, batch: Sequence[Reading]) -> Sequence[Got]:
        if len(batch) == 1:
            return [self._read_pieces(batch[0])]
        strings = self._client.strings([(job.get.key, job.nbytes) for job in batch])
        answers = []
        for (index, get, nbytes), string in zip(batch, strings, strict=True):
            get.buffer[: len(string)] = string
            answers.append(_got(index, nbytes, len(string)))
        return answers

    def _read_pieces(self, job: Reading) -> Got:
        index, get, nbytes = job
        done = 0
        while done < nbytes:
            piece = self._client.range(get.key, done, min(done + PIECE_BYTES, nbytes))
            if not piece:
                break
            get.buffer[done : done + len(piece)] = piece
            done += len(piece)
        return _got(index, nbytes, done)

    def _write(self, batch: Sequence[Writing]) -> dict[int, PutState]:
        values = [(job.put.key, Value(job.put.buffers), job.put.replace) for job in batch]
        states = self._client.set(values, self._ttl_seconds)
        return {job.number: state for job, state in zip(batch, states, strict=True)}


def _got(index: int, nbytes: int, done: int) -> Got:
    return Got(index, nbytes) if done == nbytes else Got(index, None, "cut short")


def _batches(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs in lists of at most PAGE_KEYS and PIECE_BYTES, or of one."""
    batches: list[list[Job]] = []
    room = 0
    for job in jobs:
        if job.nbytes > room or len(batches[-1]) == PAGE_KEYS:
            batches.append([])
            room = PIECE_BYTES
        batches[-1].append(job)
        room -= job.nbytes
    return batches


def _stop(jobs: Sequence[Future[Any]]) -> None:
    """Nobody reads or writes buffers that were given back."""
    for job in jobs:
        job.cancel()
    wait(jobs)
