"""Eight simulated devices, strict broadcasting, and one compilation cache for the tests and the programs they start."""

import os
import tempfile
from pathlib import Path

NUM_DEVICES = 8
os.environ["NPROC"] = str(2 * NUM_DEVICES)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="transformer_jax_tests_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="transformer_jax_tests_"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests compile much and compute little. (The programs that tests start are compiled as users' are.)
jax.config.update("jax_disable_most_optimizations", True)
if jax.__version_info__ < (0, 11):  # later versions have no such flag, and XLA aborts on one that it does not know
    with pytest.MonkeyPatch.context() as patch:  # read once, when something is compiled for the first time
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false")
        jax.block_until_ready(jax.jit(lambda: 0)())


def pytest_collection_modifyitems(items):
    """What starts programs takes long and comes first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def forget_what_was_compiled():
    """Or it would be gigabytes at the end. What another file compiles again is on disk."""
    yield
    jax.clear_caches()
