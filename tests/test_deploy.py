"""The files for clusters: scripts that run against stand-ins of srun and gcloud, and environments that are detected."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from transformer_jax.parallel.processes import Processes, find_processes

DEPLOY = Path(__file__).parent.parent / "deploy"
RECORD = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    json.dump({"program": os.path.basename(sys.argv[0]), "arguments": sys.argv[1:], "environ": dict(os.environ)}, file)
    file.write("\\n")
sys.exit(int(os.environ.get("CODE_" + os.path.basename(sys.argv[0]).upper(), "0")))
"""


@pytest.fixture
def run(tmp_path):
    """Run bash with programs that only note what they are asked to do; returns the exit code and the notes."""

    def run(*arguments, programs, **environ):
        for name in programs:
            (tmp_path / name).write_text(RECORD)
            (tmp_path / name).chmod(0o755)
        record = tmp_path / "record.jsonl"
        record.write_text("")
        known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(record), "HOME": str(tmp_path)}
        ended = subprocess.run(["bash", *map(str, arguments)], env={**known, **environ}, timeout=60)
        return ended.returncode, [json.loads(line) for line in record.read_text().splitlines()]

    return run


def calls(notes):
    return [(note["program"], note["arguments"]) for note in notes]


@pytest.mark.parametrize("name", ["slurm.sbatch", "cloud_tpu.sh"])
def test_scripts_are_bash(name):
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [(0, 0, False), (1, 0, False), (2, 0, False), (75, 0, True), (143, 3, True), (137, 0, True), (143, 20, False)],
)
def test_slurm_starts_again_what_can_go_on(run, code, restarts, is_requeued):
    environ = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(restarts), "CODE_SRUN": str(code)}
    script = DEPLOY / "slurm.sbatch"
    returned, notes = run(script, "dates", "--workdir", "my runs", programs=["srun", "scontrol"], **environ)
    command = ["--kill-on-bad-exit=0", "python", "-m", "transformer_jax", "train", "dates", "--workdir", "my runs"]
    assert returned == code
    assert calls(notes) == [("srun", command), *([("scontrol", ["requeue", "77"])] if is_requeued else [])]


def test_slurm_processes_are_found():
    text = (DEPLOY / "slurm.sbatch").read_text()
    options = dict(line.split()[1][2:].split("=") for line in text.splitlines() if line.startswith("#SBATCH --n"))
    count = int(options["nodes"]) * int(options["ntasks-per-node"])
    environ = {"SLURM_JOB_ID": "4097", "SLURM_NTASKS": str(count), "SLURM_STEP_NODELIST": f"gpu[01-{count:02}]"}
    found = [find_processes({**environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": "0"}) for i in range(count)]
    assert found == [Processes("gpu01:61441", 2, 0), Processes("gpu01:61441", 2, 1)]


def test_the_pods_of_a_jobset_are_found():
    jobset = yaml.safe_load((DEPLOY / "gke-jobset.yaml").read_text())
    assert jobset["kind"] == "JobSet" and jobset["spec"]["network"]["enableDNSHostnames"]
    [job] = jobset["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    [container] = pod["containers"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = spec["completions"] * container["resources"]["limits"]["google.com/tpu"]
    assert chips == math.prod(map(int, topology.split("x")))
    name = f"{jobset['metadata']['name']}-{job['name']}"
    hosts = [f"{name}-0-{i}.{jobset['metadata']['name']}" for i in range(spec["completions"])]
    environ = {"TPU_WORKER_HOSTNAMES": ",".join(hosts)}
    for index in range(spec["completions"]):
        found = find_processes({**environ, "TPU_WORKER_ID": str(index), "JOB_COMPLETION_INDEX": str(index)})
        assert found == Processes(f"{hosts[0]}:8482", len(hosts), index)
        assert found.address[1] in [port["containerPort"] for port in container["ports"]]
    mounted = [volume["mountPath"] for volume in container["volumeMounts"]]
    workdir = container["command"][container["command"].index("--workdir") + 1]
    assert any(workdir.startswith(f"{path}/") for path in mounted)


def test_sky_processes_are_found(run):
    task = yaml.safe_load((DEPLOY / "sky.yaml").read_text())
    nodes = ["10.0.0.4", "10.0.0.5"]
    assert task["num_nodes"] == len(nodes)
    for index in range(len(nodes)):
        sky = {"SKYPILOT_NODE_IPS": "\n".join(nodes), "SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NUM_NODES": "2"}
        code, [note] = run("-c", task["run"], programs=["python"], **sky, **task["envs"])
        assert code == 0 and note["arguments"][:3] == ["-m", "transformer_jax", "train"]
        assert note["arguments"][3:] == task["envs"]["ARGUMENTS"].split()
        assert find_processes(note["environ"]) == Processes("10.0.0.4:8476", 2, index)
        assert task["resources"]["ports"] == 8476


def test_a_cloud_tpu_trains_on_all_its_machines(run):
    script = DEPLOY / "cloud_tpu.sh"
    code, notes = run(script, "pod", "us-west4-a", "dates", "--workdir", "my runs", programs=["gcloud", "tar"])
    assert code == 0
    arguments = [arguments for program, arguments in calls(notes) if program == "gcloud"]
    assert [call[3] for call in arguments] == ["scp", "ssh", "ssh"]
    assert all("--worker=all" in call and "us-west4-a" in call for call in arguments)
    assert arguments[-1][-1] == r"environment/bin/python -m transformer_jax train dates --workdir my\ runs"
    assert run(script, "pod", programs=["gcloud"])[0] == 2
