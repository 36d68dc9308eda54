"""Arrays of every dtype that torch has, from numpy and torch and back, without a copy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from codec_support import of_bytes, same_array

from streamrl.buffers.wire.dtypes import DTYPES, as_array, dtype_named, to_torch
from streamrl.errors import WireError

warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")

BYTES = bytes(range(3, 99)) * 2


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def example(dtype: str, shape: tuple[int, ...] = (2, 6)) -> np.ndarray:
    return of_bytes(BYTES[: int(np.prod(shape)) * DTYPES[dtype].itemsize], dtype, shape)


def test_every_dtype_of_torch_with_whole_bytes_has_a_name() -> None:
    every = {str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}
    parts_of_a_byte = {"int1", "int2", "int3", "int4", "int5", "int6", "int7", "float4_e2m1fn_x2"}
    parts_of_a_byte |= {"u" + name for name in parts_of_a_byte if name.startswith("int")}
    without_numbers = {name for name in every if name.startswith(("q", "bits"))}
    assert set(DTYPES) == every - parts_of_a_byte - without_numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_becomes_an_array_of_the_same_bits_in_the_same_memory(dtype: str) -> None:
    tensor = torch.tensor(list(BYTES[:96]), dtype=torch.uint8)
    tensor = (tensor % 2).bool() if dtype == "bool" else tensor.view(getattr(torch, dtype))
    array = as_array(tensor)
    assert array.dtype == DTYPES[dtype]
    assert array.tobytes() == bits(tensor)
    assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_becomes_a_tensor_of_the_same_bits_in_the_same_memory(dtype: str) -> None:
    array = example(dtype)
    tensor = to_torch(array)
    assert (tensor.dtype, tensor.shape) == (getattr(torch, dtype), (2, 6))
    assert bits(tensor) == array.tobytes()
    assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_arrays_keep_their_shape_both_ways(dtype: str, shape: tuple[int, ...]) -> None:
    array = example(dtype, shape)
    assert to_torch(array).shape == shape
    assert same_array(as_array(to_torch(array)), array)


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float8_e4m3fn"])
def test_a_transposed_tensor_is_not_copied_either(dtype: str) -> None:
    tensor = to_torch(example(dtype)).T
    array = as_array(tensor)
    assert array.shape == (6, 2)
    assert array.ctypes.data == tensor.data_ptr()
    assert array.tobytes() == bits(tensor)


def test_gradients_and_lazy_conjugates_are_resolved() -> None:
    assert as_array(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
    assert as_array(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    assert as_array(torch.tensor([1 + 2j]).conj().imag).tolist() == [-2.0]


def test_an_array_is_taken_as_it_is() -> None:
    array = np.arange(6).reshape(2, 3).T
    assert as_array(array) is array


def test_big_endian_values_are_turned_round() -> None:
    array = as_array(np.array([1, 258], dtype=">u2"))
    assert same_array(array, np.array([1, 258], dtype=np.uint16))


def test_numbers_become_arrays_without_dimensions() -> None:
    for value, dtype in ((True, "bool"), (3, "int64"), (0.5, "float64"), (1j, "complex128"), (np.int8(3), "int8")):
        array = as_array(value)
        assert (array.shape, array.dtype, array[()]) == ((), DTYPES[dtype], value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([object()]), "got dtype object"),
        (np.array(["text"]), "got dtype <U4; strings .* belong in the trajectory's metadata"),
        ("text", "got dtype <U4"),
        (np.zeros(1, dtype=[("a", "i4")]), "got dtype"),
        (np.array(["2026-01-01"], dtype="M8[s]"), "got dtype datetime64"),
        (np.zeros(1, dtype=np.longdouble), "got dtype"),
        ([[1], [1, 2]], "an array, got list"),
        (1 << 80, "got dtype object"),
        (torch.zeros([1] * 33), "at most 32 dimensions, got 33"),
        (torch.zeros(2, device="meta"), "got float32, torch.strided, on meta; use .cpu"),
        (torch.zeros(2, 2).to_sparse(), "got float32, torch.sparse_coo, on cpu; use .* .to_dense"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "got float4_e2m1fn_x2"),
    ],
)
def test_what_cannot_travel_is_refused_with_the_name_of_its_column(value: object, expected: str) -> None:
    with pytest.raises(WireError, match=f"column 'router': expected .*{expected}"):
        as_array(value, "router")  # type: ignore[arg-type]


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(WireError, match="column 'x': expected a dtype of bool, int8, .*, got 'object'"):
        dtype_named("object", "x")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_read_only_array_becomes_a_tensor_in_its_memory_without_a_warning(dtype: str) -> None:
    array = example(dtype)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = to_torch(array)
    assert tensor.data_ptr() == array.ctypes.data


def test_a_reversed_array_becomes_a_copy() -> None:
    assert to_torch(np.arange(3)[::-1]).tolist() == [2, 1, 0]
