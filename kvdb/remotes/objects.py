"""Object storage as a remote: S3 and its kin, Google Cloud Storage, Azure Blob, by ``obstore``.

One thread with an event loop per remote runs all requests, so that each can be given up when its
time is over. An object comes in pieces, each copied into its place in the buffer that was given.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import groupby
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import obstore

from kvdb.remotes.objecterrors import Refusals, absent, bucket_missing, taken, unsupported
from kvdb.remotes.remote import Get, Got, Listed, Put, PutState, RemoteError, RemoteUnreachable

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ObjectStore

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Page: TypeAlias = "Sequence[ObjectMeta]"

GETS, PUTS, HEADS = 8, 4, 32  # requests at a time
CHUNK = 1 << 20  # bytes copied at a time
PAGE = 1000  # keys that a server lists at a time
# A page takes a server about as long as this many questions for one key, asked HEADS at a time.
PAGE_WORTH = 32
PROBE = "v1/probe"  # never put
CLOSE_SECONDS = 5.0


class ObjectsRemote:
    """See :class:`kvdb.remotes.remote.Remote`. No request for one object lasts longer than
    ``seconds``; after one that did, or that found nobody, the rest of its call is given up."""

    def __init__(self, store: ObjectStore, refusals: Refusals, seconds: float) -> None:
        self._store = store
        self._refusals = refusals
        self._seconds = seconds
        self._conditional = True  # until the server says that it has no conditional put
        self._open, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="kvdb-objects", daemon=True)
        self._thread.start()

    def probe(self) -> None:
        """One round trip. Raises RemoteError where the bucket is not there or does not let us in;
        asked for an object, a server says which of both is missing."""
        self._run(self._probe())

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        there = self._run(self._existing(set(keys))) if keys else set()
        return [key in there for key in keys]

    def get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        answers: SimpleQueue[Got | None] = SimpleQueue()
        tasks: list[asyncio.Task[None]] = []

        async def one(item: tuple[int, Get]) -> None:
            answers.put(await self._get(*item))

        def begin() -> None:
            task = self._loop.create_task(_spread(one, list(enumerate(gets)), GETS))
            task.add_done_callback(lambda _: answers.put(None))
            tasks.append(task)

        if not gets:
            return
        self._ask(begin)
        over = False
        try:
            while (answer := answers.get()) is not None:
                yield answer
            over = True
            tasks[0].result()
        except asyncio.CancelledError:
            raise RemoteUnreachable(f"{self._refusals.place} was closed.") from None
        finally:
            # The buffers are the caller's again, so nothing may write to them after this.
            if not over:
                with suppress(RemoteUnreachable):
                    self._ask(lambda: [task.cancel() for task in tasks])
                while answers.get() is not None:
                    pass

    def put_many(self, puts: Sequence[Put]) -> list[PutState]:
        return [*self._run(self._put_all(puts))] if puts else []

    def list(self, prefix: str) -> Iterator[Listed]:
        # obstore takes whole folders only.
        folder = prefix[: prefix.rfind("/") + 1]
        pages = self._pages(folder)

        async def turn() -> Page | None:
            return await anext(pages, None)

        while (page := self._run(turn())) is not None:
            for meta in page:
                if meta["path"].startswith(prefix):
                    yield Listed(meta["path"], meta["size"])

    def close(self) -> None:
        with self._open:
            if not self._closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._closed = True
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_give_up_all())
        self._loop.close()

    def _ask(self, work: Callable[[], object]) -> None:
        """Have the loop's thread do something soon."""
        with self._open:
            if self._closed:
                raise RemoteUnreachable(f"{self._refusals.place} was closed.")
            self._loop.call_soon_threadsafe(work)

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        with self._open:
            future = None if self._closed else asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            if future is not None:
                return future.result()
        except CancelledError:
            pass
        work.close()
        raise RemoteUnreachable(f"{self._refusals.place} was closed.") from None

    async def _in_time(self, request: Awaitable[Answer]) -> Answer:
        """Raises RemoteUnreachable when it is not done in time; what the request raises."""
        try:
            async with asyncio.timeout(self._seconds):
                return await request
        except TimeoutError:
            raise self._refusals.late(self._seconds) from None

    async def _probe(self) -> None:
        try:
            await self._in_time(obstore.get_async(self._store, PROBE))
        except self._refusals.errors as error:
            if bucket_missing(error) or not absent(error):
                raise self._refusals.whole(error) from None

    async def _existing(self, keys: set[str]) -> set[str]:
        """Those that are there. Where many are asked, pages of the listing are read for as long as
        each tells more than asking one by one would; the others are asked one by one."""
        there: set[str] = set()
        alone: list[str] = []

        async def ask(key: str) -> None:
            try:
                await self._in_time(obstore.head_async(self._store, key))
            except self._refusals.errors as error:
                if not absent(error):
                    raise self._refusals.whole(error) from None
            else:
                there.add(key)

        for folder, group in groupby(sorted(keys), lambda key: key.rpartition("/")[0]):
            alone += await self._existing_by_page(folder + "/", list(group), there)
        await _spread(ask, alone, HEADS)
        return there

    async def _existing_by_page(
        self, folder: str, keys: Sequence[str], there: set[str]
    ) -> Sequence[str]:
        """Add to ``there`` what pages show of these sorted keys of one folder; returns those of
        which they do not tell."""
        if len(keys) < PAGE_WORTH:
            return keys
        last = ""
        pages = self._pages(folder, after=keys[0][:-1])
        while (page := await anext(pages, None)) is not None:
            names = [meta["path"] for meta in page]
            if names != sorted(names) or names[0] <= last:  # some servers list in no order
                return keys
            there.update(set(names).intersection(keys))
            last = names[-1]
            told = sum(key <= last for key in keys)
            keys = keys[told:]
            if len(page) < PAGE:  # the last one
                break
            if not keys or told < PAGE_WORTH:
                return keys
        return []

    async def _pages(self, folder: str, after: str | None = None) -> AsyncIterator[Page]:
        """Objects in a folder and below it, in the server's pages, none empty."""
        pages: ListStream[Page] = obstore.list(
            self._store, folder or None, offset=after, chunk_size=PAGE
        )
        try:
            while True:
                page = await self._in_time(pages.__anext__())  # theirs cannot take a default
                if page:
                    yield page
        except StopAsyncIteration:
            return
        except self._refusals.errors as error:
            raise self._refusals.whole(error) from None
        finally:
            del pages  # its connection ends with it, not with the traceback

    async def _get(self, index: int, get: Get) -> Got:
        found = stream = None
        try:
            async with asyncio.timeout(self._seconds):
                found = await obstore.get_async(self._store, get.key)
                size = found.meta["size"]
                if size > get.buffer.nbytes:
                    return Got(index, None, "too large")
                done, stream = 0, found.stream(CHUNK)
                async for chunk in stream:
                    if done + len(chunk) > size:
                        return Got(index, None, "longer than announced")
                    get.buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
                return Got(index, size) if done == size else Got(index, None, "cut short")
        except TimeoutError:
            raise self._refusals.late(self._seconds) from None
        except self._refusals.errors as error:
            if found is not None:
                return Got(index, None, "cut short")
            if absent(error) and not bucket_missing(error):
                return Got(index, None)
            return Got(index, None, self._refusals.of_one(error))
        finally:
            del found, stream  # their connection ends with them, not with a traceback

    async def _put_all(self, puts: Sequence[Put]) -> Sequence[PutState]:
        there = await self._existing({put.key for put in puts if not put.replace})
        states: dict[int, PutState] = dict.fromkeys(range(len(puts)), "present")
        lacking = [i for i, put in enumerate(puts) if put.replace or put.key not in there]

        async def one(index: int) -> None:
            states[index] = await self._put(puts[index])

        await _spread(one, lacking, PUTS)
        return tuple(states.values())

    async def _put(self, put: Put) -> PutState:
        create = self._conditional and not put.replace
        try:
            await self._in_time(
                obstore.put_async(
                    self._store,
                    put.key,
                    put.buffers,
                    mode="create" if create else "overwrite",
                    use_multipart=False,  # one request: whole or not at all, no parts left behind
                )
            )
        except self._refusals.errors as error:
            if create and unsupported(error):
                self._conditional = False
                return await self._put(put)
            if create and taken(error):
                return "present"
            return self._refusals.of_put(error)
        return "stored"


async def _give_up_all() -> None:
    await asyncio.sleep(0)  # what was asked for just now begins
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _spread(
    work: Callable[[Item], Awaitable[None]], items: Sequence[Item], at_a_time: int
) -> None:
    """Work on all items, some at a time; the first RemoteError ends it all."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_a_time, len(items))):
                group.create_task(worker())
    except* RemoteError as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
