"""JSON of others: strict to read, refused by file and field where it holds other types, in every reader of it."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import safe_open
from safetensors.torch import save_file

from dnis_torchrec.artifact import load
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.comparison.cells import Cell, CellResult, CellTask, TrainedCell, read_result
from dnis_torchrec.jobs import report_job
from dnis_torchrec.jobs.artifact_jobs import recipe_of_artifact
from dnis_torchrec.jobs.model_shards import load_shards, shard_name
from dnis_torchrec.jobs.packaging.folder import read_package_json, write_package_json
from dnis_torchrec.jobs.progress import _StopRequest
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.report import ReportRow, read_report_rows
from dnis_torchrec.search.level_schedule import BilevelStream, LevelSchedule
from dnis_torchrec.search.loop import SearchInterrupted, SearchValues
from dnis_torchrec.serving.narrow_tables import NarrowTables
from dnis_torchrec.storage.claim import Claim
from dnis_torchrec.storage.json_files import DEEPEST, conform, parse_json
from dnis_torchrec.training.checkpoint.manifest import Manifest
from dnis_torchrec.training.saving import Saving
from tests.searched_runs import quick_job
from tests.test_architecture import sources
from tests.tiny_artifact import write_tiny_artifact

OTHERS: tuple[Any, ...] = (None, True, -1, 10**30, 0.5, "x", [None], {"x": None})
"""Values that stand where others belong; JSON has no further types."""


class Point(TypedDict):
    at: tuple[int, float]
    names: NotRequired[list[str] | None]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe", "f.json: expected JSON, got 'utf-8' codec"),
        (b"{", "f.json: expected JSON, got Expecting property name"),
        (b'{"at": [1, NaN]}', "f.json: expected JSON, got the constant NaN, which is not JSON"),
        (b'{"at": [1, 1e999]}', "f.json: expected JSON, got the number 1e999, which is too large"),
        (b'{"at": [1, 2], "at": [1, 2]}', "f.json: expected JSON, got an object with the name 'at' twice"),
        (b"[" * 100_000, "f.json: expected JSON, got one that is nested too deeply"),
        (b'{"at": [1' + b"0" * 5000 + b", 2]}", "f.json: expected JSON, got Exceeds the limit"),
        (b"[]", "f.json: expected an object, got a list of 0; put it back"),
        (b"{}", "f.json: expected 'at' in it, got none; put it back"),
        (b'{"at": null}', "f.json, field at: expected a list, got null"),
        (b'{"at": [1, 2, 3]}', r"f.json, field at: expected a list of 2, got one of 3"),
        (b'{"at": [1.0, 2]}', r"f.json, field at\[0\]: expected an integer of 64 bits, got 1.0"),
        (b'{"at": [true, 2]}', r"f.json, field at\[0\]: expected an integer of 64 bits, got True"),
        (b'{"at": [9223372036854775808, 2]}', r"f.json, field at\[0\]: expected an integer of 64 bits, got 9223"),
        (b'{"at": [1, "2"]}', r"f.json, field at\[1\]: expected a finite number, got '2'"),
        (b'{"at": [1, 2], "names": 1}', "f.json, field names: expected a list or null, got 1"),
        (b'{"at": [1, 2], "names": ["\\ud800"]}', r"f.json, field names\[0\]: expected text, got '\\ud800'"),
    ],
)
def test_what_is_not_what_was_expected_is_named(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        parse_json(content, Point, "f.json", remedy="put it back")


def test_what_is_expected_is_read_and_more_is_passed_over() -> None:
    content = {"at": [1, 2], "names": None, "more": {"anything": [1.5]}}
    assert parse_json(json.dumps(content), Point, "f.json") == content


def test_what_may_be_anything_is_not_deeper_than_whoever_reads_it_can_go() -> None:
    def nested(levels: int) -> str:
        return levels * "[" + levels * "]"

    assert parse_json(nested(DEEPEST), Any, "f.json")
    with pytest.raises(ValueError, match=f"f.json: expected at most {DEEPEST} levels, got more"):
        parse_json(nested(DEEPEST + 1), Any, "f.json")


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a JSON document, the document itself first; of what is alike in it one or two items."""
    yield path
    inner = list(value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ())
    are_alike = all(isinstance(item, dict) and item.keys() == inner[0][1].keys() for _, item in inner)
    for key, item in inner[:1] if are_alike else inner:
        yield from nodes(item, (*path, key))


def with_other(document: Any, path: tuple[Any, ...], other: Any) -> Any:
    """A copy in which something else stands at the end of a path."""
    if not path:
        return other
    changed = copy.deepcopy(document)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = other
    return changed


def without(document: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(document)
    at = changed
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return changed


def forgeries(document: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every document that differs in one node: another value, or none at all."""
    for path in nodes(document):
        for other in OTHERS:
            yield path, with_other(document, path, other)
        if path:
            yield path, without(document, path)


def assert_refused_or_read(document: Any, write: Callable[[Any], object], *readers: Callable[[], object]) -> None:
    """No forgery comes to more than a ValueError of one line; and some are refused."""
    write(document)
    for read in readers:
        read()
    refused = 0
    for path, forged in forgeries(document):
        write(forged)
        told = [told_by(read, f"{'.'.join(map(str, path))} in {str(forged)[:200]}") for read in readers]
        refused += len(list(filter(None, told)))
        assert [line for line in told if "\n" in line or (line and ": expected" not in line)] == [], path
    write(document)
    assert refused > len(readers)


def told_by(read: Callable[[], object], forgery: str) -> str:
    """The message with which a reader refuses, empty if it does not."""
    try:
        read()
    except ValueError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{forgery}: {type(error).__name__}: {error}") from error
    return ""


@pytest.fixture(scope="module")
def run(gloo, no_images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forged") / "run"
    run_search(quick_job(out))
    return out


def test_forged_run_json(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a report and an export read it, but for pages that take long to draw."""
    forged = Path(shutil.copytree(run, tmp_path / "run"))
    document = json.loads((forged / "run.json").read_text())
    document["configuration"] = {name: document["configuration"][name] for name in ("compression", "num_blocks")}
    monkeypatch.setattr(report_job, "write_report", lambda path, content: path)
    assert_refused_or_read(
        document,
        lambda content: (forged / "run.json").write_text(json.dumps(content)),
        lambda: run_report(forged),
        lambda: RunFolder.open(forged).tables(),
    )


def test_forged_report_json(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    document = json.loads((run / "report.json").read_text())
    assert_refused_or_read(
        document, lambda content: file.write_text(json.dumps(content)), lambda: read_report_rows(file)
    )


def test_forged_manifest_of_an_artifact(tmp_path: Path) -> None:
    artifact = write_tiny_artifact(tmp_path / "artifact")
    document = json.loads((artifact / "manifest.json").read_text())
    document["run"] |= {"embedding_dim": 8, "projected": False}
    held, run = [], copy.deepcopy(document["run"])

    def write(content: Any) -> None:
        """With its own hash made right again."""
        held.append(content)
        if isinstance(content, dict) and "sha256" in content:
            content = {**content, "sha256": 64 * "0"}
        text = json.dumps(content).encode()
        before, _, after = text.rpartition(64 * b"0")
        digits = hashlib.sha256(text).hexdigest().encode() if before else b""
        (artifact / "manifest.json").write_bytes(before + digits + after)

    assert_refused_or_read(
        document,
        write,
        lambda: load(artifact, form="csr_fp32"),
        lambda: recipe_of_artifact(artifact, None) if isinstance(held[-1], dict) and held[-1].get("run") != run else "",
    )


def test_forged_package_json(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    fields = {"kind": "aoti", "model": "m", "inputs": [], "feature_names": ["f"], "num_dense": 1, "is_weighted": False}
    write_package_json(tmp_path, fields | {"libraries": []})
    document = json.loads((tmp_path / "package.json").read_text())
    (tmp_path / "package.json").unlink()
    assert_refused_or_read(
        document,
        lambda content: (tmp_path / "package.json").write_text(json.dumps(content)),
        lambda: read_package_json(tmp_path),
    )


def test_forged_cells_of_a_comparison(tmp_path: Path) -> None:
    """A result that is none is that of a cell to be run again; a task is refused."""
    sizes = {"parameters": 9, "dense_parameters": 36, "bytes": {"a": 1}}
    row = ReportRow(method="dnis", compression=4, metrics={"auc": 0.5}, seed=0, seconds=1, **sizes)
    cell = Cell(method="dnis", size=4.0, seed=0)
    trained = TrainedCell(
        row=row, dense_bytes=1, form="a", embedding_bytes=1, extra_bytes=0, selection_loss=0.1, trials=1,
        seconds_of_trials=1.0, settings={"rate": 0.1}, device="cpu", cells_at_once=1,
    )  # fmt: skip
    result = CellResult(cell=cell, rules={"recipe": "a:b"}, versions={"torch": "2"}, trained=trained)
    result.write(tmp_path)
    document = json.loads((tmp_path / "result.json").read_text())
    for path, forged in forgeries(document):
        (tmp_path / "result.json").write_text(json.dumps(forged))
        found = read_result(tmp_path)
        assert found is None or found.to_json().keys() <= document.keys(), path
    task = CellTask(cell=cell, rules={}, registry="a:b", cells_at_once=1, artifact=False)
    task.write(tmp_path)
    document = json.loads((tmp_path / "task.json").read_text())
    assert_refused_or_read(
        document,
        lambda content: (tmp_path / "task.json").write_text(json.dumps(content)),
        lambda: CellTask.read(tmp_path),
    )


@pytest.fixture(scope="module")
def interrupted(gloo, no_images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forged") / "interrupted"
    asked = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_StopRequest, "is_requested", lambda self: next(asked) == 12)
        with pytest.raises(SearchInterrupted):
            run_search(quick_job(out))
    return out


def test_forged_manifest_of_a_checkpoint(interrupted: Path, tmp_path: Path) -> None:
    (source,) = [path for path in (interrupted / "checkpoints").glob("step-*") if path.name in latest(interrupted)]
    folder = Path(shutil.copytree(source, tmp_path / source.name))
    document = json.loads((folder / "manifest.json").read_text())
    document["tensors"] = dict(list(document["tensors"].items())[:2])
    assert_refused_or_read(
        document,
        lambda content: (folder / "manifest.json").write_text(json.dumps(content)),
        lambda: Manifest.read(folder).to_metadata(),
    )


def latest(run: Path) -> str:
    return (run / "checkpoints" / "latest.json").read_text()


def test_forged_values_of_a_checkpoint(interrupted: Path, tmp_path: Path) -> None:
    """What a search goes on from beside tensors, as its loop and its stream read it."""
    out = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (file,) = [path / "manifest.json" for path in (out / "checkpoints").glob("step-*") if path.name in latest(out)]
    document = json.loads(file.read_text())
    values = document["values"]
    assert_refused_or_read(
        values,
        lambda content: file.write_text(json.dumps(document | {"values": content})),
        lambda: conform(Manifest.read(file.parent).values, SearchValues, "checkpoint"),
    )
    held: list[Any] = []
    batches = [torch.zeros(1)] * 20
    assert_refused_or_read(
        values["stream"],
        held.append,
        lambda: BilevelStream(batches, batches, LevelSchedule()).load_state_dict(held[-1]),
    )
    file.write_text(json.dumps(document | {"values": values | {"search": values["search"] | {"best": 1}}}))
    with pytest.raises(
        ValueError, match=r"checkpoint .*, values, field search\.best: expected an object or null, got 1"
    ):
        run_search(quick_job(out, saving=Saving(resume=True)))


def test_forged_heads_of_safetensors_files(run: Path, tmp_path: Path) -> None:
    for name, kind, read in (
        ("counts", "frequency_counts", FrequencyCounts.load),
        ("blocks", "row_blocks", RowBlocks.load),
    ):
        file = tmp_path / f"{name}.safetensors"
        with safe_open(run / file.name, framework="pt") as source:
            document = json.loads(source.metadata()[kind])
            tensors = {key: source.get_tensor(key) for key in source.keys()}  # noqa: SIM118 - not a dict

        def write(content: Any) -> None:
            save_file(tensors, file, metadata={kind: json.dumps(content)})  # noqa: B023

        assert_refused_or_read(document, write, lambda: read(file))  # noqa: B023


def test_forged_head_of_a_model_part(tmp_path: Path) -> None:
    def write(content: Any) -> None:
        save_file({"dense/x": torch.ones(1)}, tmp_path / shard_name(0), metadata={"model_part": json.dumps(content)})

    assert_refused_or_read({"world_size": 1}, write, lambda: load_shards(tmp_path))


def test_forged_narrow_tables() -> None:
    table = {
        "name": "t", "num_embeddings": 4, "embedding_dim": 1, "feature_names": ["f"], "pooling": "sum",
        "logical_dim": 2, "columns": [1],
    }  # fmt: skip
    document = {"format_version": 1, "is_weighted": False, "tables": [table]}
    held: list[str] = []
    assert_refused_or_read(
        document,
        lambda content: held.append(json.dumps(content)),
        lambda: NarrowTables.from_json(held[-1]),
        lambda: NarrowTables.from_yaml(held[-1]),
    )


@pytest.mark.parametrize("text", ["- " * 5000 + "x", "2001-99-99", "&a [*a]", "{a: b"])
def test_yaml_that_is_damaged_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="narrow tables: expected"):
        NarrowTables.from_yaml(text)


def test_forged_word_of_a_writer_to_storage(remote: MemoryFileSystem) -> None:
    document = {"writer": "process 1 on host", "job": "host x", "sign": "0"}

    def write(content: Any) -> None:
        remote.pipe_file("/run.writer", json.dumps(content).encode())

    def take() -> None:
        claim = Claim("memory://run", "mine")
        claim._refuse(claim._read(), unless=True)

    assert_refused_or_read(document, write, take)


OF_ITSELF = {
    "dnis_torchrec/artifact/manifest.py",  # the head of a safetensors file, whose every error is caught
    "dnis_torchrec/artifact/writing.py",
    "dnis_torchrec/artifact/over_ranks.py",
    "dnis_torchrec/jobs/packaging/aot_inductor.py",
    "dnis_torchrec/jobs/run_folder.py",
    "dnis_torchrec/search/loop.py",
    "dnis_torchrec/data/users_code.py",  # what pip writes of an installed package
    "dnis_torchrec/jobs/verification/resident.py",
    "dnis_torchrec/jobs/verification/findings.py",
    "dnis_torchrec/comparison/run.py",
}
"""What parses text that this very job has made."""


def test_json_of_others_is_read_in_one_way() -> None:
    parsing = {path for path, source in sources("dnis_torchrec").items() if re.search(r"json\.loads?\(", source)}
    assert parsing == OF_ITSELF | {"dnis_torchrec/storage/json_files.py"}
