"""Which of several processes this one is: from flags, or from what the scheduler has put into the environment.

What JAX detects itself is read here in the same way, but over any mapping and before JAX starts, so that a process that
is missing can be named.
"""

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError

Environment = Mapping[str, str]
TPU_PORT = 8482
"""Where JAX lets the processes on TPUs meet."""
FLAG_HELP = {
    "coordinator": ("HOST:PORT", "Address of the first of several processes, where the others find it."),
    "count": ("N", "Number of processes that train together."),
    "index": ("I", "Index of this process among them, from 0."),
    "timeout": ("SECONDS", "How long to wait for the other processes to start."),
}
"""What the value of each flag `--processes.NAME` is, and what it means."""


@dataclass(frozen=True)
class Processes:
    """The processes that train together, and which of them this is."""

    coordinator: str | None = None
    """Address of process 0, "host:port"; None for a single process."""
    count: int = 1
    index: int = 0
    timeout: float = 300.0
    """Seconds to wait for the others to start."""
    local_index: int | None = None
    """Index among several processes on this machine, each of which takes the GPU of that number; None for all GPUs."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"the number of processes is {self.count}; it must be at least 1")
        if not 0 <= self.index < self.count:
            raise UserError(
                f"the index of this process is {self.index}, but there are {self.count} processes; "
                f"give one from 0 to {self.count - 1}"
            )
        if not self.timeout > 0:
            raise UserError(f"the time to wait for other processes is {self.timeout} seconds; it must be positive")
        if self.count > 1:
            split_address(self.coordinator or "")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        return split_address(self.coordinator or "")


@dataclass(frozen=True)
class ProcessFlags:
    """What the flags `--processes.NAME` say; None for what they do not."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    timeout: float | None = None


def take_process_flags(arguments: Sequence[str]) -> tuple[ProcessFlags, list[str]]:
    """The flags `--processes.NAME VALUE`, also with `=`, and the arguments without them."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, has_value, value = argument.partition("=")
        name = flag.removeprefix("--processes.")
        if name == flag:
            rest.append(argument)
            continue
        if name not in FLAG_HELP:
            raise UserError(f"unknown flag {flag}; use one of {', '.join(f'--processes.{n}' for n in FLAG_HELP)}")
        if not has_value and (value := next(remaining, "")) == "":
            raise UserError(f"{flag} needs a value: {flag} {FLAG_HELP[name][0]}")
        if name in found:
            raise UserError(f"{flag} is given twice; leave one out")
        kind: Callable[[str], Any] = {"count": int, "index": int, "timeout": float}.get(name, str)
        try:
            found[name] = kind(value)
        except ValueError:
            raise UserError(f"{flag} is {value!r}; it must be a number") from None
    return ProcessFlags(**found), rest


def find_processes(environ: Environment, flags: ProcessFlags | None = None) -> Processes:
    """The processes that flags or the environment describe; a single one if neither does.

    The first of these that is there decides, which is JAX's own order: flags, JAX's variables (which `launch` sets),
    Open MPI, SLURM, TPU workers of GKE or Cloud TPU. On a Cloud TPU VM without any of them, JAX is asked, which asks
    the metadata server of the machine. JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_PORT replace what a scheduler says.
    """
    flags = flags or ProcessFlags()
    found = _from_flags(flags) or _from_jax(environ) or _from_scheduler(environ)
    return found if flags.timeout is None else replace(found, timeout=flags.timeout)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 host stands in brackets."""
    host, _, port = text.rpartition(":")
    if not host or (":" in host and not host.startswith("[")) or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"the coordinator is {text!r}; give HOST:PORT, such as 10.0.0.1:8476")
    return host.strip("[]"), int(port)


def expand_nodes(text: str) -> list[str]:
    """The nodes of a SLURM node list: node[03-05,9],other is node03, node04, node05, node9, other."""
    nodes = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        literals = re.split(r"\[([^\[\]]*)\]", entry)
        choices = [_expand_ranges(part) if i % 2 else [part] for i, part in enumerate(literals)]
        nodes += ["".join(parts) for parts in itertools.product(*choices)]
    return nodes


def _expand_ranges(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{i:0{len(first)}}" for i in range(int(first), int(last or first) + 1)]
    return numbers


def _from_flags(flags: ProcessFlags) -> Processes | None:
    values = {f.name: getattr(flags, f.name) for f in fields(flags) if f.name != "timeout"}
    given = {name for name, value in values.items() if value is not None}
    if not given or (given <= {"count", "index"} and flags.count == 1 and flags.index in (None, 0)):
        return Processes() if given else None
    for name in values:
        if name not in given:
            others = ", ".join(f"--processes.{n}" for n in sorted(given))
            raise UserError(f"--processes.{name} {FLAG_HELP[name][0]} is missing beside {others}")
    count, index = flags.count or 0, flags.index or 0
    _check_index(index, "--processes.index", count, "--processes.count")
    return Processes(flags.coordinator, count, index)


def _from_jax(environ: Environment) -> Processes | None:
    if not environ.keys() & {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}:
        return None
    count = _number(environ, "JAX_NUM_PROCESSES")
    if count == 1:
        return Processes()
    # The second name is what Kubernetes tells the pods of a job.
    index = _number(environ, "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")
    _check_index(index, "JAX_PROCESS_ID", count, "JAX_NUM_PROCESSES")
    return Processes(_text(environ, "JAX_COORDINATOR_ADDRESS"), count, index)


def _from_scheduler(environ: Environment) -> Processes:
    found = _from_open_mpi(environ) or _from_slurm(environ) or _from_tpu(environ) or _from_metadata(environ)
    address, port = environ.get("JAX_COORDINATOR_ADDRESS"), environ.get("JAX_COORDINATOR_PORT")
    if found is None:
        if address:
            raise UserError(
                f"JAX_COORDINATOR_ADDRESS is {address}, but JAX_NUM_PROCESSES and JAX_PROCESS_ID are not set; set them "
                "too, or leave it out"
            )
        return Processes()
    if found.count == 1:
        return Processes()
    if address or port:
        host, _, _ = (found.coordinator or "").rpartition(":")
        return replace(found, coordinator=address or f"{host}:{port}")
    return found


def _from_open_mpi(environ: Environment) -> Processes | None:
    """What mpirun sets. Up to version 4 its address is in a variable, since version 5 its host is in the job's name."""
    size = "OMPI_COMM_WORLD_SIZE"
    if size not in environ:
        return None
    count, index = _number(environ, size), _number(environ, "OMPI_COMM_WORLD_RANK")
    _check_index(index, "OMPI_COMM_WORLD_RANK", count, size)
    if count == 1:
        return Processes()
    uri, job = environ.get("OMPI_MCA_orte_hnp_uri", ""), environ.get("PMIX_NAMESPACE", "")
    if match := re.search(r"^(\d+)\..*?(?:tcp://(?P<v4>.+?)[,:]|tcp6://\[(?P<v6>.+?)[,\]])", uri):
        host, number = match["v4"] or f"[{match['v6']}]", int(match[1]) // 2**12  # a job's number is a multiple of it
    elif match := re.search(r"^prterun-(.+)-(\d+)@\d+$", job):
        host, number = match[1], int(match[2])
    elif "JAX_COORDINATOR_ADDRESS" in environ:
        host, number = "replaced", 0
    else:
        raise UserError(
            f"{size} is {count}, but neither OMPI_MCA_orte_hnp_uri nor PMIX_NAMESPACE says where mpirun runs; set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT to the host of process 0 (mpirun -x)"
        )
    several = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", default=1) > 1
    local = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK") if several else None
    return Processes(f"{host}:{_job_port(number)}", count, index, local_index=local)


def _from_slurm(environ: Environment) -> Processes | None:
    """What srun sets. A batch script outside srun runs once, whatever the number of tasks is."""
    if "SLURM_PROCID" not in environ or not environ.keys() & {"SLURM_STEP_NODELIST", "SLURM_STEP_ID"}:
        return None
    count, index = _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_PROCID")
    _check_index(index, "SLURM_PROCID", count, "SLURM_NTASKS")
    if count == 1:
        return Processes()
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    try:
        nodes = expand_nodes(_text(environ, name))
        port = _job_port(_number(environ, "SLURM_JOB_ID"))
        local = _number(environ, "SLURM_LOCALID") if count > len(nodes) else None
        return Processes(f"{nodes[0]}:{port}", count, index, local_index=local)
    except (ValueError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} is {environ[name]!r}, which is no list of nodes such as node[01-04]") from None


def _from_tpu(environ: Environment) -> Processes | None:
    """What GKE sets in the pods of a TPU slice, and of several slices."""
    if path := environ.get("TPU_PROCESS_ADDRESSES_PATH"):
        hosts = Path(path).read_text().strip()
    else:
        hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    slices = _number(environ, "MEGASCALE_NUM_SLICES", default=1)
    if not hosts:
        return None
    per_slice = len(workers := hosts.split(","))
    if slices * per_slice == 1:
        return Processes()
    worker = _number(environ, "TPU_WORKER_ID", "JOB_COMPLETION_INDEX") if per_slice > 1 else 0
    if worker >= per_slice:
        raise UserError(f"TPU_WORKER_ID is {worker}, but TPU_WORKER_HOSTNAMES names {per_slice} hosts: {hosts}")
    first = workers[0] if slices == 1 else _text(environ, "MEGASCALE_COORDINATOR_ADDRESS")
    slice_index = 0 if slices == 1 else _number(environ, "MEGASCALE_SLICE_ID")
    return Processes(f"{first.split(':')[0]}:{TPU_PORT}", slices * per_slice, slice_index * per_slice + worker)


def _from_metadata(environ: Environment) -> Processes | None:
    """What the metadata server tells JAX on a Cloud TPU VM; nothing is asked elsewhere."""
    if environ.get("JAX_PLATFORMS", "").startswith("cpu") or "TPU_SKIP_MDS_QUERY" in environ:
        return None
    try:
        from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

        if not GceTpuCluster.is_env_present():
            return None
        if (count := GceTpuCluster.get_process_count()) == 1:
            return Processes()
        address = GceTpuCluster.get_coordinator_address(30, None)
        return Processes(address, count, GceTpuCluster.get_process_id())
    except Exception as error:  # of the network, or of a version of JAX that detects in another way
        print(f"note: this TPU machine does not say whether it is one of several ({error})", file=sys.stderr)
        return None


def _job_port(number: int) -> int:
    """A port that processes of a job have in common, and probably no others: one of the highest 2^12, as in JAX."""
    return 2**16 - 2**12 + number % 2**12


def _check_index(index: int, index_name: str, count: int, count_name: str) -> None:
    if not 0 <= index < count:
        raise UserError(f"{index_name} is {index}, but {count_name} is {count}; indices go from 0 to one less")


def _text(environ: Environment, name: str) -> str:
    if not environ.get(name):
        raise UserError(f"the environment variable {name} is not set, but others say that there are several processes")
    return environ[name]


def _number(environ: Environment, *names: str, default: int | None = None) -> int:
    """The number in the first variable of these that is set."""
    name = next((name for name in names if environ.get(name)), names[0])
    if default is not None and not environ.get(name):
        return default
    text = _text(environ, name)
    if not text.isdecimal():
        raise UserError(f"the environment variable {name} is {text!r}; it must be a number")
    return int(text)
