"""Puts the state of one request into the store, block by block, as soon as it exists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from engine.boundaries import Boundaries
from engine.cachekinds import Bytes
from engine.live import LiveState
from engine.storage import Storage
from kvdb.identity import Tokens
from kvdb.layout import PartSpec
from kvdb.writer import Payload, Ticket

if TYPE_CHECKING:
    from kvdb.sequences import Sequence as Running


class Recorder:
    """Told of every forward, it cuts what became whole. ``known`` are the ends of blocks that the
    store has already; ``tickets`` are those of its puts.

    Full attention is cut when a block is whole. A sliding layer forgets: its tokens are cut after
    each forward, and the pieces of a block that is not whole yet wait here. States are cut where
    ``boundaries`` say so and the caches stand there. ``before`` is called before a block is put.
    """

    def __init__(
        self,
        storage: Storage,
        live: LiveState,
        boundaries: Boundaries,
        known: Collection[int],
        *,
        exact: bool,
        running: Running | None,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._storage = storage
        self._before = before
        self._live = live
        self._boundaries = boundaries
        self._known = set(known)
        self._exact = exact
        self._running = running
        self.tickets: list[Ticket] = []  # of all puts
        parts = live.parts
        self._sliding = [part for part in parts if part.window is not None]
        self._states = [part for part in parts if part.kind == "state"]
        self._pieces: dict[str, list[Bytes]] = {}
        self._pieces_end = 0

    def forked(self, live: LiveState, running: Running | None) -> Recorder:
        """Of another sequence that goes on from here: what is known is the same."""
        other = copy.copy(self)
        other._live, other._running = live, running
        other._known = set(self._known)
        other._pieces = {name: list(pieces) for name, pieces in self._pieces.items()}
        return other

    @property
    def patience(self) -> int:
        """How many single tokens may be forwarded before they must be told."""
        windows = [part.window for part in self._sliding if part.window is not None]
        return min([self._storage.block_tokens, *windows])

    def resume(self, position: int, pieces: dict[str, Bytes]) -> None:
        """The caches were placed at ``position``; of the block there, sliding layers' tokens up
        to it are ``pieces``."""
        self._pieces = {name: [piece] for name, piece in pieces.items()}
        self._pieces_end = position

    def feed(
        self,
        tokens: Tokens,
        start: int,
        end: int,
        *,
        tail: bool = False,
        logits: Bytes | None = None,
        decoded: bool = False,
    ) -> None:
        """Tokens ``start`` to ``end`` were forwarded, and the caches stand at ``end``.

        Puts the blocks that are whole now. With ``tail``, or at a boundary, also the short block
        that ends at ``end``, with its state, and the ``logits`` of its last token.
        """
        size = self._storage.block_tokens
        exact = self._exact and not decoded
        tail = tail or end in self._boundaries
        run: list[Payload] = []
        last = 0
        for block in range(min(start, end - 1) // size, -(-end // size)):
            stop = min((block + 1) * size, end)
            whole = stop == (block + 1) * size
            parts: dict[str, Bytes] = {}
            self._slide(max(start, block * size), stop)
            if (whole or tail) and stop not in self._known:
                parts |= self._cut(tokens, block * size, stop) | self._slid()
                self._known.add(stop)
            if stop == end and tail:
                parts |= self._cut_states(end)
                if logits is not None:
                    parts["logits"] = logits
            if parts:
                run.append(Payload(block, parts))
                last = stop
            else:
                self._flush(tokens[:last], run, exact, decoded)
        self._flush(tokens[:last], run, exact, decoded)

    def keep_state(self, tokens: Tokens, position: int) -> None:
        """Keep the state at ``position``, where the work ends before it is done."""
        block = (position - 1) // self._storage.block_tokens
        parts = self._cut_states(position)
        if parts and position in self._known:
            self._flush(tokens[:position], [Payload(block, parts)], self._exact, False)

    def _cut(self, tokens: Tokens, start: int, end: int) -> dict[str, Bytes]:
        parts = {}
        for part in self._live.parts:
            if part.sees_all:
                parts[part.name] = self._live.cut(part, start, end)
            elif part.is_mark:
                parts[part.name] = np.array(tokens[start:end]).view(np.uint8)
        return parts

    def _cut_states(self, position: int) -> dict[str, Bytes]:
        return {part.name: self._live.cut(part, position, position) for part in self._states}

    def _slide(self, start: int, end: int) -> None:
        """Cut what sliding layers have of ``start`` to ``end``, tokens of one block, to the pieces
        of what comes before them in it."""
        size = self._storage.block_tokens
        if start == (end - 1) // size * size:
            self._pieces = {part.name: [] for part in self._sliding}
        elif start != self._pieces_end:
            self._pieces = {}  # the block's beginning was never here
        for part in self._sliding:
            if start < end and part.name in self._pieces:
                self._pieces[part.name].append(self._live.cut(part, start, end))
        self._pieces_end = end

    def _slid(self) -> dict[str, Bytes]:
        """The tokens of the last cut's block up to its end, by part; the pieces become one."""
        for part in self._sliding:
            pieces = self._pieces.get(part.name, [])
            if len(pieces) > 1:
                pieces[:] = [_joined(part, pieces)]
        return {name: pieces[0] for name, pieces in self._pieces.items()}

    def _flush(self, tokens: Tokens, run: list[Payload], exact: bool, decoded: bool) -> None:
        if run:
            self._before(run[0].index)
            ticket = self._storage.put(
                tokens,
                list(run),
                origin="decode" if decoded else "prefill",
                exact=exact,
                advance=self._running,
            )
            if ticket is not None:
                self.tickets.append(ticket)
            run.clear()


def _joined(part: PartSpec, pieces: list[Bytes]) -> Bytes:
    """Pieces of a part along its tokens as one."""
    per_token = part.nbytes(1)
    views = [part.views(piece, piece.nbytes // per_token) for piece in pieces]
    return part.pack(
        [
            [
                np.concatenate([view[layer][number] for view in views], axis=spec.token_axis)
                for number, spec in enumerate(part.tensors)
            ]
            for layer in range(len(part.layers))
        ]
    )
