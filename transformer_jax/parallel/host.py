"""What a program sets on this machine before JAX starts."""

import ctypes
import glob
import logging
import os
import re
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import jax

from transformer_jax.errors import out_of_space

NOISE = ("Given directory is read only",)
"""The beginnings of warnings that say nothing new: Orbax warns when it is opened to only read."""

TRACKER_NOISE = "ignore:resource_tracker"
"""The process that frees the shared memory of workers warns when a stopped training has left that to it."""


TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""The device files of TPUs, on Cloud TPU machines and in containers."""


def prepare_host() -> None:
    """Give simulated devices enough threads, let a process on CPU keep the memory it has freed, and silence noise."""
    _give_threads_to_simulated_devices()
    if computes_on_cpu():
        _keep_freed_memory()
    quiet_loggers()
    if TRACKER_NOISE not in sys.warnoptions:
        sys.warnoptions.append(TRACKER_NOISE)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _print_unraisable


def simulate_devices(count: int) -> None:
    """Have so many devices where JAX computes on the CPU and has not been told how many; before JAX starts."""
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if computes_on_cpu() and not told and getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        jax.config.update("jax_num_cpu_devices", count)
        _give_threads_to_simulated_devices()


def quiet_loggers() -> None:
    """Keep libraries from logging what says nothing new."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)  # the same filter is added once


def computes_on_cpu() -> bool:
    """Whether JAX will compute on the CPU here. JAX is not started to find out, since that would take the accelerators.

    It does where it is told to (JAX_PLATFORMS=cpu), and otherwise where no plugin for an accelerator is installed. The
    TPU compiler alone, which `plan` needs, is none: there has to be a TPU, too.
    """
    platforms = getattr(jax.config, "jax_platforms", None) or getattr(jax.config, "jax_platform_name", None)
    if platforms:
        return platforms.split(",")[0].strip() == "cpu"
    has_tpu = find_spec("libtpu") is not None and any(map(glob.glob, TPU_FILES))
    return not entry_points(group="jax_plugins") and find_spec("jax_plugins") is None and not has_tpu


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
    except (OSError, AttributeError):  # another C library: this is only an optimization
        pass


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not record.getMessage().startswith(NOISE) and not _is_repeated(error)


def _print_unraisable(unraisable: Any) -> None:
    """Print an error in a callback as Python does, unless the program reports it anyway."""
    if not _is_repeated(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def _is_repeated(error: BaseException | None) -> bool:
    """Whether the program reports an error itself: Ctrl-C, or a disk that was full when Orbax was writing.

    Every array that it was writing then raises the same again, or finds Orbax's event loop closed after the first.
    """
    return isinstance(error, KeyboardInterrupt) or bool(out_of_space(error)) or str(error) == "Event loop is closed"
