"""Checkpoint files: the safetensors library reads tensors, and JSON keeps Python types."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.checkpoints import json_values, tensor_file
from refusals import refused


@given(st.data())
def test_the_library_reads_tensors_of_all_types_and_layouts(data) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    tensors = {}
    for index in range(data.draw(st.integers(0, 5))):
        dtype = data.draw(st.sampled_from(list(tensor_file._NAMES)))
        shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator)
        if dtype == torch.bool:
            bits %= 2
        tensor = bits.to(torch.uint8).view(dtype).reshape(shape)
        tensors[f"{data.draw(st.text())}/{index}"] = tensor.mT if tensor.dim() > 1 else tensor
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "file"
        with path.open("wb") as file:
            file.writelines(tensor_file.encoded(tensors))
        found = load_file(path)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        mine, other = (
            one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, found[name])
        )
        assert torch.equal(mine, other)


def test_a_tensor_of_several_pieces_is_written_whole(tmp_path: Path) -> None:
    large = torch.arange(3 * 2**20 // 8 + 5)
    with (tmp_path / "file").open("wb") as file:
        file.writelines(tensor_file.encoded({"large": large}))
    assert torch.equal(load_file(tmp_path / "file")["large"], large)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.just("$"), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_with_their_types(value) -> None:
    text = json_values.dumps("value", value)
    # repr distinguishes 1, 1.0 and True, and 0.0 and -0.0, and is equal for NaN.
    assert repr(json_values.loads(text)) == repr(value)
    json.loads(text, parse_constant=pytest.fail)  # standard JSON


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": [1, {2}]}, "it.a[1]"),
        ({"lr": torch.tensor(1.0)}, "it.lr"),
        ({(1, print): 1}, "it, key (1, <built-in function print>)[1]"),
        (torch.float32, "it"),
    ],
)
def test_values_that_json_cannot_hold_are_refused(value, field: str) -> None:
    with refused(field):
        json_values.dumps("it", value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"NaN", b'{"$": "set"}', b'{"$": "tuple"}', b'{"$": ["x"]}', b"[" * 10**5]
)
def test_other_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        json_values.loads(text)
