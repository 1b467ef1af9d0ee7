"""A trace of chosen steps: what the devices and the host do, for TensorBoard and Perfetto."""

from pathlib import Path

import jax


class StepProfile:
    """Writes a profiler trace of the steps from `first` to `last`."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self._first, self._last = steps or (0, 0)
        self._folder = folder
        self._is_running = False

    def before(self, step: int) -> None:
        """Start at the first step, or, in a run that was begun after it, at once."""
        if self._first <= step <= self._last and not self._is_running:
            jax.profiler.start_trace(str(self._folder))
            self._is_running = True

    def after(self, step: int, outputs: object) -> Path | None:
        """End with the last step, which is waited for; the folder of the trace if it did."""
        if not self._is_running or step < self._last:
            return None
        jax.block_until_ready(outputs)
        return self.stop()

    def stop(self) -> Path | None:
        """End a trace that is being written."""
        if not self._is_running:
            return None
        self._is_running = False
        jax.profiler.stop_trace()
        return self._folder
