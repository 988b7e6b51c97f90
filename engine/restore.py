"""Parts → live caches: buffers with headroom that the store reads into, then caches around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine import mlxlm
from engine.cachekinds import Bytes, numpy_view
from engine.live import LiveState
from engine.memory import unwritten
from engine.plan import Jump, Plan
from kvdb.layout import Layout, PartSpec, TensorSpec
from kvdb.restore import Want

if TYPE_CHECKING:
    from engine.storage import Read, Storage
    from kvdb.match import Match

# Room for this many generated tokens at most; beyond it caches grow as mlx-lm's do. More would be
# zeroed for every request, though most end sooner.
MAX_HEADROOM = mlxlm.GROWTH


def capacity_for(prompt: int, max_tokens: int) -> int:
    """Tokens to allocate: an exactly full cache would be copied whole at its first append."""
    wanted = prompt + min(max_tokens, MAX_HEADROOM)
    return -(-wanted // mlxlm.GROWTH) * mlxlm.GROWTH


class PartMemory:
    """Memory for ``tokens`` tokens of one part, from token ``first`` of the prompt on.

    On a CPU and in unified memory ``views`` are MLX's own memory, so that the store's ``preadv``
    lands in its final place. Elsewhere they are host arrays, moved by :meth:`arrays`.
    """

    def __init__(self, part: PartSpec, first: int, tokens: int) -> None:
        self.part = part
        self.first = first
        self._arrays: list[mx.array] = []
        specs = [spec for _ in part.layers for spec in part.tensors]
        if mlxlm.host_memory():
            self._arrays = unwritten(specs, tokens)
            flat = [numpy_view(array) for array in self._arrays]
        else:
            flat = [np.zeros(spec.full_shape(tokens), spec.numpy_dtype) for spec in specs]
        width = len(part.tensors)
        self.views: list[list[npt.NDArray[Any]]] = [
            flat[at : at + width] for at in range(0, len(flat), width)
        ]

    def arrays(self) -> dict[int, Sequence[mx.array]]:
        """What was read, by layer. The views are dropped, since MLX would copy a buffer that is
        still viewed; call it once."""
        flat = self._arrays or [
            to_mlx(view, spec.dtype)
            for layer in self.views
            for view, spec in zip(layer, self.part.tensors, strict=True)
        ]
        self._arrays, self.views = [], []
        width = len(self.part.tensors)
        return {
            layer: flat[number * width : (number + 1) * width]
            for number, layer in enumerate(self.part.layers)
        }

    def piece(self, start: int, end: int) -> Bytes:
        """A copy of tokens ``start`` to ``end`` as the bytes of the part."""
        return self.part.pack(
            [
                [
                    np.take(view, range(start - self.first, end - self.first), spec.token_axis)
                    for view, spec in zip(layer, self.part.tensors, strict=True)
                ]
                for layer in self.views
            ]
        )


class Buffers:
    """Memory for what a plan restores: ``capacity`` tokens of full attention (unless it is kept
    elsewhere: not ``full``), and what sliding and recurrent layers need for each jump."""

    def __init__(self, layout: Layout, capacity: int, *, full: bool = True) -> None:
        self._layout = layout
        self._full = {
            part.name: PartMemory(part, 0, capacity)
            for part in layout.parts
            if full and part.sees_all
        }
        self._loaded: set[int] = set()
        self._jumps: dict[Jump, dict[str, PartMemory]] = {}

    @property
    def into(self) -> dict[str, list[list[npt.NDArray[Any]]]]:
        """The views of full attention by part."""
        return {name: memory.views for name, memory in self._full.items()}

    def wants(self, steps: Plan, match: Match) -> list[Want]:
        """What is to be read for a plan, but for what :meth:`fetch` has read before."""
        blocks = tuple(index for index in steps.reads if index not in self._loaded)
        shared = match.shared if steps.shared else None
        tail = 0 if shared is None else steps.start - shared.block.start
        wants = [
            Want(name, memory.views, blocks, 0, tail)
            for name, memory in self._full.items()
            if blocks or tail
        ]
        self._jumps = {}
        for jump in steps.steps:
            if isinstance(jump, Jump):
                wants += self._jump_wants(jump, match)
        return wants

    def fetch(self, storage: Storage, steps: Plan, match: Match) -> Read | None:
        """Read what a plan still needs, None where it needs nothing more. After a read that lost
        something another plan is due, which needs less."""
        wants = self.wants(steps, match)
        if not wants:
            return None
        read = storage.read(match, wants)
        self.loaded(steps, read)
        return read

    def loaded(self, steps: Plan, read: Read) -> None:
        """What a plan wants was read, but for what is lost."""
        lost = {index for index, _ in read.lost}
        self._loaded.update(index for index in steps.reads if index not in lost)

    def _jump_wants(self, jump: Jump, match: Match) -> list[Want]:
        memory = self._jumps.setdefault(jump, {})
        shared = match.shared if jump.shared else None
        tail = 0 if shared is None else jump.end - shared.block.start
        wants = []
        for name, blocks in jump.windows:
            first = match.blocks[blocks[0]].start if blocks else jump.end - tail
            end = jump.end if tail or not blocks else match.blocks[blocks[-1]].end
            memory[name] = PartMemory(self._layout.by_name[name], first, end - first)
            wants.append(Want(name, memory[name].views, blocks, first, tail))
        for name in self._layout.states:
            memory[name] = PartMemory(self._layout.by_name[name], 0, 0)
            state = () if jump.state is None else (jump.state,)
            wants.append(Want(name, memory[name].views, state, 0, tail))
        return wants

    def live(self, caches: Sequence[Any]) -> LiveState:
        """A live state over the memory of full attention, at token 0. Call it once."""
        live = LiveState(self._layout, caches)
        for memory in self._full.values():
            live.fill(memory.arrays())
        return live

    def jump(self, jump: Jump, live: LiveState, block_tokens: int) -> dict[str, Bytes]:
        """Place sliding and recurrent layers at the end of ``jump``. Returns the tokens that
        sliding layers have of the block which that lies in, by part. Once for each jump."""
        windows: dict[int, tuple[int, Sequence[mx.array]]] = {}
        states: dict[int, Sequence[mx.array]] = {}
        pieces: dict[str, Bytes] = {}
        begun = jump.end // block_tokens * block_tokens
        for name, memory in self._jumps.pop(jump).items():
            if memory.part.kind == "state":
                states.update(memory.arrays())
                continue
            if begun < jump.end:
                pieces[name] = memory.piece(begun, jump.end)
            for layer, arrays in memory.arrays().items():
                windows[layer] = (memory.first, arrays)
        live.place(jump.end, windows, states)
        return pieces


def to_mlx(array: npt.NDArray[Any], dtype: str) -> mx.array:
    """A copy in MLX's memory; bfloat16 comes as its bits."""
    moved = mx.array(array)
    return moved.view(mx.bfloat16) if dtype == "BF16" else moved


def logits_array(raw: npt.NDArray[np.uint8], spec: TensorSpec) -> mx.array:
    """Stored logits as the model gave them: ``(1, vocabulary)`` in its dtype."""
    return to_mlx(raw.view(spec.numpy_dtype).reshape(1, -1), spec.dtype)


def logits_bytes(logits: mx.array) -> npt.NDArray[np.uint8]:
    """A copy of the bytes of raw logits ``(1, vocabulary)``, the inverse of logits_array."""
    raw = np.array(logits.view(mx.uint16) if logits.dtype == mx.bfloat16 else logits)
    return raw.reshape(-1).view(np.uint8)
