"""Peak host memory of a save, as a multiple of the state: `python benchmarks/save_memory.py [MEGABYTES] [ARRAYS]`.

On CPU the state itself is in host memory, so that 1.00 says that nothing was added to it. On an accelerator a copy of
the state comes to the host to be written in the background, whatever is printed here.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.training import TrainState
from transformer_jax.training.checkpoints import Checkpoints

MEGABYTE = 2**20


def memory(name: str) -> float:
    """Megabytes of this process: VmRSS now, or VmHWM at most since `reset`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def reset() -> None:
    """Forget the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def make_state(megabytes: int, arrays: int, step: int) -> TrainState:
    """A state of random numbers, a third of them parameters."""
    shape = (megabytes * MEGABYTE // arrays // 4 // 1024, 1024)
    random = np.random.default_rng(step)  # and not JAX's, whose compiler needs memory too
    values = [jnp.asarray(random.standard_normal(shape, np.float32)) for _ in range(arrays)]
    model = {f"weight_{n}": x for n, x in enumerate(values[::3])}
    return TrainState(jnp.int32(step), model, [values[1::3], values[2::3]], jax.random.key(0))


def measure(megabytes: int, arrays: int) -> tuple[float, float]:
    """The peak of a save over the size of the state, both without what the process needs anyway; and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder, "checkpoints"), keep=1)
        checkpoints.save(make_state(1, 3, step=1))  # what is compiled and allocated once
        checkpoints.wait()
        without = memory("VmRSS")
        state = jax.block_until_ready(make_state(megabytes, arrays, step=2))
        size = sum(x.nbytes for x in jax.tree.leaves((state.model, state.optimizer))) / MEGABYTE
        gc.collect()  # the last array that was made into one of JAX's
        reset()
        before = time.perf_counter()
        checkpoints.save(state)
        checkpoints.wait()
        seconds = time.perf_counter() - before
        checkpoints.close()
        return (memory("VmHWM") - without) / size, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", type=int, nargs="?", default=1000)
    parser.add_argument("arrays", type=int, nargs="?", default=30)
    arguments = parser.parse_args()
    ratio, seconds = measure(arguments.megabytes, arguments.arrays)
    print(f"{arguments.megabytes} MB in {arguments.arrays} arrays: peak {ratio:.2f} x the state, {seconds:.1f} s")


if __name__ == "__main__":
    main()
