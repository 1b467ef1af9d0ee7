"""What accelerators can do, by the figures that their makers publish."""

from dataclasses import dataclass

from transformer_jax.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """An accelerator.

    The figures are of one chip and of dense matrices. Those of TPUs are from the page of each version at
    https://docs.cloud.google.com/tpu/docs; those pages do not give the interconnect of v3 and v4, which is the
    all-reduce bandwidth of a pod divided by its chips here, as it is for v5e. Those of GPUs are from NVIDIA's data
    sheets, without sparsity. A program reaches less: the runtime keeps some of the memory, and no kernel runs at the
    peak all the time.
    """

    name: str
    """What it is called."""
    memory: int
    """Bytes of its memory, where a GB that it is sold by is taken for 2^30 bytes."""
    bfloat16_flops: float
    """Peak FLOP/s of matrix products of bfloat16."""
    float32_flops: float | None
    """Peak FLOP/s in float32, where it is published."""
    memory_bandwidth: float
    """Bytes that it reads from and writes to its memory in a second."""
    interconnect: float
    """Bytes that it sends to other chips in a second, over all its links; it receives as many at the same time."""
    kinds: tuple[str, ...]
    """The names that it has as `device_kind` of a JAX device."""
    topology: str | None = None
    """What the names of its topologies begin with: v5e of v5e:4x4."""
    devices: int = 1
    """Number of JAX devices that it is. They have equal shares of all this."""


CHIPS = (
    Chip("TPU v3", 32 * GIB, 123e12, None, 900e9, 332e9, ("TPU v3",), "v3", devices=2),
    Chip("TPU v4", 32 * GIB, 275e12, None, 1200e9, 268e9, ("TPU v4",), "v4"),
    Chip("TPU v5e", 16 * GIB, 197e12, None, 819e9, 200e9, ("TPU v5 lite", "TPU v5e"), "v5e"),
    Chip("TPU v5p", 95 * GIB, 459e12, None, 2765e9, 600e9, ("TPU v5", "TPU v5p"), "v5p"),
    Chip("TPU v6e", 32 * GIB, 918e12, None, 1638e9, 400e9, ("TPU v6 lite", "TPU v6e"), "v6e"),
    Chip("TPU v7x", 192 * GIB, 2307e12, None, 7380e9, 600e9, ("TPU7x", "TPU v7x"), "tpu7x", devices=2),
    Chip("A100 40GB", 40 * GIB, 312e12, 19.5e12, 1555e9, 300e9, ("NVIDIA A100-SXM4-40GB",)),
    Chip("A100 80GB", 80 * GIB, 312e12, 19.5e12, 2039e9, 300e9, ("NVIDIA A100-SXM4-80GB",)),
    Chip("H100 SXM", 80 * GIB, 989e12, 67e12, 3350e9, 450e9, ("NVIDIA H100 80GB HBM3",)),
    Chip("H200 SXM", 141 * GIB, 989e12, 67e12, 4800e9, 450e9, ("NVIDIA H200",)),
    Chip("B200", 180 * GIB, 2250e12, 75e12, 8000e9, 900e9, ("NVIDIA B200",)),
    Chip("L4", 24 * GIB, 121e12, 30.3e12, 300e9, 32e9, ("NVIDIA L4",)),
)
"""The accelerators that are known. Others with similar names (H100 PCIe, L40) have other figures."""


def chip_named(name: str) -> Chip:
    """The chip that a user names: H100, v5e, "A100 80GB", or the `device_kind` of a JAX device."""
    if (chip := find_chip(name)) is not None:
        return chip
    wanted = name.strip().lower()
    found = [chip for chip in CHIPS if wanted in (chip.name.lower(), chip.name.split()[0].lower())]
    if len(found) != 1:
        known = ", ".join(chip.name.removeprefix("TPU ") for chip in CHIPS)
        raise UserError(f"chip {name!r} is {'ambiguous' if found else 'unknown'}; choose among {known}")
    return found[0]


def find_chip(name: str) -> Chip | None:
    """The chip of a JAX `device_kind` ("TPU v5 lite") or of a topology ("v5e:4x4"); None if it is not known."""
    prefix = name.split(":")[0].strip().lower()
    for chip in CHIPS:
        names = {kind.lower() for kind in chip.kinds}
        if chip.topology is not None:
            names |= {chip.topology, chip.name.removeprefix("TPU ").lower()}
        if prefix in names:
            return chip
    return None
