"""How zip.bin and legacy.bin were made: `python tests/interop/files/make.py`, where torch is installed.

They hold the same tensors in the two layouts of `torch.save`; tests/interop/test_torch_bin.py says what is in them.
"""

from collections import OrderedDict
from pathlib import Path

import torch

NUMBERS = torch.arange(12, dtype=torch.float32).reshape(3, 4)

TENSORS = OrderedDict(
    float64=torch.tensor([[0.1, -2.5]], dtype=torch.float64),
    float32=torch.tensor([1.5, -2.0, 3.25]),
    float16=torch.tensor([0.5, -65504.0], dtype=torch.float16),
    bfloat16=torch.tensor([1.0, -3.140625, 2.0**100], dtype=torch.bfloat16),
    int64=torch.tensor([2**62, -1]),
    int32=torch.tensor([2**30, -1], dtype=torch.int32),
    int16=torch.tensor([2**14, -1], dtype=torch.int16),
    int8=torch.tensor([127, -128], dtype=torch.int8),
    uint8=torch.tensor([0, 255], dtype=torch.uint8),
    bool=torch.tensor([True, False, True]),
    uint16=torch.tensor([0, 65535], dtype=torch.uint16),
    float8_e4m3fn=torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
    parameter=torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
    scalar=torch.tensor(7.5),
    empty=torch.zeros(0, 3),
    whole=NUMBERS,
    transposed=NUMBERS.T,
    sliced=NUMBERS[1:, 1::2],
    repeated=torch.tensor([5.0, 6.0]).expand(3, 2),
)
TENSORS._metadata = OrderedDict({"": {"version": 1}})  # as that of a module's state_dict

if __name__ == "__main__":
    folder = Path(__file__).parent
    torch.save(TENSORS, folder / "zip.bin")
    torch.save(TENSORS, folder / "legacy.bin", _use_new_zipfile_serialization=False)
