"""Chips are found by the names that JAX and the TPU compiler give them, and by no others."""

import pytest

from transformer_jax.errors import UserError
from transformer_jax.parallel.chips import CHIPS, chip_named, find_chip


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU7x", "TPU v7x"),
        ("v5e:4x4", "TPU v5e"),
        ("v5p:2x2x1", "TPU v5p"),
        ("V6E:4x4", "TPU v6e"),
        ("tpu7x:2x2x1", "TPU v7x"),
        ("v7x:2x2x1", "TPU v7x"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
    ],
)
def test_a_chip_is_found_by_its_device_kind_or_topology(name, chip):
    assert find_chip(name).name == chip


@pytest.mark.parametrize("name", ["cpu", "NVIDIA L40", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "v5:4x4", "v9:2x2"])
def test_a_chip_with_a_similar_name_is_not_taken_for_another(name):
    assert find_chip(name) is None


@pytest.mark.parametrize(
    ("name", "chip"), [("H100", "H100 SXM"), ("a100 80gb", "A100 80GB"), ("v5e", "TPU v5e"), ("TPU v6e", "TPU v6e")]
)
def test_a_user_may_name_a_chip_shortly(name, chip):
    assert chip_named(name).name == chip


@pytest.mark.parametrize(("name", "problem"), [("A100", "ambiguous"), ("H1000", "unknown"), ("TPU", "ambiguous")])
def test_a_name_of_no_chip_or_of_several_is_an_error_that_lists_them(name, problem):
    with pytest.raises(UserError, match=f"chip '{name}' is {problem}; choose among v3, .*A100 40GB, A100 80GB"):
        chip_named(name)


def test_no_name_is_of_two_chips():
    for chip in CHIPS:
        topologies = () if chip.topology is None else (f"{chip.topology}:2x2",)
        assert all(find_chip(name) is chip for name in (*chip.kinds, *topologies)), chip


def test_the_arithmetic_intensity_of_tpu_v5e_and_h100():
    """FLOPs per byte at which compute and memory take equally long: about 240 and 295, as is often quoted."""
    ratio = {chip.name: chip.bfloat16_flops / chip.memory_bandwidth for chip in CHIPS}
    assert round(ratio["TPU v5e"]) == 241
    assert round(ratio["H100 SXM"]) == 295
    assert all(50 < value < 650 for value in ratio.values()), ratio
