"""JAX of several processes, started after they have met."""

import contextlib
import ctypes
import math
import os
import signal

from transformer_jax.parallel.peers import Peers
from transformer_jax.parallel.wire import is_loopback

JAX_PATIENCE = 3600
"""Seconds after which JAX itself ends a process whose peer is silent: long, for then it aborts without naming it."""


def start_jax(peers: Peers) -> None:
    """Let JAX of these processes work together; before anything else is asked of JAX. Nothing for a single process."""
    if peers.count == 1 or peers.jax_address is None:
        return
    import jax

    _delay_abort()
    jax.config.update("jax_enable_preemption_service", False)  # which would take SIGTERM away from our own handlers
    local = peers.processes.local_index
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_chosen = "JAX_LOCAL_DEVICE_IDS" in os.environ or (gpus and "," not in gpus)  # by the user or the scheduler
    jax.distributed.initialize(
        peers.jax_address,
        peers.count,
        peers.index,
        local_device_ids=None if local is None or is_chosen else [local],
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(peers.processes.timeout),
        heartbeat_timeout_seconds=JAX_PATIENCE,
        shutdown_timeout_seconds=JAX_PATIENCE,
        coordinator_bind_address=peers.jax_address if is_loopback(peers.processes.address[0]) else None,
    )
    peers.uses_jax = True
    jax.devices()  # now, in all: each tells the others what it has, and waits for theirs


def _delay_abort() -> None:
    """Let `abort` wait for six seconds, in which the side thread can name the process that is gone.

    JAX aborts a process as soon as it has lost process 0, and takes no callback. abort() runs the handler of SIGABRT
    first, with the number of the signal: the C function sleep, with 6, which other threads do not notice.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: then JAX says what it says
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
