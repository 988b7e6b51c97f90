"""Layouts: grouping, sizes, canonical JSON."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdb.errors import UsageError
from kvdb.layout import DTYPES, LayerSpec, Layout, TensorSpec
from tests.support import MIXED, PLAIN, kv_layer, part_arrays, random_tokens

TENSORS = st.builds(
    TensorSpec,
    st.sampled_from(["keys", "values", "x"]),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from([None, 0, 1]),
)
LAYERS = st.builds(
    LayerSpec,
    st.sampled_from(["KVCache", "Other"]),
    st.lists(TENSORS, min_size=1, max_size=3).map(tuple),
    st.sampled_from(["kv", "state"]),
    st.booleans(),
    st.sampled_from([(), (("window", 8),), (("rope", None), ("scale", 0.5))]),
)
LAYOUTS = st.builds(Layout, st.lists(LAYERS, min_size=1, max_size=5).map(tuple), st.none())


@given(LAYOUTS)
def test_json_round_trips_and_is_canonical(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.to_json() == layout.to_json()


@given(LAYOUTS, st.integers(1, 20))
def test_views_invert_pack(layout: Layout, tokens: int) -> None:
    for spec in layout.parts:
        raw = np.random.default_rng(0).integers(0, 255, spec.nbytes(tokens), dtype=np.uint8)
        assert spec.pack(spec.views(raw, tokens)).tobytes() == raw.tobytes()


def test_equal_layers_form_one_part() -> None:
    assert [(part.name, part.layers) for part in MIXED.parts] == [
        ("kv:0", (0, 2)),
        ("state:1", (1,)),
        ("kv:2", (3,)),
        ("logits", (0,)),
    ]
    assert MIXED.required == ("kv:0", "kv:2")
    assert not MIXED.cuttable
    assert PLAIN.cuttable


def test_bytes_are_those_of_the_arrays() -> None:
    spec = PLAIN.by_name["kv:0"]
    arrays = part_arrays(spec, random_tokens(1, 10), 0, 10)
    assert spec.nbytes(10) == sum(array.nbytes for layer in arrays for array in layer)
    assert spec.stacked(10) == ("F32", (2, 2, 1, 2, 10, 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorSpec("k", "F33", (1,), 0),
        lambda: TensorSpec("k", "F32", (0,), 0),
        lambda: TensorSpec("k", "F32", (1,), 2),
        lambda: Layout(()),
        lambda: Layout((LayerSpec("KVCache", ()),)),
        lambda: Layout.from_json("{}"),
        lambda: Layout.from_json("[1"),
        lambda: Layout.from_json(Layout((kv_layer(),)).to_json().replace("[0]", "[7]")),
    ],
)
def test_bad_layouts_are_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]
