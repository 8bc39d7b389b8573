"""Inputs broken in one way each, and what a run must do with them (`soak.py`)."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Launches(Protocol):
    """Starts a run of the small model."""

    folder: Path

    def start(self, run_dir: Path, flags: list[str]) -> subprocess.Popen[str]: ...


@dataclass(frozen=True)
class Attempt:
    """What became of one broken input."""

    name: str
    survived: bool
    said: str

    def __str__(self) -> str:
        return f"{'survived' if self.survived else 'FAILED'}  {self.name}: {self.said}"


@dataclass(frozen=True)
class Scene:
    """Where one input is broken.

    Attributes:
      corpus: The whole corpus.
      folder: A folder for this input alone.
      run_dir: A copy of a run of six steps.
    """

    corpus: Path
    folder: Path
    run_dir: Path


Case = Callable[[Launches, Scene], Attempt]
Break = Callable[[Scene], list[str]]
"""Breaks something; returns flags."""

REFUSED = (1, 2)
CASES: dict[str, Case] = {}


def make_corpus(path: Path, documents: int = 300) -> Path:
    """Writes JSON lines of documents of mixed lengths, always the same."""
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            length = int(draw.lognormvariate(3.0, 1.0)) + 1
            text = " ".join(draw.choice(words) for _ in range(length))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def refused(name: str, *words: str, new_run: bool = False) -> Callable[[Break], Break]:
    """Registers a break that a run must refuse with an error that holds `words`.

    Args:
      name: What is broken.
      *words: What the error must name.
      new_run: Whether a new run is started, rather than the copy resumed.
    """

    def register(breaks: Break) -> Break:
        def attempt(launches: Launches, scene: Scene) -> Attempt:
            run_dir, new = scene.run_dir, scene.folder / "new"
            flags = ["--data", str(scene.corpus), "--steps", "9", *breaks(scene)]
            before = _contents(run_dir)
            output, status = _run(launches, new if new_run else run_dir, flags)
            errors = [line for line in output.splitlines() if line.startswith("error: ")]
            said = errors[-1] if errors else output[-500:]
            fine = (
                status in REFUSED
                and len(errors) == 1
                and "Traceback" not in output
                and all(word in said for word in words)
                and _contents(run_dir) == before
                and _steps(new) == 0
            )
            return Attempt(name, fine, f"status {status}, {said}")

        CASES[name] = attempt
        return breaks

    return register


def mended(name: str) -> Callable[[Break], Break]:
    """Registers a break by which nothing is lost: the run must go on, as if nothing had been."""

    def register(breaks: Break) -> Break:
        def attempt(launches: Launches, scene: Scene) -> Attempt:
            run_dir, whole = scene.run_dir, scene.folder / "whole"
            shutil.copytree(run_dir, whole)
            flags = ["--data", str(scene.corpus), "--steps", "9"]
            wanted_output, wanted = _run(launches, whole, flags)
            flags += breaks(scene)
            output, status = _run(launches, run_dir, flags)
            same = _losses(whole) == _losses(run_dir)
            fine = wanted == 0 and status == 0 and same and "Traceback" not in output
            said = "went on, same losses" if fine else (wanted_output + output)[-1500:]
            return Attempt(name, fine, said)

        CASES[name] = attempt
        return breaks

    return register


def _run(launches: Launches, run_dir: Path, flags: list[str]) -> tuple[str, int]:
    process = launches.start(run_dir, flags)
    output = process.communicate()[0]
    return output, process.returncode


def _contents(folder: Path) -> dict[str, bytes]:
    """Checkpoints and configuration."""
    files = [*(folder / "checkpoints").rglob("*"), *folder.glob("config.json")]
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(files) if path.is_file()
    }


def _losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _data(folder: Path, name: str, content: bytes) -> list[str]:
    path = folder / name
    path.write_bytes(content)
    return ["--data", str(path)]


@refused("a path that is not there", "nowhere.jsonl", new_run=True)
def _missing(scene: Scene) -> list[str]:
    return ["--data", str(scene.folder / "nowhere.jsonl")]


@refused("a folder without text", "empty", new_run=True)
def _empty_folder(scene: Scene) -> list[str]:
    (scene.folder / "empty").mkdir()
    return ["--data", str(scene.folder / "empty")]


@refused("a JSON line that is cut short", "cut.jsonl:301", new_run=True)
def _bad_line(scene: Scene) -> list[str]:
    return _data(scene.folder, "cut.jsonl", scene.corpus.read_bytes() + b'{"text": "half')


@refused("JSON lines without text", "fields.jsonl:1", "content", new_run=True)
def _no_text(scene: Scene) -> list[str]:
    return _data(scene.folder, "fields.jsonl", b'{"content": "text"}\n')


@refused("text that is not UTF-8", "latin.txt", "0xe9", new_run=True)
def _latin(scene: Scene) -> list[str]:
    return _data(scene.folder, "latin.txt", "caf\xe9 ".encode("latin-1") * 1000)


@refused("a binary file", "binary.txt", "NUL", new_run=True)
def _binary(scene: Scene) -> list[str]:
    return _data(scene.folder, "binary.txt", b"text\0text" * 1000)


@refused("a gzip file that is cut short", "cut.jsonl.gz", new_run=True)
def _short_gzip(scene: Scene) -> list[str]:
    return _data(scene.folder, "cut.jsonl.gz", gzip.compress(scene.corpus.read_bytes())[:-1000])


@refused("a Parquet file that is cut short", "cut.parquet", new_run=True)
def _short_parquet(scene: Scene) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    path = scene.folder / "cut.parquet"
    texts = [json.loads(line)["text"] for line in scene.corpus.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    path.write_bytes(path.read_bytes()[:-100])
    return ["--data", str(path)]


@refused("a gzip file that is cut short, streamed", "cut.jsonl.gz", new_run=True)
def _short_stream(scene: Scene) -> list[str]:
    flags = _data(scene.folder, "cut.jsonl.gz", gzip.compress(scene.corpus.read_bytes())[:-1000])
    return [*flags, "--streaming"]


@refused("a tokenizer that is none", "tokenizer.json", new_run=True)
def _bad_tokenizer(scene: Scene) -> list[str]:
    path = scene.folder / "tokenizer.json"
    path.write_text('{"version": "1.0", "model": {}}')
    return ["--tokenizer", str(path)]


@refused("a conversation without roles", "chat.jsonl:1", new_run=True)
def _bad_chat(scene: Scene) -> list[str]:
    return _data(scene.folder, "chat.jsonl", b'{"messages": [{"content": "hello"}]}\n')


@refused("a mixture with a weight below zero", "weight", new_run=True)
def _bad_mixture(scene: Scene) -> list[str]:
    text = f'[[source]]\ndata = "{scene.corpus}"\nweight = -1\n'
    return _data(scene.folder, "mixture.toml", text.encode())


@refused("other data under a run", "data")
def _other_data(scene: Scene) -> list[str]:
    return _data(scene.folder, "other.jsonl", scene.corpus.read_bytes().replace(b"alpha", b"omega"))


def _settings(*flags: str) -> Break:
    return lambda _: list(flags)


refused("another seed under a run", "seed")(_settings("--seed", "1"))
refused("another model under a run", "model_dim")(_settings("--model-dim", "64"))
refused("another optimizer under a run", "checkpoint")(_settings("--optimizer", "muon"))


def _files_of_newest(run_dir: Path) -> Iterator[Path]:
    newest = run_dir / "checkpoints" / "6"
    return (path for path in sorted(newest.rglob("*")) if path.is_file())


@refused("a checkpoint whose arrays are cut short", "checkpoint", "checkpoints/6")
def _short_checkpoint(scene: Scene) -> list[str]:
    for path in _files_of_newest(scene.run_dir):
        if path.parent.name == "d":  # arrays
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return []


@refused("a checkpoint with flipped bits", "checkpoint", "checkpoints/6")
def _flipped_checkpoint(scene: Scene) -> list[str]:
    largest = max(_files_of_newest(scene.run_dir), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 64):
        content[place] ^= 0xFF
    largest.write_bytes(bytes(content))
    return []


@refused("a checkpoint without its metadata", "checkpoint", "checkpoints/6")
def _no_metadata(scene: Scene) -> list[str]:
    for path in _files_of_newest(scene.run_dir):
        if path.name == "_METADATA":
            path.unlink()
    return []


@refused("a checkpoint without its place in the data", "checkpoint", "checkpoints/6")
def _no_loader(scene: Scene) -> list[str]:
    shutil.rmtree(scene.run_dir / "checkpoints" / "6" / "loader")
    return []


@refused("a foreign folder among the checkpoints", "checkpoint", "checkpoints/99")
def _foreign(scene: Scene) -> list[str]:
    (scene.run_dir / "checkpoints" / "99").mkdir()
    (scene.run_dir / "checkpoints" / "99" / "model.bin").write_bytes(b"weights")
    return ["--steps", "200"]


@refused("a file in place of the checkpoints", "folder", new_run=True)
def _file_for_folder(scene: Scene) -> list[str]:
    (scene.folder / "new").mkdir()
    (scene.folder / "new" / "checkpoints").write_bytes(b"")
    return []


@mended("a metrics file whose last line is torn")
def _torn_metrics(scene: Scene) -> list[str]:
    with (scene.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    return []


@mended("a save that was killed")
def _killed_save(scene: Scene) -> list[str]:
    leftover = scene.run_dir / "checkpoints" / "9.orbax-checkpoint-tmp-1"
    shutil.copytree(scene.run_dir / "checkpoints" / "6", leftover)
    return []


@mended("token caches that are cut short")
def _short_caches(scene: Scene) -> list[str]:
    cache = scene.run_dir.parents[2] / "cache"
    copy = scene.folder / "cache"
    shutil.copytree(cache, copy)
    for path in copy.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return ["--cache-dir", str(copy)]
