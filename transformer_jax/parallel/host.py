"""What a program on this machine should say before JAX starts."""

import ctypes
import logging
import os
import re

import jax


def prepare_host() -> None:
    """Give simulated devices enough threads, let the process keep the memory it has freed, and quiet the libraries."""
    _give_threads_to_simulated_devices()
    _keep_freed_memory()
    logging.getLogger("absl").setLevel(logging.ERROR)


def _give_threads_to_simulated_devices() -> None:
    """XLA needs two threads for each simulated CPU device: with fewer, jax 0.10 can wait for itself forever."""
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    count = max(int(flag.group(1)) if flag else 1, getattr(jax.config, "jax_num_cpu_devices", 1))
    if count > 1:
        os.environ.setdefault("NPROC", str(max(2 * count, os.cpu_count() or 1)))


def _keep_freed_memory() -> None:
    """On CPU, XLA allocates its buffers anew in each step, and glibc would have the kernel clear their pages again.

    glibc keeps large blocks for the main thread only, so the step must run on the thread that calls it.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    trim_threshold, mmap_threshold = -1, -3
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):  # another C library: nothing is lost
        pass
