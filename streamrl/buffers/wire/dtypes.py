"""Names of dtypes on the wire, and arrays from whatever producers hold: numpy arrays, torch CPU tensors, numbers.

Every dtype of torch that has whole bytes per value has a name here, the one that torch and numpy use: ``int32``,
``bfloat16``, ``float8_e4m3fn``. numpy has no bfloat16 and no 8-bit floats; ``ml_dtypes`` adds them. Values are
little-endian in memory and on the wire. Nothing here imports torch before a caller asks for a tensor.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from streamrl.errors import WireError

if TYPE_CHECKING:
    import torch

MAX_DIMENSIONS = 32
"""What numpy 1 allows; it also bounds the product of a hostile shape."""

FOREIGN = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
"""dtypes that numpy itself lacks: torch and numpy exchange them as integers of the same size."""

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
} | FOREIGN  # fmt: skip

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_array(value: ArrayLike | torch.Tensor, column: str = "") -> np.ndarray:
    """The value as a numpy array of one of ``DTYPES``, of any shape; ``column`` is what an error names.

    Not copied: numpy arrays in native byte order, and torch CPU tensors (detached, strides kept), so the result shares
    their memory. Numbers and nested lists become arrays as ``np.asarray`` makes them. Raises ``WireError`` for any
    other dtype (objects, strings, records), more than 32 dimensions, and tensors that are sparse or on a device.
    """
    array = value if type(value) is np.ndarray else _converted(value, column)
    if array.dtype not in NAMES:
        native = array.dtype.newbyteorder("=")
        if native not in NAMES:
            raise WireError(
                f"column {column[:40]!r}: expected an array of {', '.join(DTYPES)}, got dtype {str(array.dtype)[:80]}; "
                "strings and nested values belong in the trajectory's metadata"
            )
        array = array.astype(native)
    if array.ndim > MAX_DIMENSIONS:
        raise WireError(f"column {column[:40]!r}: expected at most {MAX_DIMENSIONS} dimensions, got {array.ndim}")
    return array


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor of the same dtype and shape that shares the array's memory; copied only where a stride is negative.

    torch knows no read-only memory. From a read-only array (everything that ``unpack`` returns) comes a tensor that
    must not be written to in place: its bytes are a received message that others read too. ``clone()`` it first.
    """
    import torch

    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    name = NAMES[array.dtype]
    plain = array.view(f"i{array.itemsize}") if name in FOREIGN else array
    if plain.flags.writeable:
        tensor = torch.from_numpy(plain)
    else:
        with warnings.catch_warnings():
            # Said once per process, and in the docstring above.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(plain)
    return tensor.view(getattr(torch, name)) if name in FOREIGN else tensor


def dtype_named(name: str, column: str = "") -> np.dtype[Any]:
    """The dtype of a received column. Raises ``WireError`` for a name that is not in ``DTYPES``."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise WireError(f"column {column[:40]!r}: expected a dtype of {', '.join(DTYPES)}, got {name[:40]!r}")
    return dtype


def _converted(value: ArrayLike | torch.Tensor, column: str) -> np.ndarray:
    # Whoever holds a tensor has imported torch: where it is not loaded, the value is none.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value, column)
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"column {column[:40]!r}: expected an array, got {type(value).__name__}: {error}") from None


def _from_torch(tensor: torch.Tensor, column: str) -> np.ndarray:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or name not in DTYPES:
        raise WireError(
            f"column {column[:40]!r}: expected a dense tensor on the CPU of {', '.join(DTYPES)}, "
            f"got {name}, {tensor.layout}, on {tensor.device}; use .cpu(), .to_dense() or .view(torch.uint8) first"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if name not in FOREIGN:
        return tensor.numpy()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.view(integer).numpy().view(DTYPES[name])
