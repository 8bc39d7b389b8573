"""Finds out, from the environment, whether this process is one of several that train together.

Only variables are read; on a host with a TPU that nothing else describes, also Google's metadata
server. A single process, one Slurm task, and a shell inside an allocation are alone.
"""

from __future__ import annotations

import re
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ALONE = "alone"
COORDINATOR = "FARSPAN_COORDINATOR"
NUM_PROCESSES = "FARSPAN_NUM_PROCESSES"
PROCESS_ID = "FARSPAN_PROCESS_ID"
_PORTS = 61440, 4096  # above the ports that systems give out by themselves
_JOB_PORT = 8476
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_METADATA_TIMEOUT_SECONDS = 3


@dataclass(frozen=True)
class Membership:
    """One process's place among those that train together.

    Attributes:
      found: What the environment was recognised as.
      index: This process, from 0.
      count: Processes in all.
      coordinator: `host:port` at which process 0 answers. Empty: JAX finds coordinator, index and
        count by itself, as it does on Cloud TPU.
      local_index: This process among those of its host.
      local_count: Processes of its host.
    """

    found: str = ALONE
    index: int = 0
    count: int = 1
    coordinator: str = ""
    local_index: int = 0
    local_count: int = 1


def find_membership(environ: Mapping[str, str], tpu_is_here: Callable[[], bool]) -> Membership:
    """Recognises the launcher or cluster that started this process.

    Args:
      environ: The environment variables.
      tpu_is_here: Whether this host has a TPU; asked only when nothing else is found.

    Returns:
      The place of this process; `Membership()` when it is alone.

    Raises:
      ValueError: The variables contradict one another, or lack the address of process 0.
    """
    for find in (_farspan_launch, _explicit, _slurm, _open_mpi):
        found = find(environ)
        if found is not None:
            return _checked(found)
    return _cloud_tpu(environ, tpu_is_here)


def _farspan_launch(environ: Mapping[str, str]) -> Membership | None:
    if COORDINATOR not in environ:
        return None
    index, count = _number(environ, PROCESS_ID), _number(environ, NUM_PROCESSES)
    return Membership("farspan launch", index, count, environ[COORDINATOR], index, count)


def _explicit(environ: Mapping[str, str]) -> Membership | None:
    """What a user, a Kubernetes manifest, xpk or Kubeflow spells out."""
    count = _first(environ, "JAX_NUM_PROCESSES", "NNODES")
    address = _first(environ, "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
    if not count or not address:
        return None
    index = _first(environ, "JAX_PROCESS_ID", "NODE_RANK", "JOB_COMPLETION_INDEX")
    if not index:
        raise ValueError(
            "processes: JAX_COORDINATOR_ADDRESS and the number of processes need this process's "
            f"index, got {address} and {count} and none; set JAX_PROCESS_ID, or run a Kubernetes "
            'Job with completionMode "Indexed"'
        )
    kind = "Kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else "JAX_COORDINATOR_ADDRESS"
    return Membership(
        kind,
        _number(environ, index),
        _number(environ, count),
        _with_port(environ, environ[address]),
    )


def _slurm(environ: Mapping[str, str]) -> Membership | None:
    """A task of an srun step. The batch script itself, and an interactive step, have one task."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if any(name not in environ for name in needed):
        return None
    count = _number(environ, "SLURM_STEP_NUM_TASKS")
    if count == 1:
        return Membership()
    step = environ.get("SLURM_STEP_ID", "0")
    key = int(environ["SLURM_JOB_ID"]) * 16 + (int(step) if step.isdigit() else 0)
    host = first_slurm_host(environ["SLURM_STEP_NODELIST"])
    tasks = _slurm_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Membership(
        "Slurm",
        _number(environ, "SLURM_PROCID"),
        count,
        _with_port(environ, environ.get("JAX_COORDINATOR_ADDRESS", host), _port_from(key)),
        int(environ.get("SLURM_LOCALID", "0")),
        tasks[min(int(environ.get("SLURM_NODEID", "0")), len(tasks) - 1)],
    )


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm list such as `node[003-007,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _slurm_tasks_per_node(text: str) -> list[int]:
    """The numbers in Slurm's `2(x3),1`: 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _open_mpi(environ: Mapping[str, str]) -> Membership | None:
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    if size is None:
        return None
    count = _number(environ, "OMPI_COMM_WORLD_SIZE")
    if count == 1:
        return Membership()
    local_count = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # Open MPI 4: where mpirun itself runs
    launcher = re.search(r"tcp6?://\[?([^,\]/]+?)[,\]:]", uri)
    if "JAX_COORDINATOR_ADDRESS" in environ:
        host = environ["JAX_COORDINATOR_ADDRESS"]
    elif local_count == count:
        host = "127.0.0.1"
    elif launcher:
        host = launcher[1]
    else:
        raise ValueError(
            "processes: Open MPI over several hosts does not say where process 0 runs, got "
            f"OMPI_COMM_WORLD_SIZE={count} with {local_count} here; use mpirun -x "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT"
        )
    job = uri.partition(".")[0] or environ.get("PMIX_NAMESPACE", "")
    return Membership(
        "Open MPI",
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        count,
        _with_port(environ, host, _port_from(zlib.crc32(job.encode()))),
        int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")),
        local_count,
    )


def _cloud_tpu(environ: Mapping[str, str], tpu_is_here: Callable[[], bool]) -> Membership:
    if not tpu_is_here():
        return Membership()
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    if path := environ.get("TPU_PROCESS_ADDRESSES_PATH"):
        hosts: str | None = Path(path).read_text(encoding="utf-8")
    else:
        hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environ:
        hosts = _metadata("worker-network-endpoints")
        slices = max(slices, int(_tpu_env().get("MEGASCALE_NUM_SLICES") or 1))
    count = slices * len((hosts or "here").split(","))
    return Membership("Cloud TPU", count=count) if count > 1 else Membership()


def _tpu_env() -> dict[str, str]:
    lines = [line.partition(":") for line in _metadata("tpu-env").splitlines()]
    return {key.strip(): value.strip().strip("'") for key, _, value in lines}


def _metadata(key: str) -> str:
    """A value of Google's metadata server, or nothing where there is none."""
    request = urllib.request.Request(_METADATA + key, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_TIMEOUT_SECONDS) as reply:
            return reply.read().decode()
    except OSError:
        return ""


def share_of_gpus(
    environ: Mapping[str, str], member: Membership, num_gpus: int
) -> Sequence[int] | None:
    """Which of the GPUs that this process sees are its own, when a host has several processes.

    Args:
      environ: The environment variables.
      member: The place of this process.
      num_gpus: GPUs of this host, 0 where there are none.

    Returns:
      Indices of its GPUs; None when all that it sees are its own.

    Raises:
      ValueError: The GPUs cannot be shared out evenly.
    """
    if not num_gpus or member.local_count == 1 or "JAX_LOCAL_DEVICE_IDS" in environ:
        return None
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    seen = num_gpus if listed is None else len([name for name in listed.split(",") if name])
    given = int(environ.get("SLURM_GPUS_ON_NODE") or num_gpus)
    if member.found == "Slurm" and seen < given:
        return None  # Slurm has bound GPUs to tasks
    if seen % member.local_count:
        raise ValueError(
            "processes: the processes of a host must share its GPUs evenly, got "
            f"{member.local_count} processes and {seen} GPUs; start a number of processes that "
            "divides the GPUs"
        )
    share = seen // member.local_count
    return range(member.local_index * share, (member.local_index + 1) * share)


def _checked(member: Membership) -> Membership:
    if not 0 <= member.index < member.count:
        raise ValueError(
            f"processes: the index must be from 0 to below the number of processes, got index "
            f"{member.index} of {member.count} ({member.found}); correct the variables"
        )
    return member if member.count > 1 else Membership()


def _with_port(environ: Mapping[str, str], address: str, port: int = _JOB_PORT) -> str:
    if re.search(r"[^:]:\d+$|\]:\d+$", address):
        return address
    return f"{address}:{environ.get('JAX_COORDINATOR_PORT') or port}"


def _port_from(key: int) -> int:
    first, count = _PORTS
    return first + key % count


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set, or nothing."""
    return next((name for name in names if environ.get(name)), "")


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        raise ValueError(f"processes: {name} must be a whole number, got {value!r}; correct it")
    return int(value)
