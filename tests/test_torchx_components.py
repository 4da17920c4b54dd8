"""The TorchX component: its command line, and the job that comes out of it. Nothing is started."""

from pathlib import Path

import pytest
from torchx.runner import get_runner
from torchx.schedulers.local_scheduler import PopenRequest
from torchx.specs.file_linter import validate

from torchx_components.search import search

COMPONENT = Path(__file__).parents[1] / "torchx_components" / "search.py"
ARGUMENTS = ["--recipe", "examples.movielens:mf", "--data", "my data", "--compression", "10", "--out", "run"]


def test_search_builds_one_role_that_runs_the_command_line_under_torchrun() -> None:
    app = search("examples.movielens:mf", "my data", 10, "run", seed=3, j="1x2", env={"OMP_NUM_THREADS": "1"})

    (role,) = app.roles
    command = role.args[-1]
    assert app.name == "dnis-search"
    assert command.startswith("torchrun ")
    assert "--nproc_per_node 2" in command
    assert (
        "-m dnis_torchrec search examples.movielens:mf --data 'my data' --compression 10 --out run --seed 3" in command
    )
    assert role.env["OMP_NUM_THREADS"] == "1"
    assert role.resource.memMB == 8192


def test_search_leaves_the_environment_of_its_caller_alone() -> None:
    env = {"OMP_NUM_THREADS": "1"}
    search("m:f", "data", 2.0, "run", env=env)
    assert env == {"OMP_NUM_THREADS": "1"}


def test_torchx_accepts_the_signature_and_its_docstring() -> None:
    assert validate(str(COMPONENT), "search") == []


def test_a_dry_run_on_this_machine_gives_the_command(tmp_path: Path) -> None:
    with get_runner() as runner:
        info = runner.dryrun_component(f"{COMPONENT}:search", ARGUMENTS, "local_cwd", cfg={"log_dir": str(tmp_path)})

    assert isinstance(info.request, PopenRequest)
    (replicas,) = info.request.role_params.values()
    (replica,) = replicas
    assert replica.args[0] == "bash"
    assert "--data 'my data' --compression 10.0 --out run --seed 0" in replica.args[-1]


@pytest.mark.parametrize("missing", ["--recipe", "--data", "--compression", "--out"])
def test_what_the_search_needs_is_required(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = ARGUMENTS.index(missing)
    with get_runner() as runner, pytest.raises(SystemExit):
        runner.dryrun_component(f"{COMPONENT}:search", ARGUMENTS[:at] + ARGUMENTS[at + 2 :], "local_cwd")
    assert missing in capsys.readouterr().err
