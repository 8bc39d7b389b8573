"""Kills a run again and again, feeds it broken inputs, and counts what was lost.

    python benchmarks/soak.py                        # 50 kills, all broken inputs; about 15 minutes
    python benchmarks/soak.py --kills 6 --skip-inputs          # two minutes
    python benchmarks/soak.py --kills 10 --processes 2         # each launch is two processes
    python benchmarks/soak.py --kills 50 --json

**Kills.** A small run is trained once without a break. Then the same run is started and killed
(SIGKILL; of several processes, one) at random: while it starts, after some steps, or while a
checkpoint is being written; and started again, until all kills are spent and it is let go to its
end. Half of the kills hit a run that reads a tokenised cache, half one that streams.

    resumes      launches that went on from a checkpoint
    lost         steps of complete checkpoints that a later launch did not go on from, steps missing
                 from the metrics or twice there, and losses that differ from the unbroken run's
    final equal  the last checkpoint's arrays equal those of the unbroken run, bit for bit

**Broken inputs** (`soak_inputs.py`): data, tokenizers, checkpoints, caches and settings, broken in
one way each. A run survives one if it refuses it with an error that names it, before any step and
without a traceback, and leaves the run folder as it was; or, where nothing was lost by it, mends
it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from provenance import headline, provenance
from soak_inputs import CASES, Attempt, Scene, make_corpus

STEPS_PER_KILL = 30
SCENARIOS = {"cache": [], "stream": ["--streaming", "--shuffle-window-rows", "24"]}
SMALL_MODEL = [
    *("--num-layers", "1", "--model-dim", "32", "--num-heads", "2", "--num-kv-heads", "1"),
    *("--head-dim", "16", "--ffn-dim", "64", "--seq-len", "128", "--batch-size", "2"),
    *("--context-parallel-size", "4", "--context-parallel-strategy", "ring"),
    *("--checkpoint-every", "3", "--keep-checkpoints", "3", "--log-every", "1000"),
    *("--ema-decay", "0.9", "--warmup-steps", "5"),
]
POLL_SECONDS = 0.002


@dataclass
class Launcher:
    """Starts runs of one work folder."""

    folder: Path
    processes: int

    def command(self, run_dir: Path, flags: Sequence[str]) -> list[str]:
        farspan = [sys.executable, "-m", "farspan.cli.main"]
        if self.processes > 1:
            farspan += ["launch", "-n", str(self.processes), "--"]
        return [*farspan, "train", "quickstart", *SMALL_MODEL, "--run-dir", str(run_dir), *flags]

    def start(self, run_dir: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "FARSPAN_CACHE_DIR": str(self.folder / "cache"),
        }
        return subprocess.Popen(
            self.command(run_dir, flags),
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


@dataclass
class Soak:
    """What was counted."""

    kills: dict[str, int] = field(
        default_factory=lambda: {"starting": 0, "stepping": 0, "saving": 0}
    )
    resumes: int = 0
    lost: int = 0
    final_equal: bool = True
    problems: list[str] = field(default_factory=list)

    def lose(self, count: int, what: str) -> None:
        self.lost += count
        self.problems.append(what)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soaks, prints what was counted, and returns 1 if anything was lost."""
    options = _parse(arguments)
    report = provenance()
    if not options.json:
        print(headline(report))
    folder = Path(options.work_dir or tempfile.mkdtemp(prefix="farspan-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak, attempts = Soak(), []
    launcher = Launcher(folder, options.processes)
    corpus = make_corpus(folder / "corpus.jsonl")
    share, rest = divmod(options.kills, len(SCENARIOS))
    draw = random.Random(options.seed)
    for index, (name, flags) in enumerate(SCENARIOS.items()):
        kills = share + (index < rest)
        if kills:
            data = ["--data", str(corpus), *flags]
            _kill_scenario(soak, launcher, name, data, kills, draw, options.json)
    if not options.skip_inputs:
        attempts = _try_inputs(Launcher(folder, 1), corpus, options.json)
    survived = sum(attempt.survived for attempt in attempts)
    report |= {
        "processes": options.processes,
        "seed": options.seed,
        "kills": sum(soak.kills.values()),
        "kills_while": soak.kills,
        "resumes": soak.resumes,
        "corrupted_inputs": len(attempts),
        "corrupted_inputs_survived": survived,
        "lost": soak.lost,
        "final_equal": soak.final_equal,
        "problems": soak.problems + [str(attempt) for attempt in attempts if not attempt.survived],
    }
    fine = soak.lost == 0 and soak.final_equal and survived == len(attempts)
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)
    if not options.work_dir and fine:
        shutil.rmtree(folder)
    elif not fine:
        print(f"kept for study: {folder}", file=sys.stderr)
    return int(not fine)


def _kill_scenario(
    soak: Soak,
    launcher: Launcher,
    name: str,
    flags: list[str],
    kills: int,
    draw: random.Random,
    quiet: bool,
) -> None:
    steps = STEPS_PER_KILL * (kills + 1)
    flags = [*flags, "--steps", str(steps)]
    unbroken, run_dir = (launcher.folder / f"{name}-{kind}" for kind in ("unbroken", "killed"))
    begin = time.monotonic()
    _finish(launcher.start(unbroken, flags), "the unbroken run")
    start_seconds = max(2.0, _start_seconds(unbroken, begin))
    for number in range(1, kills + 1):
        mode = draw.choice(("starting", "stepping", "stepping", "saving"))
        before = _newest(run_dir)
        output, killed = _kill_once(launcher, run_dir, flags, mode, start_seconds, draw)
        soak.kills[mode] += killed
        _check_resumed(soak, output, before, f"{name}, kill {number}")
        after = _newest(run_dir)
        if after < before:
            soak.lose(before - after, f"{name}, kill {number}: step {before} is gone, {after} left")
        if not quiet:
            print(f"{name}: kill {number} of {kills} while {mode}, newest step {after}", flush=True)
    before = _newest(run_dir)
    output = _finish(launcher.start(run_dir, flags), "the last launch")
    _check_resumed(soak, output, before, f"{name}, last launch")
    _check_metrics(soak, unbroken, run_dir, steps, name)
    if not _same_arrays(unbroken, run_dir, steps):
        soak.final_equal = False
        soak.problems.append(f"{name}: the final arrays differ")


def _kill_once(
    launcher: Launcher,
    run_dir: Path,
    flags: list[str],
    mode: str,
    start_seconds: float,
    draw: random.Random,
) -> tuple[str, bool]:
    """Starts the run and kills it; gives its output, and whether it was still alive."""
    process = launcher.start(run_dir, flags)
    if mode == "starting":
        time.sleep(draw.uniform(0.1, start_seconds))
    elif mode == "stepping":
        wanted = _lines(run_dir) + draw.randint(1, STEPS_PER_KILL // 2)
        # On its start a run drops the records of steps that it will do again, so wait for it first.
        _wait(process, lambda: (run_dir / "launches.jsonl").exists() and _lines(run_dir) >= wanted)
    else:
        known = _saves_in_flight(run_dir)
        _wait(process, lambda: bool(_saves_in_flight(run_dir) - known))
        time.sleep(draw.uniform(0, 0.05))
    alive = process.poll() is None
    if alive:
        os.kill(_victim(process, launcher.processes, draw), signal.SIGKILL)
    return process.communicate()[0], alive


def _victim(process: subprocess.Popen[str], processes: int, draw: random.Random) -> int:
    """The run's only process, or one of several: the others must then end by themselves."""
    if processes == 1:
        return process.pid
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        found = children.read_text().split()
        if len(found) == processes:
            return int(draw.choice(found))
        time.sleep(POLL_SECONDS)
    return process.pid


def _wait(process: subprocess.Popen[str], ready: Any) -> None:
    while process.poll() is None and not ready():
        time.sleep(POLL_SECONDS)


def _finish(process: subprocess.Popen[str], what: str) -> str:
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"{what} must end well, got status {process.returncode}:\n{output}")
    return output


def _check_resumed(soak: Soak, output: str, newest: int, where: str) -> None:
    """A launch that came so far as to say where it goes on must go on from the newest step."""
    said = [line for line in output.splitlines() if line.startswith("resuming from step ")]
    if said:
        soak.resumes += 1
        step = int(said[0].split()[3])
        if step != newest:
            soak.lose(abs(newest - step), f"{where}: went on from {step}, not from {newest}")
    if "Traceback" in output:
        soak.lose(1, f"{where}: {output[-2000:]}")


def _check_metrics(soak: Soak, unbroken: Path, run_dir: Path, steps: int, name: str) -> None:
    wanted, found = (_losses(folder) for folder in (unbroken, run_dir))
    numbers = [step for step, _ in found]
    if numbers != list(range(1, steps + 1)):
        missing = len(set(range(1, steps + 1)) - set(numbers))
        twice = len(numbers) - len(set(numbers))
        soak.lose(missing + twice, f"{name}: {missing} steps missing, {twice} twice in the metrics")
    different = [a for a, b in zip(wanted, found, strict=False) if a != b]
    if different:
        soak.lose(len(different), f"{name}: losses differ from step {different[0][0]} on")


def _losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def _lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _newest(run_dir: Path) -> int:
    """The newest complete step; a save in flight has another name."""
    folder = run_dir / "checkpoints"
    steps = [int(entry.name) for entry in folder.glob("*") if entry.name.isdigit()]
    return max(steps, default=0)


def _saves_in_flight(run_dir: Path) -> set[str]:
    return {entry.name for entry in (run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*")}


def _start_seconds(run_dir: Path, begin: float) -> float:
    """From the start of a launch to its first step."""
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    return first["time"] - (time.time() - (time.monotonic() - begin))


def _same_arrays(unbroken: Path, run_dir: Path, step: int) -> bool:
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.getLogger("absl").setLevel(logging.ERROR)  # the parts of a checkpoint have no metadata
    import jax
    import orbax.checkpoint as ocp

    def read(folder: Path) -> list[np.ndarray]:
        path = (folder / "checkpoints" / str(step) / "state").resolve()
        checkpointer = ocp.PyTreeCheckpointer()
        tree: Any = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return jax.tree.leaves(checkpointer.restore(path, restore_args=as_numpy))

    pairs = zip(read(unbroken), read(run_dir), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def _try_inputs(launcher: Launcher, corpus: Path, quiet: bool) -> list[Attempt]:
    attempts = []
    whole = launcher.folder / "whole"
    flags = ["--data", str(corpus), "--steps", "6"]
    _finish(launcher.start(whole, flags), "the run whose copies are broken")
    for name, case in CASES.items():
        folder = launcher.folder / "inputs" / name.replace(" ", "-")
        run_dir = folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, run_dir)
        attempt = case(launcher, Scene(corpus, folder, run_dir))
        attempts.append(attempt)
        if not quiet:
            print(attempt, flush=True)
    return attempts


def _print(report: dict[str, Any]) -> None:
    kills = ", ".join(f"{count} while {mode}" for mode, count in report["kills_while"].items())
    print(f"kills             {report['kills']} ({kills}), {report['processes']} process(es)")
    print(f"resumes           {report['resumes']}")
    print(
        f"corrupted inputs  {report['corrupted_inputs']} tried, "
        f"{report['corrupted_inputs_survived']} survived"
    )
    print(f"lost              {report['lost']}")
    print(f"final equal       {'yes' if report['final_equal'] else 'NO'}")
    for problem in report["problems"]:
        print(f"problem: {problem}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="how often a run is killed")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes of each launch: 1, 2, 4"
    )
    parser.add_argument("--skip-inputs", action="store_true", help="leave broken inputs out")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--work-dir", help="keep runs here; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    options = parser.parse_args(arguments)
    if options.kills < 0 or options.processes not in (1, 2, 4):
        parser.error("--kills must be at least 0, and --processes 1, 2 or 4")
    return options


if __name__ == "__main__":
    sys.exit(main())
