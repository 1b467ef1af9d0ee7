"""How fast a run is: units a second, model FLOPs a second and their share of the peak, memory in use."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from transformer_jax.parallel.chips import Chip, find_chip
from transformer_jax.parallel.flops import train_flops


class Throughput:
    """Counts from one line of the metrics to the next."""

    def __init__(self, unit: str, devices: list[jax.Device]):
        self._unit, self._devices = unit, devices
        self._chip: Chip | None = find_chip(devices[0].device_kind)
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._since, self._units, self._flops = time.monotonic(), 0.0, 0.0

    def add(self, units: float, flops: float | None) -> None:
        """Count a step."""
        self._units += units
        self._flops += flops or 0.0

    def metrics(self) -> dict[str, float]:
        """Units a second, and where they are known model FLOPs a second, their share of the peak, and peak memory.

        Model FLOPs are three times the matrix products of the forward pass: nothing that is computed again counts. The
        peak is that of the chips in bfloat16.
        """
        seconds = max(time.monotonic() - self._since, 1e-9)
        found = {f"{self._unit}_per_second": self._units / seconds}
        if self._flops:
            found["model_flops_per_second"] = self._flops / seconds
            if self._chip is not None:
                peak = self._chip.bfloat16_flops / self._chip.devices * len(self._devices)
                found["model_flops_utilization"] = self._flops / seconds / peak
        if memory := _peak_memory(self._devices):
            found["peak_memory_bytes"] = memory
        return found


def step_flops(loss: Callable[[Any, Any, None], Any], model: Any, batch: Mapping[str, Any]) -> float | None:
    """Model FLOPs of a train step on a global batch; None where nobody can count them."""
    try:
        return float(train_flops(lambda model, batch: loss(model, batch, None), model, batch))
    except ValueError:  # a loop with matrix products in it that runs nobody knows how often
        return None


def _peak_memory(devices: list[jax.Device]) -> float | None:
    """The most bytes that were ever in use on a device of this process; None where the device does not say."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in local]
    known = [float(value) for value in found if value is not None]
    return max(known, default=None)
