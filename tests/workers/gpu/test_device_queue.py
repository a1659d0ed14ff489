"""Several arrays are copied to a device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.workers.gpu.model import device_queue
from tokenbus.workers.gpu.model.device_queue import ALIGNMENT, together_on_device

ARRAYS = st.lists(
    st.tuples(
        st.sampled_from([np.int32, np.int64]),
        st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(1, 3))),
    ),
    min_size=1,
    max_size=6,
)


@given(ARRAYS)
def test_arrays_of_one_copy_keep_their_values_shapes_and_types(
    shapes: list[tuple[type, tuple[int, ...]]],
) -> None:
    rng = np.random.default_rng(0)
    arrays: list[np.ndarray] = [
        rng.integers(-(2**31), 2**31 - 1, shape).astype(kind) for kind, shape in shapes
    ]
    copies: list[torch.Tensor] = []

    def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
        copies.append(torch.from_numpy(values))
        return copies[-1]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(device_queue, "on_device", on_device)
        found = together_on_device(arrays, torch.device("cuda"))
    assert len(copies) == 1
    for tensor, array in zip(found, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.is_contiguous()
        if array.size:
            assert (tensor.data_ptr() - copies[0].data_ptr()) % ALIGNMENT == 0
