"""What is stored here goes to a remote, behind requests: one thread, one bounded queue."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvdb import index
from kvdb.driver import Connection
from kvdb.errors import KvdbError
from kvdb.members import read_member
from kvdb.remotes.naming import BlockKey
from kvdb.remotes.packing import keys_of, pack
from kvdb.remotes.peer import Peer
from kvdb.remotes.remote import Put
from kvdb.shards import NamespaceRecord

if TYPE_CHECKING:
    from kvdb.store import Store

log = logging.getLogger("kvdb.remotes")

MAX_QUEUED = 4096
BATCH_BLOCKS = 32
BATCH_BYTES = 32 << 20


class Behind:
    """The queue of one remote. When it is full, what is new is dropped: kvdb sync catches up."""

    def __init__(self, store: Store, peer: Peer, most: int = MAX_QUEUED) -> None:
        self._store = store
        self._peer = peer
        self._most = most
        self._queue: OrderedDict[bytes, None] = OrderedDict()  # hashes
        self._taken: Sequence[bytes] = ()
        self._closing = False
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._records: dict[int, NamespaceRecord] = {}

    def add(self, hashes: Iterable[bytes]) -> None:
        dropped = 0
        with self._condition:
            for hash_ in hashes:
                if len(self._queue) < self._most or hash_ in self._queue:
                    self._queue[hash_] = None
                else:
                    dropped += 1
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(
                    target=self._run, name=f"kvdb-behind-{self._peer.name}", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()
        if dropped:
            self._peer.counters.add("dropped", dropped)

    def flush(self, seconds: float) -> bool:
        """Wait until all that was queued is there or dropped; False on time-out."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._left(), seconds)

    def close(self, seconds: float) -> int:
        """Go on for so long at most, unless the remote is down; returns how many blocks are left,
        which are dropped."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._left() or self._down_seconds > 0, seconds)
            left = self._left()
            self._queue.clear()
            self._condition.notify_all()
        if left:
            self._peer.counters.add("dropped", left)
        return left

    @property
    def _down_seconds(self) -> float:
        return self._peer.down_seconds("ask", "put")

    def _left(self) -> int:
        return len(self._queue) + len(self._taken)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._taken = ()
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._queue or self._closing)
                down = self._down_seconds
                if down and self._queue and not self._closing:
                    self._condition.wait(down)
                    continue
                if not self._queue or down:
                    return
                self._taken = [
                    self._queue.popitem(last=False)[0]
                    for _ in range(min(BATCH_BLOCKS, len(self._queue)))
                ]
            try:
                self._push(self._taken)
                self._peer.changed()
            except Exception as error:  # the border of the thread; the peer has counted it
                if isinstance(error, KvdbError | OSError) and self._down_seconds:
                    self._again(self._taken)
                else:
                    log.warning("not shared with %s: %s", self._peer.name, error)
                    self._peer.counters.add("dropped", len(self._taken))

    def _again(self, hashes: Sequence[bytes]) -> None:
        with self._condition:
            for hash_ in reversed(hashes):
                self._queue[hash_] = None
                self._queue.move_to_end(hash_, last=False)

    def _push(self, hashes: Sequence[bytes]) -> None:
        peer = self._peer
        wanted: dict[int, tuple[NamespaceRecord, list[BlockKey]]] = {}
        with self._store.database.read() as connection:
            for hash_ in hashes:
                row = index.find_block(connection, hash_)
                if row is None or row.state != "live":
                    continue  # evicted meanwhile
                record = self._record(connection, row.namespace_id)
                if peer.serves(record):
                    parts = [part for part, *_ in connection.execute(index.BLOCK_PARTS, (row.id,))]
                    wanted[row.id] = record, keys_of(hash_, row.depth, parts, record)
        keys = [str(key) for _, own in wanted.values() for key in own]
        present = dict(zip(keys, peer.exists(keys), strict=True)) if keys else {}
        puts: list[Put] = []
        nbytes = 0
        for id_, (record, own) in wanted.items():
            missing = {str(key) for key in own if not present[str(key)]}
            peer.counters.add("present", len(own) - len(missing))
            if not missing:
                continue
            peer.describe(record)
            member = read_member(self._store, record, id_)
            for key, buffers in [] if member is None else pack(member):
                if str(key) in missing:
                    puts.append(Put(str(key), buffers, peer.is_bad(str(key))))
                    nbytes += sum(buffer.nbytes for buffer in buffers)
            if nbytes >= BATCH_BYTES:
                self._put(puts)
                puts, nbytes = [], 0
        if puts:
            self._put(puts)

    def _record(self, connection: Connection, namespace_id: int) -> NamespaceRecord:
        if namespace_id not in self._records:
            self._records[namespace_id] = index.namespace_record(connection, namespace_id)
        return self._records[namespace_id]

    def _put(self, puts: Sequence[Put]) -> None:
        peer = self._peer
        with peer.watched("put") as remote:
            states = remote.put_many(puts)
        for put, state in zip(puts, states, strict=True):
            if state in ("stored", "present"):
                peer.replaced(put.key)
            if state == "stored":
                peer.counters.add("put")
                peer.counters.add("put_bytes", sum(buffer.nbytes for buffer in put.buffers))
            elif state == "present":
                peer.counters.add("present")
            else:
                peer.counters.add("dropped" if state == "full" else "failed")
