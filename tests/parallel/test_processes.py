"""Which process this is, by what schedulers put into the environment, beside what JAX itself detects."""

import os

import pytest
from jax._src.clusters import cloud_tpu_cluster
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster
from jax._src.clusters.ompi_cluster import OmpiCluster
from jax._src.clusters.slurm_cluster import SlurmCluster

from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import (
    FLAG_HELP,
    Processes,
    ProcessFlags,
    expand_nodes,
    find_processes,
    split_address,
    take_process_flags,
)

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[03-05,9],other",
    "SLURM_JOB_NODELIST": "login,node[03-05,9],other",
}
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
IPV6 = {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"}
GKE = {"TPU_WORKER_HOSTNAMES": "job-0.svc,job-1.svc", "TPU_WORKER_ID": "1"}
SLICES = {
    **GKE,
    "MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.svc:8080",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
}


def by_jax(cluster, environ, monkeypatch):
    """Address, count and index as JAX detects them."""
    for name in (*JAX, *SLURM, *OPEN_MPI_4, *SLICES):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda key: None)
    monkeypatch.setattr(cluster, "wait_for_coordinator", lambda *arguments: None, raising=False)
    port = os.environ.get("JAX_COORDINATOR_PORT")
    address = cluster.get_coordinator_address(timeout_secs=1, override_coordinator_port=port)
    return address, cluster.get_process_count(), cluster.get_process_id()


@pytest.mark.parametrize(
    ("cluster", "environ"),
    [
        (SlurmCluster, SLURM),
        (SlurmCluster, {**SLURM, "SLURM_STEP_NODELIST": "node001,host2", "SLURM_PROCID": "0"}),
        (SlurmCluster, {**SLURM, "JAX_COORDINATOR_PORT": "7777"}),
        (OmpiCluster, OPEN_MPI_4),
        (OmpiCluster, {**SLURM, **OPEN_MPI_4}),  # mpirun inside a job of SLURM
        (GkeTpuCluster, GKE),
        (GkeTpuCluster, SLICES),
        (GkeTpuCluster, {**GKE, "TPU_PROCESS_ADDRESSES": "10.0.0.7:8471,10.0.0.8:8471"}),
    ],
)
def test_it_agrees_with_jax(cluster, environ, monkeypatch):
    found = find_processes(environ)
    assert (found.coordinator, found.count, found.index) == by_jax(cluster, environ, monkeypatch)


def test_ipv6_of_open_mpi():
    found = find_processes({**OPEN_MPI_4, **IPV6})
    assert found.address == ("fe80::b9b:ac5d:9cf0:b858", 61440 + 1314521088 // 4096 % 4096)


def test_open_mpi_5_names_the_host_of_mpirun_in_its_job():
    environ = {name: value for name, value in OPEN_MPI_4.items() if name != "OMPI_MCA_orte_hnp_uri"}
    found = find_processes({**environ, "PMIX_NAMESPACE": "prterun-gpu-node-7-12345@1"})
    assert found == Processes(f"gpu-node-7:{61440 + 12345 % 4096}", 3, 1, local_index=1)
    with pytest.raises(UserError, match=r"PMIX_NAMESPACE.*JAX_COORDINATOR_ADDRESS"):
        find_processes(environ)
    assert find_processes({**environ, "JAX_COORDINATOR_ADDRESS": "a:1"}).coordinator == "a:1"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node[03-05,9],other", ["node03", "node04", "node05", "node9", "other"]),
        ("a", ["a"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("x[7]-ib,y", ["x7-ib", "y"]),
    ],
)
def test_node_lists(text, nodes):
    assert expand_nodes(text) == nodes


def test_processes_share_the_gpus_of_a_machine_only_where_there_are_several():
    nodes = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_LOCALID": "1"}
    assert find_processes({**SLURM, **nodes}).local_index == 1
    assert find_processes({**SLURM, **nodes, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}).local_index is None
    assert find_processes({**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}).local_index is None


def test_who_decides():
    assert find_processes({**SLURM, **GKE, **JAX}) == Processes("10.0.0.1:1234", 4, 3)
    flags = ProcessFlags("a:1", 2, 1, timeout=7.0)
    assert find_processes({**SLURM, **JAX}, flags) == Processes("a:1", 2, 1, 7.0)
    assert find_processes(JAX, ProcessFlags(timeout=9.0)) == Processes("10.0.0.1:1234", 4, 3, 9.0)
    assert find_processes(JAX, ProcessFlags(count=1)) == Processes()
    assert find_processes({**SLURM, "JAX_COORDINATOR_ADDRESS": "b:2"}) == Processes("b:2", 4, 2)


def test_the_index_of_a_kubernetes_job_is_its_completion_index():
    environ = {"JAX_COORDINATOR_ADDRESS": "job-0.svc:8476", "JAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "3"}
    assert find_processes(environ) == Processes("job-0.svc:8476", 4, 3)
    del environ["JOB_COMPLETION_INDEX"]
    environ = {"TPU_WORKER_HOSTNAMES": "a,b", "JOB_COMPLETION_INDEX": "1"}
    assert find_processes(environ) == Processes("a:8482", 2, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"JAX_NUM_PROCESSES": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {name: value for name, value in SLURM.items() if "STEP" not in name},  # a batch script, outside srun
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_a_single_process(environ):
    assert find_processes(environ) == Processes()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**JAX, "JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID is 4, but JAX_NUM_PROCESSES is 4"),
        ({**JAX, "JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID is 'x'; it must be a number"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "the coordinator is '10.0.0.1'; give HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is not set"),
        ({"JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES is not set"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS is not set"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID are not set"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID is 4, but SLURM_NTASKS is 4"),
        ({**SLURM, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[a-b]"}, "SLURM_STEP_NODELIST is 'node"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is not set"),
        ({**GKE, "TPU_WORKER_ID": "2"}, "TPU_WORKER_ID is 2, but TPU_WORKER_HOSTNAMES names 2 hosts"),
        ({**GKE, "MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_COORDINATOR_ADDRESS is not set"),
    ],
)
def test_settings_that_contradict_each_other_or_lack_something_are_named(environ, message):
    with pytest.raises(UserError, match=message):
        find_processes(environ)


def test_flags_are_taken_out_of_a_command_line():
    arguments = ["dates", "--processes.coordinator", "a:1", "--steps", "3", "--processes.count=2"]
    arguments += ["--processes.index", "1", "--processes.timeout=2.5", "--seed=4"]
    assert take_process_flags(arguments) == (ProcessFlags("a:1", 2, 1, 2.5), ["dates", "--steps", "3", "--seed=4"])
    assert take_process_flags(["--steps", "3"]) == (ProcessFlags(), ["--steps", "3"])
    assert FLAG_HELP.keys() == vars(ProcessFlags()).keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes.cuont", "2"], "unknown flag --processes.cuont; use one of --processes.coordinator"),
        (["--processes.count"], "--processes.count needs a value: --processes.count N"),
        (["--processes.count", "two"], "--processes.count is 'two'; it must be a number"),
        (["--processes.count=2", "--processes.count", "3"], "--processes.count is given twice"),
        (["--processes.count=2"], "--processes.coordinator HOST:PORT is missing beside --processes.count"),
        (["--processes.coordinator=a:1", "--processes.count=2"], "--processes.index I is missing"),
        (
            ["--processes.coordinator=a:1", "--processes.count=2", "--processes.index=2"],
            "--processes.index is 2, but --processes.count is 2",
        ),
        (["--processes.coordinator=a", "--processes.count=2", "--processes.index=0"], "the coordinator is 'a'"),
        (["--processes.timeout=0"], "0.0 seconds; it must be positive"),
    ],
)
def test_flags_that_are_wrong(arguments, message):
    with pytest.raises(UserError, match=message):
        find_processes({}, take_process_flags(arguments)[0])


def test_addresses():
    assert split_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("::1:80", "host", "host:", ":80", "host:http", "host:70000"):
        with pytest.raises(UserError, match="give HOST:PORT"):
            split_address(text)


def test_a_cloud_tpu_machine_asks_its_metadata_server_and_others_do_not(monkeypatch):
    asked = []
    monkeypatch.setattr(GceTpuCluster, "is_env_present", lambda: asked.append(1) or True)
    monkeypatch.setattr(GceTpuCluster, "get_coordinator_address", lambda *arguments: "10.1.2.3:8482")
    monkeypatch.setattr(GceTpuCluster, "get_process_count", lambda: 8)
    monkeypatch.setattr(GceTpuCluster, "get_process_id", lambda: 5)
    assert find_processes({}) == Processes("10.1.2.3:8482", 8, 5)
    assert len(asked) == 1
    for environ in (GKE, JAX, {"JAX_PLATFORMS": "cpu"}, {"TPU_SKIP_MDS_QUERY": "1"}):
        find_processes(environ)
    assert len(asked) == 1
