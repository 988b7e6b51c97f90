"""What a block's parts look like: tensors, layers, groups, bytes.

A layout lists the cache of every layer. Layers that are equal in kind, tensors and dtype form a
group, and a group is one *part* of a block: stored, checksummed and evicted on its own. The raw
bytes of a part are, for each of its layers, for each of the layer's tensors, the C-order bytes
with the token axis cut to the block's token count.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvdb.errors import UsageError

PartKind = Literal["kv", "state", "logits"]

# safetensors dtype name → numpy dtype of the same width. bfloat16 and float8 travel as bits.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one layer. ``shape`` leaves the token axis out; ``token_axis`` says where it
    goes in the full shape, or is None for a tensor that does not grow with tokens.

    ``TensorSpec("keys", "F32", (1, 3, 64), 2)`` is an array of shape ``(1, 3, tokens, 64)``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    token_axis: int | None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"Unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}.")
        if any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise UsageError(f"Tensor {self.name!r} has a dimension below 1: {self.shape}.")
        if self.token_axis is not None and not 0 <= self.token_axis <= len(self.shape):
            raise UsageError(f"Tensor {self.name!r} has no axis {self.token_axis}.")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    def full_shape(self, tokens: int) -> tuple[int, ...]:
        """The shape of this tensor over ``tokens`` tokens."""
        if self.token_axis is None:
            return self.shape
        return (*self.shape[: self.token_axis], tokens, *self.shape[self.token_axis :])

    def nbytes(self, tokens: int) -> int:
        """Bytes of this tensor over ``tokens`` tokens."""
        per_token = math.prod(self.shape) * self.numpy_dtype.itemsize
        return per_token * (1 if self.token_axis is None else tokens)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one layer. ``kind`` names the cache class; ``attributes`` hold what changes the
    meaning of the bytes without changing their shape (bits, group size, window, rope).

    A layer with a ``window`` looks at that many tokens back and no further; one of kind ``state``
    holds what all tokens up to a block's end come to. Neither is required: a block without them
    is whole, it only cannot be where a restore ends."""

    kind: str
    tensors: tuple[TensorSpec, ...]
    part_kind: PartKind = "kv"
    required: bool = True
    attributes: tuple[tuple[str, str | int | float | bool | None], ...] = ()

    @property
    def window(self) -> int | None:
        """Tokens that a sliding layer looks back at; None for one that sees all."""
        window = dict(self.attributes).get("window")
        return window if isinstance(window, int) else None


# The last layer of a layout without full attention: token ids, so that every block has a part that
# says it is there, whatever else of it is dropped or was never cut.
TOKEN_MARK = LayerSpec("Tokens", (TensorSpec("ids", "U32", (1,), 1),))


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A separately stored piece of a block: ``kv:0``, ``state:1``, ``logits``."""

    name: str
    kind: PartKind
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    required: bool
    window: int | None = None

    def nbytes(self, tokens: int) -> int:
        """Raw bytes of this part in a block of ``tokens`` tokens."""
        return len(self.layers) * sum(tensor.nbytes(tokens) for tensor in self.tensors)

    @property
    def is_mark(self) -> bool:
        """True for the token ids that stand in for full attention (see TOKEN_MARK)."""
        return self.tensors == TOKEN_MARK.tensors

    @property
    def sees_all(self) -> bool:
        """True for full attention: every token before a restore's end is needed."""
        return self.kind == "kv" and self.window is None and not self.is_mark

    @property
    def cuttable(self) -> bool:
        """True when every tensor has a token axis, so a prefix of the part is a valid part."""
        return all(tensor.token_axis is not None for tensor in self.tensors)

    def views(self, raw: npt.NDArray[np.uint8], tokens: int) -> list[list[npt.NDArray[Any]]]:
        """The part's bytes as arrays: per layer, per tensor, shape ``full_shape(tokens)``."""
        position = 0
        layers: list[list[npt.NDArray[Any]]] = []
        for _ in self.layers:
            arrays: list[npt.NDArray[Any]] = []
            for tensor in self.tensors:
                nbytes = tensor.nbytes(tokens)
                flat = raw[position : position + nbytes].view(tensor.numpy_dtype)
                arrays.append(flat.reshape(tensor.full_shape(tokens)))
                position += nbytes
            layers.append(arrays)
        return layers

    def pack(self, layers: Sequence[Sequence[npt.NDArray[Any]]]) -> npt.NDArray[np.uint8]:
        """Invert :meth:`views`: one contiguous copy of all arrays' bytes."""
        flat = [
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for layer in layers
            for array in layer
        ]
        return np.concatenate(flat)

    def stacked(self, tokens: int) -> tuple[str, tuple[int, ...]] | None:
        """``(dtype, shape)`` of the part as one tensor ``[layers, tensors, …]``, or None when its
        tensors differ in dtype or shape and it can only be called bytes."""
        first = self.tensors[0]
        if any(
            (t.dtype, t.shape, t.token_axis) != (first.dtype, first.shape, first.token_axis)
            for t in self.tensors
        ):
            return None
        return first.dtype, (len(self.layers), len(self.tensors), *first.full_shape(tokens))


@dataclass(frozen=True)
class Layout:
    """The cache of every layer of a model, and the shape of its logits when they are stored."""

    layers: tuple[LayerSpec, ...]
    logits: TensorSpec | None = field(default=None)

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError("A layout needs at least one layer.")
        if any(not layer.tensors for layer in self.layers):
            raise UsageError("Every layer of a layout needs at least one tensor.")

    @cached_property
    def parts(self) -> tuple[PartSpec, ...]:
        """Groups of equal layers in order of first appearance, then the logits."""
        groups: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(layer, []).append(index)
        parts = [
            PartSpec(
                f"{layer.part_kind}:{n}",
                layer.part_kind,
                tuple(indices),
                layer.tensors,
                layer.required,
                layer.window,
            )
            for n, (layer, indices) in enumerate(groups.items())
        ]
        if self.logits is not None:
            parts.append(PartSpec("logits", "logits", (0,), (self.logits,), required=False))
        return tuple(parts)

    @cached_property
    def by_name(self) -> dict[str, PartSpec]:
        return {part.name: part for part in self.parts}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of :meth:`to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def required(self) -> tuple[str, ...]:
        """Names of the parts without which a block is not live."""
        return tuple(part.name for part in self.parts if part.required)

    @cached_property
    def windows(self) -> dict[str, int]:
        """Parts of sliding layers, and how many tokens before a restore's end each needs."""
        return {part.name: part.window for part in self.parts if part.window is not None}

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Parts of recurrent layers: a restore ends only where all of them are stored."""
        return tuple(part.name for part in self.parts if part.kind == "state")

    @property
    def cuttable(self) -> bool:
        """True when a block's first k tokens can be served from it (no recurrent state)."""
        return all(part.cuttable for part in self.parts if part.kind != "logits")

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text. Equal layers are written once."""
        kinds: list[LayerSpec] = list(dict.fromkeys(self.layers))
        document = {
            "kinds": [_layer_document(kind) for kind in kinds],
            "layers": [kinds.index(layer) for layer in self.layers],
            "logits": None if self.logits is None else _tensor_document(self.logits),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Parse :meth:`to_json`. Raises UsageError on anything else."""
        try:
            document = json.loads(text)
            kinds = [_layer(kind) for kind in document["kinds"]]
            logits = document["logits"]
            return cls(
                tuple(kinds[index] for index in document["layers"]),
                None if logits is None else _tensor(logits),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(f"Not a cache layout: {error}.") from error


def _tensor_document(tensor: TensorSpec) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "token_axis": tensor.token_axis,
    }


def _layer_document(layer: LayerSpec) -> dict[str, Any]:
    # dataclasses.asdict takes ten times as long, and each shard's header is read by way of this.
    return {
        "kind": layer.kind,
        "tensors": [_tensor_document(tensor) for tensor in layer.tensors],
        "part_kind": layer.part_kind,
        "required": layer.required,
        "attributes": layer.attributes,
    }


def _tensor(document: dict[str, Any]) -> TensorSpec:
    return TensorSpec(
        document["name"], document["dtype"], tuple(document["shape"]), document["token_axis"]
    )


def _layer(document: dict[str, Any]) -> LayerSpec:
    return LayerSpec(
        document["kind"],
        tuple(_tensor(tensor) for tensor in document["tensors"]),
        document["part_kind"],
        document["required"],
        tuple((key, value) for key, value in document["attributes"]),
    )
