"""Processes that meet, notice when one is gone, and stop after the same step: threads stand for most, real ones end."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.parallel.hub import LARGEST_VALUE
from transformer_jax.parallel.peers import PEER_LOST, Rescue, alone, connect
from transformer_jax.parallel.processes import Processes
from transformer_jax.parallel.wire import Wire

ROOT = Path(__file__).parent.parent.parent
# The packages without what their __init__ imports: these processes need no JAX, which takes seconds to import.
PRELUDE = """
import sys, time, types
for name in ("transformer_jax", "transformer_jax.parallel"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]
from transformer_jax.errors import UserError
from transformer_jax.parallel import hub
from transformer_jax.parallel import peers as module
from transformer_jax.parallel.processes import Processes
port, count, index, timeout = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
def meet():
    return module.connect(Processes(f"127.0.0.1:{port}", count, index, timeout))
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(code, port, count, index, timeout=60.0):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(port), str(count), str(index), str(timeout)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_all(code, count, **options):
    port = free_port()
    return [start(code, port, count, index, **options) for index in range(count)]


def ends(processes, timeout=60):
    """Exit code, standard output and standard error of each."""
    return [(process.wait(timeout), process.stdout.read(), process.stderr.read()) for process in processes]


def together(count, function, *, patience=5.0):
    """What a function of (peers, index) returns in each of several threads that stand for processes."""
    address = f"127.0.0.1:{free_port()}"
    results = [Future() for _ in range(count)]

    def run(index):
        try:
            peers = connect(Processes(address, count, index, timeout=30.0), patience=patience)
            try:
                results[index].set_result(function(peers, index))
            finally:
                peers.close()
        except BaseException as error:
            results[index].set_exception(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    found = [result.result(timeout=30) for result in results]
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "peers do not close"
    return found


class Collective:
    """Steps that end only when all have dispatched them, of which a process may dispatch a few before one has ended."""

    def __init__(self, count, ahead):
        self._dispatched, self._ahead = [0] * count, ahead
        self._change = threading.Condition()

    def dispatch(self, index, step):
        with self._change:
            self._dispatched[index] = step
            self._change.notify_all()
            assert self._change.wait_for(lambda: min(self._dispatched) >= step - self._ahead, 20), "deadlock"


@pytest.mark.parametrize("seed", range(12))
def test_all_stop_after_the_same_step(seed, monkeypatch):
    rng, delay, write = random.Random(seed), random.Random(-seed), Wire.write

    def write_late(wire, message):
        time.sleep(delay.random() * 0.02)
        write(wire, message)

    if seed % 2:
        monkeypatch.setattr(Wire, "write", write_late)
    count = rng.choice([2, 3, 4])
    askers = rng.sample(range(count), rng.randint(1, count))
    moment = rng.choice([0.0, 0.02, 0.1])
    slow = rng.randrange(count)
    steps = Collective(count, ahead=rng.choice([0, 2]))

    def run(peers, index):
        pace = random.Random(100 * seed + index)
        if index in askers:
            threading.Timer(moment + pace.random() * 0.02, peers.request_stop).start()
        if moment == 0.0 and index in askers:
            peers.request_stop()
        step = 0
        while peers.may_step(step + 1):
            step += 1
            steps.dispatch(index, step)
            time.sleep(pace.random() * (0.02 if index == slow else 0.002))
        return step, peers.stop_step()

    stopped = together(count, run)
    assert len({*stopped}) == 1 and stopped[0][0] == stopped[0][1], stopped


def test_nobody_stops_unless_asked():
    def run(peers, index):
        return [peers.may_step(step) for step in range(1, 2001)], peers.stop_step()

    assert together(2, run) == [([True] * 2000, None)] * 2


def test_requests_before_the_first_step_and_again():
    asked = threading.Barrier(2)

    def run(peers, index):
        peers.request_stop()
        asked.wait(20)
        while peers.stop_step() is None:
            time.sleep(0.001)
        peers.request_stop()
        time.sleep(0.1)
        return peers.may_step(1), peers.stop_step()

    assert together(2, run, patience=1000.0) == [(False, 0)] * 2


def stop_together(peers, all_there):
    """Ask to stop after the step that all have come to."""
    all_there.wait(20)
    peers.request_stop()
    while peers.stop_step() is None:
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 3])
def test_states_of_one_step_are_saved_while_a_main_thread_is_busy(count):
    """The last process is inside an evaluation, and for a while in the middle of a step that has taken its state."""
    saved, left = [], threading.Barrier(count)
    ready_at = time.monotonic() + 0.5
    over, all_there, went_on = threading.Event(), threading.Barrier(count), []

    def run(peers, index):
        def state_step():
            return 3 if index < count - 1 or time.monotonic() > ready_at else None

        def save():
            saved.append((index, state_step()))
            return True

        def leave():
            left.wait(20)
            over.set()

        peers.on_stalled(Rescue(state_step, save, leave))
        for step in (1, 2, 3):
            assert peers.may_step(step)
        stop_together(peers, all_there)
        if index == count - 1:
            assert over.wait(20)  # the evaluation
        else:
            went_on.append(peers.may_step(4))  # which waits for the others until it is ended

    address = f"127.0.0.1:{free_port()}"
    for index in range(count):
        peers = lambda index=index: connect(Processes(address, count, index, 30.0), patience=0.1)  # noqa: E731
        threading.Thread(target=lambda index=index, peers=peers: run(peers(), index), daemon=True).start()
    assert over.wait(20)
    assert sorted(saved) == [(index, 3) for index in range(count)] and time.monotonic() > ready_at
    assert not went_on


@pytest.mark.parametrize("why", ["steps differ", "one cannot save", "one fails to save"])
def test_none_leaves_unless_all_can_save(why):
    """And the one that was busy comes to the agreed step in the end."""
    saved, left, both_there = [], [], threading.Barrier(2)

    def run(peers, index):
        state_step = [7, None if why == "one cannot save" else 8 if why == "steps differ" else 7][index]

        def save():
            saved.append(index)
            return index == 0

        peers.on_stalled(Rescue(lambda: state_step, save, lambda: left.append(index)))
        assert peers.may_step(8)
        stop_together(peers, both_there)
        if index == 1:
            time.sleep(0.5)  # busy, for several times the patience
        return peers.may_step(9), peers.stop_step()

    assert together(2, run, patience=0.05) == [(False, 8)] * 2
    assert not left and (not saved or why == "one fails to save")


def test_values_are_gathered_in_order():
    def run(peers, index):
        time.sleep(0.02 * (2 - index))
        first = peers.gather({"loss": index / 2})
        peers.barrier("end")
        return first, peers.gather([index])

    expected = [{"loss": 0.0}, {"loss": 0.5}, {"loss": 1.0}], [[0], [1], [2]]
    assert together(3, run) == [expected] * 3
    assert together(1, run) == [([{"loss": 0.0}], [[0]])]


def test_a_single_process_needs_no_thread_until_it_is_asked_to_stop():
    before = threading.active_count()
    peers = alone()
    assert peers.may_step(1) and peers.gather(1) == [1] and peers.stop_step() is None
    peers.explain(RuntimeError("its own"))
    assert threading.active_count() == before
    peers.close()
    other = alone()
    assert other.may_step(7)
    other.request_stop()
    while other.stop_step() is None:
        time.sleep(0.001)
    assert not other.may_step(8) and other.stop_step() == 7
    other.close()


def test_processes_at_different_places_are_told():
    def run(peers, index):
        with pytest.raises(RuntimeError, match="process 0 is at barrier 'a'; process 1 is at barrier 'b'"):
            peers.barrier("ab"[index])

    together(2, run)


def test_values_that_cannot_be_sent_are_refused():
    def run(peers, index):
        with pytest.raises(ValueError, match="too large to gather"):
            peers.gather("x" * LARGEST_VALUE)
        with pytest.raises(TypeError):
            peers.gather({1, 2})
        return peers.gather((index, "x" * 2**20))

    found = together(2, run)
    assert found[0] == found[1] and [value[0] for value in found[0]] == [0, 1]


def test_a_barrier_waits():
    reached = []

    def run(peers, index):
        if index == 1:
            time.sleep(0.2)
        reached.append(index)
        peers.barrier("here")
        return len(reached)

    assert together(2, run) == [2, 2]


def test_one_that_has_ended_in_order_alarms_nobody():
    order = []

    def run(peers, index):
        if index == 1:
            return
        time.sleep(0.5)
        assert peers.may_step(1)
        if index == 2:
            order.append("2 has ended")
            return
        peers.close()
        order.append("0 has waited")

    together(3, run)
    assert order == ["2 has ended", "0 has waited"]


def test_errors_of_all_are_their_own():
    def run(peers, index):
        begin = time.monotonic()
        peers.explain(TypeError("a bug"))
        return time.monotonic() - begin < 5.0

    assert together(2, run) == [True, True]


WORK = """
peers = meet()
print("there", flush=True)
for step in range(1, 10**9):
    peers.may_step(step)
    time.sleep(0.01)
"""


def wait_until_there(processes):
    for process in processes:
        assert process.stdout.readline() == "there\n"


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "its connection closed"), (signal.SIGSTOP, "no sign of life for 10 seconds")],
)
def test_a_process_that_is_gone_ends_the_others(number, reason):
    groups = {victim: start_all(WORK, 3) for victim in (0, 2)}
    for processes in groups.values():
        wait_until_there(processes)
    begin = time.monotonic()
    for victim, processes in groups.items():
        processes[victim].send_signal(number)
    found = {victim: ends([*processes[:victim], *processes[victim + 1 :]]) for victim, processes in groups.items()}
    assert time.monotonic() - begin < 15
    for victim, processes in groups.items():
        processes[victim].kill()
        processes[victim].communicate()
        line = (
            f"process {victim} of 3 ({socket.gethostname()}) is gone: {reason}; the others cannot go on without it; "
            "start the same command again to go on from the last checkpoint\n"
        )
        assert found[victim] == [(PEER_LOST, "", line)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_the_reason_comes_before_the_end(failing):
    code = """
peers = meet()
if index == FAILING:
    try:
        raise UserError("the loss became nan")
    except UserError as error:
        peers.explain(error)
        peers.fail(error)
    sys.exit(1)
peers.gather(1)
"""
    processes = start_all(code.replace("FAILING", str(failing)), 3)
    found = ends(processes)
    assert [code for code, _, _ in found] == [1 if index == failing else PEER_LOST for index in range(3)]
    for index, (_, _, err) in enumerate(found):
        assert index == failing or (f"process {failing} of 3" in err and "UserError: the loss became nan" in err)


def test_processes_that_fail_at_once_each_tell_their_own_error():
    code = """
peers = meet()
write = module.Wire.write
module.Wire.write = lambda *arguments: (time.sleep(0.3), write(*arguments))  # so that all fail before one is told
peers.barrier("ready")
peers.fail("the loss became nan")
sys.exit(3)
"""
    assert ends(start_all(code, 3)) == [(3, "", "")] * 3


def test_an_error_that_a_dead_peer_has_caused_is_not_reported():
    code = """
peers = meet()
print("there", flush=True)
if index == 1:
    time.sleep(100)
peers.explain(RuntimeError("connection reset by a collective"))
print("reported")
"""
    processes = start_all(code, 2)
    wait_until_there(processes)
    time.sleep(0.5)
    processes[1].kill()
    [(code, out, err), _] = ends(processes)
    assert (code, out) == (PEER_LOST, "") and "process 1 of 2" in err


MEET = """
module.NOTICE_EVERY = hub.NOTICE_EVERY = 0.3
try:
    meet()
except UserError as error:
    print(f"error: {error}")
    sys.exit(1)
"""


def test_who_is_missing_is_named_while_waiting_and_at_the_end():
    port = free_port()
    found = ends([start(MEET, port, 4, index, timeout=2.0) for index in (0, 1, 3)])
    for code, out, err in found:
        assert code == 1
        assert "3 of 4 processes came" in out and "missing index 2;" in out
        assert "waiting: 3 of 4 processes, missing index 2\n" in err


def test_a_process_that_cannot_be_reached_is_named():
    port = free_port()
    [(code, out, err)] = ends([start(MEET, port, 2, 1, timeout=1.0)])
    assert code == 1 and f"process 0 was not reached at 127.0.0.1:{port} within 1 seconds" in out
    assert f"waiting: process 0 cannot be reached at 127.0.0.1:{port} (" in err


def test_two_processes_of_one_index_and_different_counts_are_errors_on_both_sides():
    port = free_port()
    found = ends([start(MEET, port, 3, index) for index in (0, 1, 1)])
    assert [code for code, _, _ in found] == [1, 1, 1]
    assert all("two processes have the index 1" in out for _, out, _ in found)
    port = free_port()
    found = ends([start(MEET, port, 3, 0), start(MEET, port, 4, 1)])
    assert [code for code, _, _ in found] == [1, 1]
    assert all("was started for 4 processes and process 0 for 3" in out for _, out, _ in found)


def test_a_port_that_is_taken_and_strangers_that_knock():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen on port {port}"):
            connect(Processes(f"127.0.0.1:{port}", 2, 0, timeout=5.0))
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect, Processes(address, 2, 0, timeout=20.0))
        nobody = {"kind": "hello", "index": [], "count": 2, "host": ""}
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"kind": "hello"}\n', json.dumps(nobody).encode() + b"\n"):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
                        stranger.sendall(words)
                        assert stranger.recv(100) == b""
                    break
                except ConnectionError:
                    time.sleep(0.05)
        second = pool.submit(connect, Processes(address, 2, 1, timeout=20.0))
        both = [first.result(30), second.result(30)]
        list(pool.map(lambda peers: peers.close(), both))


JAX = """
import os, sys
os.environ.update(JAX_PLATFORMS="cpu", NPROC="4", JAX_NUM_CPU_DEVICES="1")
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from transformer_jax.parallel.distributed import start_jax
from transformer_jax.parallel.peers import connect
from transformer_jax.parallel.processes import Processes
port, index, then = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
peers = connect(Processes(f"127.0.0.1:{port}", 2, index, 60.0))
start_jax(peers)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("data"))
x = jax.make_array_from_process_local_data(sharding, np.full((1,), index + 1.0, np.float32))
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
print(jax.process_index(), float(total(x).addressable_data(0)[0]), flush=True)
if then == "close":
    peers.close()
while then == "work":
    try:
        total(x).block_until_ready()
    except Exception as error:
        peers.explain(error)
        raise
"""


def start_with_jax(then):
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-c", JAX, port, str(index), then],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"},
        )
        for index in range(2)
    ]


def test_jax_of_two_processes_adds_up():
    found = ends(start_with_jax("close"), timeout=120)
    assert [(code, re.findall(r"\d \d\.0", out)) for code, out, _ in found] == [(0, ["0 3.0"]), (0, ["1 3.0"])], found


@pytest.mark.parametrize("victim", [0, 1])
def test_the_end_of_a_process_is_told_before_jax_aborts(victim):
    processes = start_with_jax("work")
    for process in processes:
        while "3.0" not in process.stdout.readline():
            assert process.poll() is None
    begin = time.monotonic()
    processes[victim].kill()
    processes[victim].communicate()
    [(code, _, err)] = ends([processes[1 - victim]])
    assert time.monotonic() - begin < 15
    assert code == PEER_LOST and f"process {victim} of 2 " in err.splitlines()[-1], err
