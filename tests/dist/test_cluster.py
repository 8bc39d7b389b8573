"""The environment says who trains together; a process that is alone stays alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from farspan.dist import cluster
from farspan.dist.cluster import (
    Membership,
    find_membership,
    first_slurm_host,
    share_of_gpus,
)

ALONE = Membership()
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09],login",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "12",
}
LAUNCH = {
    "FARSPAN_COORDINATOR": "127.0.0.1:5",
    "FARSPAN_NUM_PROCESSES": "4",
    "FARSPAN_PROCESS_ID": "3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
JOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JAX_COORDINATOR_ADDRESS": "run-workers-0-0.run",
    "JAX_NUM_PROCESSES": "8",
    "JOB_COMPLETION_INDEX": "5",
}


def find(environ: dict[str, str], *, tpu: bool = False) -> Membership:
    return find_membership(environ, lambda: tpu)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**LAUNCH, "FARSPAN_NUM_PROCESSES": "1", "FARSPAN_PROCESS_ID": "0"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # one task, or salloc's interactive step
        without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),  # the batch script itself
        without(SLURM, "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),  # a login shell
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        without(JOB, "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"),  # independent pods
        {"JAX_COORDINATOR_ADDRESS": "host:1"},
    ],
)
def test_one_process_is_alone(environ: dict[str, str]) -> None:
    assert find(environ) == ALONE


def test_farspans_own_launcher_comes_before_the_cluster_it_runs_in() -> None:
    expected = Membership("farspan launch", 3, 4, "127.0.0.1:5", 3, 4)
    assert find({**SLURM, **LAUNCH}) == expected


def test_a_slurm_step_says_everything() -> None:
    found = find(SLURM)
    assert (found.found, found.index, found.count) == ("Slurm", 9, 12)
    assert (found.local_index, found.local_count) == (1, 3)
    host, port = found.coordinator.split(":")
    assert host == "gpu07"
    assert 61440 <= int(port) < 65536
    assert find({**SLURM, "SLURM_PROCID": "0"}).coordinator == found.coordinator
    assert find({**SLURM, "SLURM_STEP_ID": "1"}).coordinator != found.coordinator


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[3-5,9]", "n3"),
        ("n[003,7],m1", "n003"),
        ("rack[1-2]n[4-5]", "rack1n4"),
        ("n[1-2]-ib,x", "n1-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


def test_kubernetes_jobs_and_spelled_out_variables() -> None:
    assert find(JOB) == Membership("Kubernetes", 5, 8, "run-workers-0-0.run:8476")
    gpu = {"JAX_COORDINATOR_IP": "a", "JAX_COORDINATOR_PORT": "7", "NNODES": "2", "NODE_RANK": "1"}
    assert find(gpu) == Membership("JAX_COORDINATOR_ADDRESS", 1, 2, "a:7")
    with pytest.raises(ValueError, match="set JAX_PROCESS_ID"):
        find(without(JOB, "JOB_COMPLETION_INDEX"))


def test_open_mpi_on_one_host_on_several_and_where_the_launcher_is_unknown() -> None:
    one_host = find({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert one_host.coordinator.startswith("127.0.0.1:")
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    found = find({**OPEN_MPI, **uri})
    assert found.coordinator.startswith("10.96.0.1:")
    assert (found.found, found.index, found.count, found.local_count) == ("Open MPI", 2, 4, 2)
    with pytest.raises(ValueError, match="mpirun -x JAX_COORDINATOR_ADDRESS"):
        find(OPEN_MPI)
    said = find({**OPEN_MPI, "JAX_COORDINATOR_ADDRESS": "head:9"})
    assert said.coordinator == "head:9"


def test_tpu_hosts_are_counted_and_the_rest_is_left_to_jax(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find({"TPU_WORKER_HOSTNAMES": "a,b"}) == ALONE  # no TPU here
    assert find({"TPU_WORKER_HOSTNAMES": "localhost"}, tpu=True) == ALONE
    assert find({"TPU_WORKER_HOSTNAMES": "a,b"}, tpu=True) == Membership("Cloud TPU", count=2)
    slices = {"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "3"}
    assert find(slices, tpu=True).count == 6
    path = tmp_path / "addresses"
    path.write_text("a,b,c")
    assert find({"TPU_PROCESS_ADDRESSES_PATH": str(path)}, tpu=True).count == 3
    monkeypatch.setattr(
        cluster,
        "_metadata",
        {"worker-network-endpoints": "x,y,z,w", "tpu-env": "MEGASCALE_NUM_SLICES: '2'\n"}.get,
    )
    assert find({}, tpu=True).count == 8
    assert find({"TPU_SKIP_MDS_QUERY": "1"}, tpu=True) == ALONE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"FARSPAN_PROCESS_ID": "4"}, "got index 4 of 4"),
        ({"FARSPAN_PROCESS_ID": "x"}, "FARSPAN_PROCESS_ID must be a whole number, got 'x'"),
        ({"FARSPAN_NUM_PROCESSES": ""}, "FARSPAN_NUM_PROCESSES must be a whole number"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find({**LAUNCH, **changes})


def test_the_processes_of_a_host_share_its_gpus_out() -> None:
    launched = Membership("farspan launch", 1, 4, "x:1", 1, 4)
    assert share_of_gpus({}, launched, 8) == range(2, 4)
    assert share_of_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, launched, 8) == range(1, 2)
    assert share_of_gpus({}, launched, 0) is None
    assert share_of_gpus({}, Membership("Slurm", 1, 4, "x:1"), 8) is None  # one process a host
    assert share_of_gpus({"JAX_LOCAL_DEVICE_IDS": "3"}, launched, 8) is None
    bound = Membership("Slurm", 1, 4, "x:1", 1, 4)
    given = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}
    assert share_of_gpus(given, bound, 8) is None
    assert share_of_gpus(
        {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, bound, 8
    ) == range(1, 2)
    with pytest.raises(ValueError, match="4 processes and 6 GPUs"):
        share_of_gpus({}, launched, 6)
