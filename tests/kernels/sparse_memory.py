"""Tensors that reach past 4 GiB, of which only the pages that are touched take memory."""

import mmap
import tempfile

import torch


def sparse_zeros(rows: int, width: int, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros ``[rows, width]`` whose rows lie ``row_bytes`` apart, in a sparse file."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    with tempfile.TemporaryFile() as file:
        file.truncate(rows * row_bytes)
        memory = mmap.mmap(file.fileno(), rows * row_bytes)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided((rows, width), (row_bytes // itemsize, 1))
