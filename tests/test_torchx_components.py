"""The TorchX components: their command lines, the jobs that come out of them on every scheduler, and restarts.

Dry runs start nothing. Those of docs/launching.md are read from it and run from a folder outside of the project.
"""

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchx.cli.argparse_util import ArgOnceAction, torchxconfig_run
from torchx.cli.main import main as torchx
from torchx.runner import get_runner
from torchx.specs import AppDef, AppState
from torchx.specs.file_linter import validate
from torchx.specs.finder import get_components

from tests.programs import commands
from torchx_components.dnis import benchmark, search, train

COMPONENTS = ("train", "compress", "search", "export", "evaluate", "benchmark")
ROOT = Path(__file__).parents[1]
FILE = ROOT / "torchx_components" / "dnis.py"
LAUNCHING = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
RESTARTS = {"PET_MAX_RESTARTS": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture(autouse=True)
def _several_commands_in_one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets what TorchX keeps for as long as a process lives: options it has seen, and its handlers of signals.

    A job on this machine puts the latter in the place of Python's, and an interrupt in any later test of the process
    would be a SignalException.
    """
    monkeypatch.setattr(ArgOnceAction, "called_args", set())
    monkeypatch.setattr(torchxconfig_run, "called_args", set())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command(app: AppDef) -> str:
    (role,) = app.roles
    return role.args[-1] if role.entrypoint == "bash" else shlex.join([role.entrypoint, *role.args])


def documented() -> list[str]:
    """Every command of docs/launching.md that is a dry run, in one line each."""
    blocks = re.findall(r"```sh\n(.*?)```", re.sub(r" \\\n +", " ", LAUNCHING), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if " --dryrun" in line]


def test_search_runs_under_torchrun_with_all_that_stands_after_the_dashes() -> None:
    app = search("m:f", "--data", "my data", "--out", "run", j="2x4", max_restarts=3, max_retries=2)
    assert app.name == "dnis-search"
    assert command(app).startswith("torchrun ")
    assert "--nnodes 2 --nproc_per_node 4" in command(app)
    assert command(app).endswith("-m dnis_torchrec search m:f --data 'my data' --out run --resume")
    (role,) = app.roles
    assert role.num_replicas == 2
    assert role.max_retries == 2
    assert role.resource.memMB == 8192
    assert role.env | RESTARTS | {"PET_MAX_RESTARTS": "3"} == role.env


@pytest.mark.parametrize(
    ("given", "arguments", "resumes"),
    [({}, ("--out", "run"), 0), ({"max_retries": 1}, ("--out", "run"), 1), ({"max_restarts": 1}, ("--resume",), 1)],
)
def test_what_may_be_started_again_resumes(given: dict[str, int], arguments: tuple, resumes: int) -> None:
    for component in (search, train):
        assert command(component("m:f", *arguments, **given)).split().count("--resume") == resumes


@pytest.mark.parametrize("given", [{"max_retries": 1}, {"max_restarts": 1}])
def test_a_search_that_may_be_started_again_overwrites_nothing(given: dict[str, int]) -> None:
    for component in (search, train):
        with pytest.raises(ValueError, match="--overwrite"):
            component("m:f", "--out", "run", "--overwrite", **given)


def test_benchmark_runs_any_module_under_torchrun() -> None:
    app = benchmark("--json", "x.json", m="benchmarks.step_time", j="1x2")
    assert app.name == "dnis-benchmark"
    assert "--nproc_per_node 2" in command(app)
    assert command(app).endswith("-m benchmarks.step_time --json x.json")
    assert app.roles[0].env | RESTARTS == app.roles[0].env


def test_storage_is_mounted_and_the_environment_stays_the_callers() -> None:
    env = {"PET_MAX_RESTARTS": "7"}
    app = train("x", mounts=["type=bind", "src=/a", "dst=/b"], image="image:1", env=env, cpu=3, memMB=100)
    (role,) = app.roles
    assert (role.mounts[0].src_path, role.mounts[0].dst_path, role.image) == ("/a", "/b", "image:1")
    assert (role.resource.cpu, role.resource.memMB, role.env["PET_MAX_RESTARTS"]) == (3, 100, "7")
    assert env == {"PET_MAX_RESTARTS": "7"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_torchx_accepts_every_signature_and_its_docstring(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(str(FILE), name) == []
    with pytest.raises(SystemExit) as stopped:
        torchx(["run", "--dryrun", f"{FILE}:{name}", "--help"])
    assert stopped.value.code == 0
    described = " ".join(capsys.readouterr().out.split())
    assert "memory of a node in MB" in described
    assert "TIP" not in described  # TorchX's stand-in for a missing docstring


def test_the_components_stand_beside_torchxs_own() -> None:
    names = set(get_components())
    assert {name for name in names if name.startswith("dnis.")} == {f"dnis.{name}" for name in COMPONENTS}
    assert set(COMPONENTS) - {"benchmark"} <= set(commands())
    assert {"dist.ddp", "dist.spmd", "utils.echo", "utils.python", "utils.sh", "serve.torchserve"} <= names


@pytest.mark.parametrize("line", documented())
def test_the_documented_dry_runs_run_from_any_folder(line: str, tmp_path, monkeypatch, capsys) -> None:
    program, *arguments = shlex.split(line)
    plain = arguments == ["run", "--dryrun"]
    monkeypatch.chdir(ROOT if plain else tmp_path)  # the demo is named by the project's .torchxconfig
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    assert program == "torchx"
    torchx(arguments)
    application, request = capsys.readouterr().out.split("=== SCHEDULER REQUEST ===")
    assert "dnis_torchrec" in re.sub(r"[\s'\",]", "", request)  # whatever the scheduler puts around it
    if plain:
        told = re.sub(r"'\s*'", "", application)
        assert "dnis_torchrec search examples.synthetic:demo --compression 5 --out runs/demo --overwrite" in told


def test_a_job_on_this_machine_is_restarted_until_it_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_once.py").write_text(
        "import os, pathlib, sys\n"
        "tries = pathlib.Path(sys.argv[1])\n"
        "tries.open('a').write(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "sys.exit(tries.read_text() == '0')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TORCHX_CONTEXT_NAME", "tests")
    arguments = ["-m", "fails_once", "--max_restarts", "1", "--env", f"PYTHONPATH={tmp_path}", "--", "tries"]
    with get_runner() as runner:
        app = runner.run_component("dnis.benchmark", arguments, "local_cwd", cfg={"log_dir": str(tmp_path / "logs")})
        status = runner.wait(app, wait_interval=0.1)
    assert status is not None
    assert status.state == AppState.SUCCEEDED
    assert (tmp_path / "tries").read_text() == "01"
