"""Eight virtual CPU devices for every test, in each test process."""

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import pytest

NUM_DEVICES = 8

# jax starts its backends at first use, so none of this comes too late. The platform also holds for
# processes that tests start; the number of devices does not: such a process must find its own, as
# it must on a user's machine.
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

# Tokenised data of the tests, for all test processes, which inherit it; gone afterwards.
if not os.environ.get("FARSPAN_TEST_CACHE_DIR"):
    os.environ["FARSPAN_TEST_CACHE_DIR"] = tempfile.mkdtemp(prefix="farspan-test-")
    atexit.register(shutil.rmtree, os.environ["FARSPAN_TEST_CACHE_DIR"], ignore_errors=True)
os.environ["FARSPAN_CACHE_DIR"] = os.environ["FARSPAN_TEST_CACHE_DIR"]

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

_register_dataclass = jax.tree_util.register_dataclass


def _register_unchecked(nodetype: type, *args: Any, **kwargs: Any) -> type:
    # jax rebuilds registered dataclasses around placeholders, which no shape annotation admits:
    # jaxtyping must leave their constructors alone.
    nodetype.__no_type_check__ = True  # type: ignore[attr-defined]
    return _register_dataclass(nodetype, *args, **kwargs)


jax.tree_util.register_dataclass = _register_unchecked


def pytest_sessionstart() -> None:
    """Starts the devices, so that no test that comes first can make more of them."""
    assert jax.device_count() == NUM_DEVICES


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs between runs and shares them between test processes."""
    cache = getattr(config, "cache", None)  # absent under `-p no:cacheprovider`
    if cache is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    # A bounded cache is one that jax locks, so that no process reads what another is writing.
    jax.config.update("jax_compilation_cache_max_size", 2 * 1024**3)


# Threads that last as long as the process: fsspec's loop, the lifeline of processes, which only
# listens.
_LASTING_THREADS = ("fsspecIO", "farspan-lifeline")
_LONGEST_END_SECONDS = 30.0


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    """Fails a test whose threads work on after it, beside whatever test comes next.

    Annotations are checked on random items, drawn from Python's one generator; hypothesis fails a
    test during which another thread drew from it.
    """
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name not in _LASTING_THREADS]
    for thread in left:
        thread.join(_LONGEST_END_SECONDS)
    working = sorted(thread.name for thread in left if thread.is_alive())
    assert not working, f"close what this test opened: its threads {working} work on"


def pytest_report_header() -> str:
    """Names the jax under test."""
    return f"jax {jax.__version__} on {jax.device_count()} devices"
