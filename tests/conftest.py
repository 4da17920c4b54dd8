"""What all tests share: one thread, one hypothesis profile, a process group of one rank, the folder of real data.

What is written is flushed to disk, which took a third of the suite's time: tests write into memory where there is room.
"""

import gc
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import set_forkserver_preload
from multiprocessing.util import get_temp_dir
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.checks import WARNINGS

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("DNIS_DATA", ROOT.parent / "shared" / "data"))
MEMORY, ROOM = Path("/dev/shm"), 4 << 30
"""Folder of files in memory, and the bytes that have to be free there; a whole suite leaves 60 MB."""
SLOW = {
    *("test_command_ranks", "test_training_ranks", "test_allocation_ranks", "test_selection_ranks"),
    *("test_examples", "test_packaging", "test_delta", "test_damage", "test_commands", "test_docs"),
}
"""Files that take longest: a process that begins one at the end leaves the others without work."""


def _folder_in_memory() -> str | None:
    """Makes the folder, for all that is started, too, unless TMPDIR names one; compiled code stays where it was."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        return None
    get_temp_dir()  # multiprocessing removes its own folder last of all, and would miss it in ours
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="dnis_tests_", dir=MEMORY)
    return tempfile.tempdir


IN_MEMORY = _folder_in_memory()
torch.set_num_threads(1)
set_forkserver_preload(["tests.preload"])  # of no effect once a test has forked
gc.disable()  # while test files import what stays: to look for garbage in it takes a fifth of the time

# Tensors are slow to make the first time, so no deadline; in CI the same examples every time.
hypothesis.settings.register_profile(
    "dnis", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("dnis")


def pytest_configure(config: pytest.Config) -> None:
    """Silences what the package silences: the one list is its own."""
    for message, module in WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:Warning:{module}")


def pytest_collection_finish() -> None:
    """Looks for garbage in what tests make, and not in what was imported."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(exitstatus: int) -> None:
    """Gives the memory back; what a failed test has written can be looked at."""
    if IN_MEMORY is not None and exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(IN_MEMORY, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes longest; skips, with the reason, what needs real data or a GPU that is not here."""
    items.sort(key=lambda item: item.path.stem not in SLOW)
    missing = {}
    if not DATA.is_dir():
        missing["real_data"] = f"needs the publishers' data: no folder {DATA}; name it in DNIS_DATA"
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    for item in items:
        for marker in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[marker]))


@pytest.fixture(scope="session")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """The process group that DistributedModelParallel runs in: gloo, one rank, met through a file instead of a port."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("gloo") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MemoryFileSystem]:
    """Storage in memory (``memory://``), empty before and after and a cache of its own."""
    monkeypatch.setenv("DNIS_CACHE", str(tmp_path / "cache"))
    files = MemoryFileSystem()
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the publishers' files; a test that asks for it carries `pytest.mark.real_data`."""
    return DATA
