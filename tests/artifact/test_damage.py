"""Artifacts that were damaged, or forged by others: refused by the name of the file; no lookup leaves its table.

And verify: what is whole passes, every kind of damage is named, wrong values and unknown ids are found.
"""

import copy as copying
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typer.testing import CliRunner

import dnis_torchrec as dnis
from dnis_torchrec.artifact import verify as verification
from dnis_torchrec.artifact.export import load_model
from dnis_torchrec.artifact.load import exact_rows, load, read_scheme, serve
from dnis_torchrec.artifact.manifest import CARD, SAFETENSORS_DTYPES, describe_file, read_manifest, write_manifest
from dnis_torchrec.artifact.verify import (
    Finding,
    Oracle,
    Verification,
    bag_cases,
    check_files,
    compare,
    unknown_bags,
    verify,
)
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.routing import RowRouting, SparseLayout
from dnis_torchrec.cli import app
from dnis_torchrec.cli.commands import served_metrics
from dnis_torchrec.data.urls import fetch
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import FORMS, MIXED_DIMENSION, PACKED, MixedDimensionScheme
from dnis_torchrec.serving import sequences
from tests import tiny
from tests.models import interest, make_batch
from tests.reference import (
    MIXED_FILE,
    PACKED_FILE,
    all_rows,
    coded_tables,
    load_dense_state,
    pool,
    two_tables,
    write_coded_tables,
    write_two_tables,
)
from tests.tiny import tables_alone, write_tiny_artifact

SCHEME, DENSE, NAME = "scheme.safetensors", "dense_state.safetensors", "movie/seen"
FILES = (MIXED_FILE, PACKED_FILE, SCHEME, DENSE)
READERS: list[Callable[[Path], object]] = [
    lambda path: load(path, form=MIXED_DIMENSION),
    *(load, exact_rows, read_scheme, load_dense_state),
]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    return {"plain": write_two_tables(folder / "plain"), "coded": write_coded_tables(folder / "coded")}


@pytest.fixture
def artifact(originals: dict[str, Path], tmp_path: Path) -> Path:
    """Two tables in both forms, float32."""
    return Path(shutil.copytree(originals["plain"], tmp_path / "artifact"))


@pytest.fixture
def coded(originals: dict[str, Path], tmp_path: Path) -> Path:
    """Two tables in bit fields."""
    return Path(shutil.copytree(originals["coded"], tmp_path / "coded"))


def restate(path: Path, change: Callable[[dict], object]) -> None:
    """Changes the manifest as an attacker would: with its own hash made right again."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    manifest.pop("sha256", None)
    content = json.dumps(manifest | {"sha256": 64 * "0"}).encode()
    before, _, after = content.rpartition(64 * b"0")
    (path / "manifest.json").write_bytes(before + hashlib.sha256(content).hexdigest().encode() + after)


def restate_file(path: Path, name: str, *, tensors: bool = True) -> None:
    """Makes the manifest state the size, hash and tensors that a file has now."""
    content = (path / name).read_bytes()
    facts: dict[str, Any] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if tensors:
        length = int.from_bytes(content[:8], "little")
        names = {key: str(dtype).removeprefix("torch.") for key, dtype in SAFETENSORS_DTYPES.items()}
        facts["tensors"] = {
            key: {"dtype": names[f["dtype"]], "shape": f["shape"], "offset": 8 + length + f["data_offsets"][0]}
            for key, f in json.loads(content[8 : 8 + length]).items()
        }
    restate(path, lambda manifest: manifest["files"][name].update(facts))


def forge(path: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes tensors of a file, and all that is said of them, as an attacker would."""
    tensors = {key: tensor.clone() for key, tensor in load_file(path / name).items()}
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name)
    restate_file(path, name)


def files_that_differ(path: Path) -> list[str]:
    return [finding.subject for finding in check_files(path)[1] if finding.status == "failed"]


def flip(file: Path, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


# ---- damage


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named(artifact: Path, name: str) -> None:
    assert files_that_differ(artifact) == []
    content = (artifact / name).read_bytes()
    flip(artifact / name, -1)
    reader = {
        MIXED_FILE: lambda path: load(path, form=MIXED_DIMENSION, verify=True),
        PACKED_FILE: exact_rows,
        SCHEME: read_scheme,
        DENSE: load_dense_state,
    }[name]
    assert files_that_differ(artifact) == [name]
    with pytest.raises(ValueError, match=f"file '{name}': expected sha256 .*damaged"):
        reader(artifact)
    for damage in (content[:-1], content + b"x", b""):
        (artifact / name).write_bytes(damage)
        for read in READERS:
            with pytest.raises(ValueError, match=f"file '{name}': expected {len(content)} bytes, got {len(damage)}"):
                read(artifact)
    (artifact / name).rename(artifact / "elsewhere")
    for read in READERS:
        with pytest.raises(ValueError, match=f"file '{name}': expected a file, got none"):
            read(artifact)


def test_a_flipped_bit_of_the_manifest_is_found(artifact: Path) -> None:
    content = (artifact / "manifest.json").read_bytes()
    for position in range(0, len(content), 29):
        flip(artifact / "manifest.json", position, position % 8)
        with pytest.raises(ValueError, match=r"file 'manifest\.json'"):
            read_manifest(artifact)
        (artifact / "manifest.json").write_bytes(content)


def test_a_flipped_bit_of_any_byte_of_rows_is_found_and_never_leaves_the_table(coded: Path) -> None:
    file = coded / PACKED_FILE
    content, expected = file.read_bytes(), load(coded)(all_rows()).values()
    first_value = read_manifest(coded)["files"][PACKED_FILE]["tensors"]["rows"]["offset"]
    refusals = 0
    for position in range(len(content)):
        flip(file, position, position % 8)
        assert files_that_differ(coded) == [PACKED_FILE]
        try:
            out = load(coded)(all_rows()).values()
            assert position >= first_value or out.equal(expected)
        except ValueError:
            refusals += 1
        file.write_bytes(content)
    assert refusals >= first_value - 16  # all of the header but the blanks at its end


def test_no_reader_minds_a_card_that_was_changed_or_left_out(coded: Path, tmp_path: Path) -> None:
    for change in (lambda card: card.write_text("ours"), Path.unlink):
        change(coded / CARD)
        assert files_that_differ(coded) == []
        load(coded)
    (coded / CARD).symlink_to(tmp_path / "elsewhere")
    assert files_that_differ(coded) == [CARD]


# ---- places: nothing outside of the folder is read


def exchange(path: Path) -> None:
    """Both are whole and ours, only not in their place."""
    other = PACKED_FILE.replace("000_movie_seen", "001_user")
    (path / PACKED_FILE).rename(path / "aside")
    (path / other).rename(path / PACKED_FILE)
    (path / "aside").rename(path / other)


def link(path: Path, name: str) -> None:
    (path / name).rename(path.parent / "outside")
    (path / name).symlink_to(path.parent / "outside")


def content_is(content: bytes) -> Callable[[Path], None]:
    """A file of another kind, whose size and hash the manifest states."""

    def change(path: Path) -> None:
        (path / MIXED_FILE).write_bytes(content)
        restate_file(path, MIXED_FILE, tensors=False)

    return change


def tensors_are(tensors: dict[str, Tensor], *, restated: bool) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        save_file(tensors, path / MIXED_FILE)
        restate_file(path, MIXED_FILE, tensors=restated)

    return change


def manifest_is(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda path: restate(path, change)


def table_is(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda path: restate(path, lambda manifest: change(manifest["tables"]["user"]))


def older(path: Path) -> None:
    """Before 1.0 was final the manifest listed neither scheme nor dense state."""

    def change(manifest: dict) -> None:
        del manifest["scheme"], manifest["dense_state"]
        for table in manifest["tables"].values():
            table["files"] = {form: shards[0]["file"] for form, shards in table.pop("shards").items()}

    restate(path, change)


def to_come(path: Path) -> None:
    def change(manifest: dict) -> None:
        manifest["forms"] = ["entropy_coded"]
        for table in manifest["tables"].values():
            table["shards"] = {"entropy_coded": table["shards"]["packed"]}

    restate(path, change)


SOME = {"b0": torch.zeros(3, 5)}
WHOLE = {"file": PACKED_FILE, "first_row": 0, "num_rows": 10}
FORGED: list[tuple[str, Callable[[Path], object]]] = [
    (PACKED_FILE, exchange),
    (MIXED_FILE, lambda path: link(path, MIXED_FILE)),
    ("a link or a folder", lambda path: link(path, "packed")),
    ("a link or a folder", lambda path: link(path, "manifest.json")),
    *(
        ("a relative path", manifest_is(lambda m, name=name: m["files"].update({name: {"sha256": "", "bytes": 6}})))
        for name in ("/etc/hostname", "csr/../../outside", "./x", "", "a//b", "a\\b", "a\0b")
    ),
    ("'../outside'", table_is(lambda table: table["shards"][MIXED_DIMENSION][0].update(file="../outside"))),
    *(
        ("manifest.json", lambda path, text=text: (path / "manifest.json").write_bytes(text))
        for text in (b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"format": "onnx"}')
    ),
    ("manifest.json", lambda path: (path / "manifest.json").unlink()),
    *(
        ("format_version", manifest_is(lambda m, version=version: m.update(format_version=version)))
        for version in ("2.0", 1, "new", "9" * 5000)
    ),
    ("tables", manifest_is(lambda m: m.pop("tables"))),
    ("manifest.json", older),
    ("update dnis_torchrec", to_come),
    (MIXED_FILE, content_is(b"PK\x03\x04 a pickle, perhaps")),
    *(
        (MIXED_FILE, content_is(len(header).to_bytes(8, "little") + header))
        for header in (*(b"{}", b"[1]", b"[" * 9999), b'{"b0": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}')
    ),
    *(
        (MIXED_FILE, tensors_are(tensors, restated=restated))
        for restated in (False, True)
        for tensors in (
            SOME,
            SOME | {"b1": torch.zeros(3, 3)},
            SOME | {"b1": torch.zeros(3, 2).half()},
            SOME | {"b1": torch.zeros(3, 2), "b2": torch.zeros(3, 1)},
        )
    ),
    ("table 'user'", table_is(lambda table: table.update(embedding_dim=6))),
    ("feature", table_is(lambda table: table.update(feature_names=[]))),
    (SCHEME, lambda path: forge(path, SCHEME, lambda own: own[f"{NAME}/block_of_row"].__setitem__(0, 200))),
    *(
        ("packed", manifest_is(lambda m, shards=shards: m["tables"][NAME]["shards"].update(packed=shards)))
        for shards in (
            *(None, [], [None], [{"file": PACKED_FILE}]),
            [WHOLE | {"first_row": 1, "num_rows": 9}],
            [WHOLE | {"num_rows": 9}],
            [WHOLE, WHOLE | {"first_row": 10, "num_rows": 0}],
            [WHOLE | {"num_rows": True}],
        )
    ),
]


@pytest.mark.parametrize("number", range(len(FORGED)))
def test_forged_artifacts_are_refused(artifact: Path, number: int) -> None:
    place, change = FORGED[number]
    (artifact.parent / "outside.txt").write_text("secret")
    change(artifact)
    with pytest.raises(ValueError) as error:
        for form in FORMS:
            load(artifact, form=form)
    assert place in str(error.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere': expected a folder"):
        load(tmp_path / "nowhere")


SCALE, SHIFT, BITS = f"{NAME}/scale", f"{NAME}/shift", f"{NAME}/bits"
CODES: list[tuple[str, str, Callable[[Tensor], Tensor | None]]] = [
    *((PACKED_FILE, "rows", change) for change in (lambda rows: rows[:-1], lambda rows: torch.cat([rows, rows[:1]]))),
    *((PACKED_FILE, "rows", change) for change in (lambda rows: rows[:0], lambda rows: rows[None], Tensor.short)),
    (PACKED_FILE, "rows", lambda rows: None),
    *((SCHEME, part, lambda values: None) for part in (SCALE, SHIFT, BITS)),
    *(
        (
            SCHEME,
            part,
            lambda values, value=value: values.index_put((torch.tensor(1), torch.tensor(4)), value.to(values.dtype)),
        )
        for part, numbers in ((SCALE, (0.0, -1.0, torch.nan, torch.inf, 1.001)), (BITS, (9, 64, 255, 0)))
        for value in map(torch.tensor, numbers)
    ),
    *((SCHEME, SCALE, change) for change in (Tensor.half, lambda values: values[:, :4])),
    *((SCHEME, SHIFT, change) for change in (Tensor.int, lambda values: values[:2])),
    *((SCHEME, BITS, change) for change in (Tensor.int, lambda values: values[:, :4])),
    # other widths than the rows have
    *((SCHEME, BITS, lambda bits, width=width: bits.index_fill(0, torch.tensor(0), width)) for width in (1, 32)),
    (SCHEME, f"{NAME}/block_of_row", torch.zeros_like),
]


@pytest.mark.parametrize("number", range(len(CODES)))
def test_codes_that_no_writer_writes_are_refused(coded: Path, number: int) -> None:
    name, part, change = CODES[number]

    def replace(tensors: dict[str, Tensor]) -> None:
        old = tensors.pop(part)
        value = change(old)
        tensors |= {"b0": torch.zeros(1)} if name == PACKED_FILE and value is None else {}
        tensors |= {} if value is None else {part: value.to(old.dtype) if value.shape == () else value}

    forge(coded, name, replace)
    for form in (None, *FORMS):
        with pytest.raises(ValueError, match=f"file '({SCHEME}|{PACKED_FILE})': "):
            load(coded, form=form)


def test_widths_that_leave_the_bytes_of_a_row_alone_stay_within_the_table(coded: Path) -> None:
    for width in (2, 4, 8):  # float32 begins at a whole byte: the row is as long
        forge(coded, SCHEME, lambda tensors, width=width: tensors[BITS].__setitem__((0, 0), width))
        assert load(coded)(all_rows()).values().isfinite().all()


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.parametrize(
    ("kind", "forgery"), [("artifact", None), ("artifact", "gone"), ("coded", -1), ("coded", "x"), ("coded", [])]
)
def test_a_forged_manifest_is_read_or_refused(request: pytest.FixtureRequest, kind: str, forgery: object) -> None:
    """Whatever stands in a manifest, reading gives a module or a ValueError, never another error."""
    path: Path = request.getfixturevalue(kind)
    original = json.loads((path / "manifest.json").read_text())
    for fields in original["tables"].values():
        del fields["blocks"]  # said for people; the scheme's tensors say it for `load`
    tried = {key: original[key] for key in ("forms", "run")} | {"tables": {NAME: original["tables"][NAME]}}
    tried |= {"files": {name: fields for name, fields in original["files"].items() if name in FILES}}
    for place in places(tried):
        manifest = copying.deepcopy(original)
        *outer, last = place
        inner = manifest
        for key in outer:
            inner = inner[key]
        if forgery == "gone":
            del inner[last]
        else:
            inner[last] = forgery
        (path / "manifest.json").write_text(json.dumps(manifest))
        restate(path, lambda _: None)
        try:
            read_manifest(path)
        except ValueError:  # every reader begins with it
            continue
        for read in READERS:
            try:
                read(path)
            except ValueError:
                continue


# ---- what nobody has written: refused at once, before memory is asked for


SECONDS, MOST_BYTES, LONGEST_LINE = 10, 1 << 30, 1000


@contextmanager
def bounded() -> Iterator[None]:
    """Lets the block take ten seconds and a gibibyte, both far more than it needs."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, hard))
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"not done after {SECONDS} seconds"))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def rows_are(num_rows: int, num_shards: int = 1) -> Callable[[Path], None]:
    """Of the table that is routed by boundaries; all that are more lie in a block of which nothing is stored."""

    def change(path: Path) -> None:
        forge(path, SCHEME, lambda tensors: tensors["user/boundaries"].__setitem__(-1, num_rows))

        def describe(manifest: dict) -> None:
            table = manifest["tables"]["user"]
            table["num_embeddings"] = num_rows
            for shards in table["shards"].values():
                shards[0]["num_rows"] = num_rows

        restate(path, describe)

    return change


def grown(name: str, size: int = 64 << 30, header: int | None = None) -> Callable[[Path], None]:
    """A sparse file: as large as it says, with nothing on the disk."""

    def change(path: Path) -> None:
        if header is not None:
            (path / name).write_bytes(header.to_bytes(8, "little"))
        os.truncate(path / name, size)
        if name != "manifest.json":
            restate(path, lambda manifest: manifest["files"][name].update(bytes=size))

    return change


def renamed(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        def rename(tensors: dict[str, Tensor]) -> None:
            for key in [key for key in tensors if key.startswith("user/")]:
                tensors[name + key.removeprefix("user")] = tensors.pop(key)

        forge(path, SCHEME, rename)
        restate(path, lambda m: m["tables"].update({name: m["tables"].pop("user")}))

    return change


def tensor_is(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return lambda path: forge(path, SCHEME, lambda tensors: tensors.update({key: change(tensors[key])}))


def no_rows(path: Path) -> None:
    (name,) = {shard["file"] for shard in read_manifest(path)["tables"]["user"]["shards"]["packed"]}
    (path / name).unlink()
    restate(path, lambda manifest: manifest["files"].pop(name))
    forge(path, SCHEME, lambda tensors: tensors["user/boundaries"].zero_())
    table_is(lambda table: table.update(num_embeddings=0, num_retained=0, shards={"packed": []}))(path)


def no_columns(path: Path) -> None:
    def empty(tensors: dict[str, Tensor]) -> None:
        for key in ("retained", "bits", "scale", "shift"):
            tensors[f"user/{key}"] = tensors[f"user/{key}"][:, :0]

    forge(path, SCHEME, empty)
    table_is(lambda table: table.update(embedding_dim=0, num_retained=0))(path)


def wide(num_columns: int) -> Callable[[Path], None]:
    def widen(tensors: dict[str, Tensor]) -> None:
        for key, value in (("retained", 0), ("bits", 0), ("scale", 1), ("shift", 0)):
            old = tensors[f"user/{key}"]
            tensors[f"user/{key}"] = torch.full((len(old), num_columns), value).to(old.dtype)

    def change(path: Path) -> None:
        forge(path, SCHEME, widen)
        table_is(lambda table: table.update(embedding_dim=num_columns, num_retained=0))(path)

    return change


def many_tensors(path: Path) -> None:
    """A header that is not what the manifest says, and long."""
    save_file({f"b{number}": torch.zeros(1) for number in range(999)}, path / PACKED_FILE)
    restate_file(path, PACKED_FILE, tensors=False)


def scaled(scale: float, shift: int) -> Callable[[Path], None]:
    """The first column of a block, of four bits."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["user/scale"][0, 0] = torch.tensor(scale).bfloat16().float()
        tensors["user/shift"][0, 0] = shift

    return lambda path: forge(path, SCHEME, change)


DOTS, SLASHES = (".", "..", "a.b", "../a", "a/../b"), ("/", "/a", "a/", "a//b")
UNNAMEABLE = ("", *DOTS, *SLASHES, "__class__", "training", "keys", "\0", "a\nb", "x" * 256)
BOUNDARIES, BLOCKS = "user/boundaries", f"{NAME}/block_of_row"
HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{f"{n} rows": (SCHEME, rows_are(n)) for n in (2**41, 2**63 - 1)},
    "no rows": (SCHEME, no_rows),
    "no columns": (SCHEME, no_columns),
    "100,000 columns": (SCHEME, wide(100_000)),
    **{f"64 GiB of {name}": (name, grown(name)) for name in ("manifest.json", PACKED_FILE)},
    **{f"header of {name}": (name, grown(name, 300_000_000, 200_000_000)) for name in (SCHEME, DENSE)},
    "long header": (PACKED_FILE, many_tensors),
    "more than rows": (PACKED_FILE, lambda path: forge(path, PACKED_FILE, lambda own: own.update(more=torch.zeros(1)))),
    **{f"table {name[:9]!r}": ("manifest.json", renamed(name)) for name in ("..", "/a", "keys", "a\nb")},
    **{
        f"feature {name[:9]!r}": (
            "manifest.json",
            table_is(lambda table, name=name: table.update(feature_names=[name])),
        )
        for name in ("", "a\nb")
    },
    **{
        f"boundaries {word}": (SCHEME, tensor_is(BOUNDARIES, change))
        for word, change in {
            "as float32": Tensor.float,
            "as int32": Tensor.int,
            "of two dimensions": lambda value: value[:, None],
            "of none": lambda value: value[0],
            "of infinities": lambda value: torch.full(value.shape, torch.inf),
        }.items()
    },
    **{
        f"blocks as {dtype}": (SCHEME, tensor_is(BLOCKS, lambda value, dtype=dtype: value.to(dtype)))
        for dtype in (torch.int8, torch.float32)
    },
    **{
        f"{part} as {dtype}": (SCHEME, tensor_is(f"user/{part}", lambda value, dtype=dtype: value.to(dtype)))
        for part, dtype in (("retained", torch.float32), ("shift", torch.int32))
    },
    "scale times codes": (SCHEME, scaled(1e38, 0)),
    "scale times shift": (SCHEME, scaled(1e35, -(2**15))),
    "scale times both": (SCHEME, scaled(2e37, 8)),
}
READERS_OF: dict[str, list[Callable[[Path], object]]] = {
    PACKED_FILE: [load, lambda path: load(path, form=MIXED_DIMENSION), exact_rows],
    DENSE: [load_dense_state, lambda path: load_model(torch.nn.Module(), path)],
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_what_nobody_has_written_is_refused_at_once_in_one_line(coded: Path, fault: str) -> None:
    place, change = HOSTILE[fault]
    change(coded)
    lines = []
    for read in READERS_OF.get(place, READERS[:-1] + READERS_OF[DENSE][1:]):
        with bounded(), pytest.raises(ValueError) as error:
            read(coded)
        lines.append(str(error.value))
    try:
        with bounded():
            lines += [finding.detail for finding in verify(coded).failures[:1]]
    except ValueError as error:
        lines.append(str(error))
    assert len(lines) == 1 + len(READERS_OF.get(place, READERS))
    for line in lines:
        assert re.search(f"{re.escape(place)}|sha256", line), line[:LONGEST_LINE]
        assert "\n" not in line, line
        assert len(line) < LONGEST_LINE, line[:LONGEST_LINE]


@pytest.mark.parametrize("name", UNNAMEABLE)
def test_names_that_cannot_be_read_are_not_written(tmp_path: Path, name: str) -> None:
    tables, scheme = coded_tables()
    scheme = MixedDimensionScheme({name: replace(scheme.tables["user"], name=name)})
    with pytest.raises(ValueError, match="scheme: expected names"):
        write_artifact({name: tables["user"]}, scheme, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_many_rows_of_which_nothing_is_stored_are_read_at_once(coded: Path) -> None:
    """Two shards of a table of half a trillion rows, and a few bytes."""
    num_rows = 1 << 40
    rows_are(num_rows)(coded)

    def cut(manifest: dict) -> None:
        (whole,) = manifest["tables"]["user"]["shards"]["packed"]
        empty = {"file": "packed/empty.safetensors", "first_row": num_rows // 2, "num_rows": num_rows // 2}
        whole["num_rows"] = num_rows // 2
        manifest["tables"]["user"]["shards"]["packed"].append(empty)
        manifest["files"][empty["file"]] = {}

    restate(coded, cut)
    save_file({"rows": torch.zeros(0, dtype=torch.uint8)}, coded / "packed/empty.safetensors")
    restate_file(coded, "packed/empty.safetensors")
    with bounded():
        assert load(coded)(all_rows()).values().isfinite().all()
        assert exact_rows(coded)["user"](num_rows - 1, num_rows).eq(0).all()


DIRECTORIES = "directories.safetensors"
EVERY_ROW = KeyedJaggedTensor(["user"], torch.arange(2000), lengths=torch.ones(2000, dtype=torch.int64))


def head_is_of_the_same_size(data: Tensor) -> Tensor:
    """A directory that says fewer stored rows than none, and so many more groups that its size fits."""
    if data.dtype == torch.uint8:
        return data[:-1]
    heads = ((rows, groups) for rows in range(-128, -2000, -128) for groups in range(0, 4000, 8))
    data[:2] = torch.tensor(next(h for h in heads if SparseLayout(2000, *h, 2).num_bytes == data.nbytes))
    return data


def write_mapped(path: Path, kind: str) -> tuple[Path, Tensor]:
    """An artifact of one table with a map, whose directory is of a kind, and all its rows as lookups give them."""
    torch.manual_seed(2)
    bits = torch.tensor([[4], [2], [8 if kind == "ranks" else 0]], dtype=torch.uint8).expand(3, 5).contiguous()
    blocks = (torch.rand(2000) * (1 if kind == "ranks" else 20)).mul(3).long().clamp(max=2)
    _, scheme = coded_tables()
    area = int((torch.bincount(blocks, minlength=3) * (bits > 0).sum(1)).sum())
    codes = {"bits": bits, "retained": bits > 0, "scale": torch.ones(3, 5), "shift": torch.zeros(3, 5).short()}
    routing = RowRouting.from_map(blocks, 3)
    user = replace(scheme.tables["user"], num_embeddings=2000, routing=routing, num_retained=area, **codes)
    tables = {"user": torch.randn(2000, 5)}
    write_artifact(tables, MixedDimensionScheme({"user": user}), path, forms=[PACKED])
    return path, load(path)(EVERY_ROW).values()


@pytest.mark.parametrize("kind", ["ranks", "sparse"])
def test_a_flipped_bit_of_a_directory_never_leaves_the_table(tmp_path: Path, kind: str) -> None:
    path, expected = write_mapped(tmp_path / "a", kind)
    file, entry = path / DIRECTORIES, read_manifest(path)["files"][DIRECTORIES]
    content, first = file.read_bytes(), entry["tensors"]["user"]["offset"]
    assert entry["tensors"]["user"]["dtype"] == {"ranks": "uint8", "sparse": "int32"}[kind]
    refusals = 0
    for position in range(first, len(content), 7):
        for bit in (position % 8, 7):
            flip(file, position, bit)
            with pytest.raises(ValueError, match=DIRECTORIES):
                load(path, verify=True)
            try:
                assert load(path)(EVERY_ROW).values().shape == expected.shape
            except ValueError:
                refusals += 1
            file.write_bytes(content)
    assert refusals
    assert load(path)(EVERY_ROW).values().equal(expected)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda data: data[:-1], lambda data: data[None], lambda data: data[:0]),
        *(lambda data: data.view(torch.uint8).long(), Tensor.float),
        lambda data: torch.full((2,), -1, dtype=torch.int32),
        lambda data: head_is_of_the_same_size(data.clone()),
    ],
)
@pytest.mark.parametrize("kind", ["ranks", "sparse"])
def test_directories_that_do_not_fit_are_refused(tmp_path: Path, kind: str, change: Callable[[Tensor], Tensor]) -> None:
    path, _ = write_mapped(tmp_path / "a", kind)
    forge(path, DIRECTORIES, lambda tensors: tensors.update(user=change(tensors["user"])))
    with pytest.raises(ValueError, match="irectory"):
        load(path)


def test_an_artifact_without_directories_is_read(tmp_path: Path) -> None:
    path, expected = write_mapped(tmp_path / "a", "ranks")
    content_id = load(path).content_id

    def change(manifest: dict) -> None:
        del manifest["directories"], manifest["files"][DIRECTORIES]
        manifest["format_version"] = "1.3"

    restate(path, change)
    (path / DIRECTORIES).unlink()
    assert load(path)(EVERY_ROW).values().equal(expected)
    assert load(path).content_id == content_id  # so that deltas of before apply


def test_a_load_builds_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = write_mapped(tmp_path / "a", "sparse")
    for name in ("_rank_directory", "_sparse_directory"):
        monkeypatch.setattr(f"dnis_torchrec.blocks.routing.{name}", None)
    assert load(path)(EVERY_ROW).values().equal(expected)


# ---- other versions


def test_newer_minor_versions_and_format_1_0_are_read(artifact: Path) -> None:
    expected = load(artifact)(all_rows()).values()
    restate(artifact, lambda manifest: manifest.update(format_version="1.7", novelty=[1]))
    assert load(artifact)(all_rows()).values().equal(expected)
    restate(artifact, lambda manifest: manifest.update(format_version="1.0"))
    assert load(artifact)(all_rows()).values().equal(expected)


@pytest.mark.parametrize("form", ["csr_fp32", "mixed_dimension_int8"])
def test_a_form_that_is_gone_is_named_with_the_release_that_reads_it(tmp_path: Path, form: str) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "a", forms=[MIXED_DIMENSION])
    expected = load(path)(all_rows()).values()
    for ask in (
        lambda: load(path, form=form),
        lambda: serve(scheme, tables, form),
        lambda: scheme.served_bytes(form),
        lambda: write_artifact(tables, scheme, tmp_path / "b", forms=[form]),
    ):
        with pytest.raises(ValueError, match=r"0\.1\.0"):
            ask()

    def of_0_1_0(manifest: dict) -> None:
        manifest["forms"] = ["mixed_dimension_fp32", form]
        for table in manifest["tables"].values():
            shards = table["shards"][MIXED_DIMENSION]
            table["shards"] = {"mixed_dimension_fp32": shards, form: shards}

    restate(path, of_0_1_0)
    assert read_manifest(path)["forms"] == [MIXED_DIMENSION]
    assert load(path)(all_rows()).values().equal(expected)
    restate(path, lambda manifest: manifest.update(forms=[form]))
    with pytest.raises(ValueError, match=r"manifest.json.*0\.1\.0"):
        load(path)


def test_an_incomplete_description_of_a_scheme_is_refused() -> None:
    for _, scheme in (two_tables(), coded_tables()):
        described, tensors = scheme.to_json(), scheme.to_tensors()
        assert MixedDimensionScheme.from_parts(described, tensors).to_json() == described
        for field in described["user"]:
            fewer = described | {"user": {k: v for k, v in described["user"].items() if k != field}}
            with pytest.raises(ValueError, match=f"table 'user': .*{field}"):
                MixedDimensionScheme.from_parts(fewer, tensors)


# ---- verify


@pytest.fixture(scope="module")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tables in both forms, in codes."""
    return write_tiny_artifact(tmp_path_factory.mktemp("verification") / "artifact", forms=FORMS, codes=True)


@pytest.fixture
def copy(tiny_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact, tmp_path / "copy"))


def demo() -> dnis.Recipe:
    return tiny.demo(None)


def wider() -> dnis.Recipe:
    """The same with another hidden layer: the same names, other shapes."""
    model = DLRM(tiny.make_collection(), 4, [16, tiny.EMBEDDING_DIM], [8, 1])
    return replace(demo(), model=model)


def failures(result: Verification) -> dict[str, str]:
    return {finding.subject: finding.detail for finding in result.failures}


def subjects(result: Verification, check: str) -> set[str]:
    return {finding.subject for finding in result.findings if finding.check == check}


def test_a_whole_artifact_passes_in_every_form(tiny_artifact: Path, remote: MemoryFileSystem) -> None:
    result = verify(tiny_artifact, measure=partial(served_metrics, tiny_artifact, demo, Ranks()))
    assert failures(result) == {}
    assert set(result.forms) == set(FORMS)
    cases = bag_cases(read_scheme(tiny_artifact))
    assert {"all empty", "all the same id", "one long bag", "random bags"} < set(cases)
    assert subjects(result, "parity") == {f"{form}: {case}" for form in FORMS for case in cases}
    assert subjects(result, "unknown ids") == {f"{form}: {how}" for form in FORMS for how in ("refused", "as zero")}
    assert subjects(result, "metric") >= {f"{form}, auc" for form in FORMS}
    remote.put(str(tiny_artifact), "/bucket/artifact", recursive=True)
    assert failures(verify(fetch("memory://bucket/artifact"))) == {}


def test_a_model_of_nothing_but_tables_has_an_empty_state(tmp_path: Path) -> None:
    path = write_tiny_artifact(tmp_path / "artifact", recipe="tests.tiny:tables_alone", forms=(MIXED_DIMENSION,))
    assert load_dense_state(path) == {}
    result = verify(path, measure=partial(served_metrics, path, lambda: tables_alone(None), Ranks()))
    assert failures(result) == {}
    assert len(subjects(result, "metric")) > 0
    model = tables_alone(None).model
    model.scale = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="dense weights"):
        load_model(model, path)


def test_another_models_weights_and_metrics_are_findings(tiny_artifact: Path, copy: Path) -> None:
    result = verify(tiny_artifact, measure=partial(served_metrics, tiny_artifact, wider, Ranks()))
    assert set(failures(result)) == set(FORMS) == subjects(result, "metric")
    assert all("expected shape (16, 4), got (8, 4)" in detail for detail in failures(result).values())
    manifest = read_manifest(copy)
    manifest["run"]["metrics"]["auc"] += 2e-5
    write_manifest(copy, manifest)
    result = verify(copy, measure=partial(served_metrics, copy, demo, Ranks()))
    assert set(failures(result)) == {f"{form}, auc" for form in FORMS}


# ---- what verify finds


def flip_of(path: Path, position: int) -> str:
    flip(path, position, 4)
    return path.name


def of_packed(path: Path) -> Path:
    return next(iter(sorted((path / "packed").iterdir())))


def flip_value(path: Path) -> str:
    file = of_packed(path)
    return flip_of(file, 8 + struct.unpack("<Q", file.read_bytes()[:8])[0] + 2)


def remove(path: Path) -> str:
    file = of_packed(path)
    file.unlink()
    return file.name


def add(path: Path) -> str:
    (path / "notes.txt").write_text("mine")
    return "notes.txt"


def add_a_link(path: Path) -> str:
    (path / "elsewhere").symlink_to(path.parent, target_is_directory=True)
    return "elsewhere"


def list_a_stranger(path: Path, name: str = "evil/__init__.py") -> str:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    manifest = read_manifest(path)
    write_manifest(path, manifest | {"files": manifest["files"] | {name: describe_file(path, name)}})
    return name


def newer(path: Path) -> str:
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(fields | {"format_version": "9.0"}))
    return "9.0"


DAMAGE: list[Callable[[Path], str]] = [
    lambda path: flip_of(path / "scheme.safetensors", -1),
    *(flip_value, remove, add, add_a_link, list_a_stranger, newer),
]


@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damage_of_each_kind_is_named(copy: Path, number: int) -> None:
    name = DAMAGE[number](copy)
    result = verify(copy)
    assert [finding.check for finding in result.failures] == ["checksums"]
    assert name in result.failures[0].subject + result.failures[0].detail
    assert not result.to_json()["ok"]


# ---- values


@pytest.mark.parametrize(
    ("form", "wrong"), [("packed", "bit"), *((MIXED_DIMENSION, w) for w in ("value", "zero", "nan"))]
)
def test_wrong_values_are_found(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, form: str, wrong: str) -> None:
    def damage(path: Path, **options: Any) -> nn.Module:
        module = load(path, **options)
        if options["form"] == form == "packed":
            module.tables.get_buffer("user/rows")[0] ^= 1
        elif options["form"] == form:
            bags = module.blocks.embedding_bags
            row = next(bag.weight for name, bag in bags.items() if name.startswith("user/"))[0]
            change = {"value": row[-1] + 1e-3, "zero": torch.zeros(()), "nan": torch.tensor(torch.nan)}[wrong]
            with torch.no_grad():
                row[-1] = change
        return module

    monkeypatch.setattr(verification, "load", damage)
    result = failures(verify(tiny_artifact))
    assert {subject.split(":")[0] for subject in result} == {form}
    assert all("user: off by" in detail for detail in result.values())


@pytest.mark.parametrize("key", ["user", "genre"])
def test_nan_is_found_wherever_it_is(tiny_artifact: Path, key: str) -> None:
    """NaN compares with nothing, so that a maximum may pass over it."""
    oracle = Oracle(read_scheme(tiny_artifact), exact_rows(tiny_artifact))
    (bags, *_) = bag_cases(oracle.scheme).values()
    pooled = {name: value.float() for name, value in oracle.pool(bags)[0].items()}
    assert compare("parity", "form", lambda _: SimpleNamespace(to_dict=lambda: pooled), oracle, bags).status == "ok"
    pooled[key][0, 0] = float("nan")
    finding = compare("parity", "form", lambda _: SimpleNamespace(to_dict=lambda: pooled), oracle, bags)
    assert finding == Finding("parity", "form", "failed", f"{key}: off by nan, nan times what it may be")


def test_the_oracle_is_the_naive_one(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "LONGEST_BAG", 300)
    scheme, rows = read_scheme(tiny_artifact), exact_rows(tiny_artifact)
    oracle = Oracle(scheme, rows)
    for bags in bag_cases(scheme).values():
        pooled, _ = oracle.pool(bags)
        for name, table in scheme.tables.items():
            naive = pool(rows[name](0, table.num_embeddings), bags[name], table.pooling, table.is_weighted)
            torch.testing.assert_close(pooled[name].float(), naive)
    assert [[i for i, _ in bag] for bag in unknown_bags(scheme)["user"]] == [[-1], [0, 40], [2**31]]


def test_an_unknown_id_that_is_looked_up_is_found(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "load", lambda path, **options: load(path, **options | {"unknown_ids": "zero"}))
    detail = "ids [-1] were looked up without an error"
    assert failures(verify(tiny_artifact)) == {f"{form}: refused": detail for form in FORMS}


def test_sequences_are_verified_and_swapped_rows_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = interest(), [make_batch(seed) for seed in range(12)]
    loss = nn.BCEWithLogitsLoss()
    scheme = dnis.compress(copying.deepcopy(model), batches, loss=loss, compression=2.5).scheme
    with pytest.raises(
        ValueError, match="scheme: expected the tables of the model's collections"
    ):  # or none could load
        dnis.export(model, type(scheme)(dict([*scheme.tables.items()][:1])), tmp_path / "some")
    path = dnis.export(model, scheme, tmp_path / "artifact", forms=FORMS)
    result = verify(path)
    assert failures(result) == {}
    assert {"packed, sequences: random bags", "packed, users: random bags"} <= subjects(result, "parity")
    single = sequences.bags_of_single_ids
    monkeypatch.setattr(sequences, "bags_of_single_ids", lambda key, ids, *rest: single(key, ids.roll(1, 0), *rest))
    wrong = set(failures(verify(path)))
    assert "packed, sequences: random bags" in wrong
    assert not [subject for subject in wrong if "users" in subject]


def test_tables_of_other_lookups_are_refused_by_name(copy: Path) -> None:
    """A model would look for features that nobody looks up, take one table's for another's, or pool otherwise."""
    with pytest.raises(ValueError, match="model: expected an embedding collection to load into, got none; build"):
        load_model(nn.Linear(1, 1), copy)
    for field, value in (("num_embeddings", 40), ("embedding_dim", 8)):
        setattr((model := demo().model).sparse_arch.embedding_bag_collection.embedding_bag_configs()[0], field, 41)
        with pytest.raises(ValueError, match=f"table 'user': expected {field} 41, as the model's table, got {value}"):
            load_model(model, copy)
    demo_features = read_manifest(copy)["tables"]["user"]["feature_names"]
    for features in (["genre"], ["user", "user"], ["client"]):
        manifest = read_manifest(copy)
        manifest["tables"]["user"]["feature_names"] = features
        write_manifest(copy, manifest)
        with pytest.raises(ValueError, match="table 'user': expected the features of the model's table"):
            load_model(demo().model, copy)
    manifest["tables"]["user"]["feature_names"] = demo_features
    for field, value in (("pooling", "mean"), ("is_weighted", True)):
        of_user = manifest["tables"]["user"]
        write_manifest(copy, manifest | {"tables": manifest["tables"] | {"user": of_user | {field: value}}})
        with pytest.raises(ValueError, match=f"table 'user': expected {field} .*, as the model's table, got {value}"):
            load_model(demo().model, copy)


# ---- the command


def test_the_command_says_what_failed_and_exits_with_1(tiny_artifact: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path is wrapped
    copy = Path(shutil.copytree(tiny_artifact, "art[v2]:bug:"))  # markup to the library that prints tables
    result = CliRunner().invoke(app, ["evaluate", str(copy), "--verify", "--json", "good.json"])
    assert result.exit_code == 0, result.output
    assert json.loads(Path("good.json").read_text())["ok"]
    assert "art[v2]:bug:: what was checked" in result.output
    (copy / "notes[bold]").write_text("mine")
    name = flip_value(copy)
    result = CliRunner().invoke(app, ["evaluate", str(copy), "--verify", "--json", "bad.json"])
    assert result.exit_code == 1
    assert f"error: checksums, packed/{name}: expected sha256" in result.output
    assert "│ notes[bold]" in result.output
    bad = json.loads(Path("bad.json").read_text())
    wrong = {finding["subject"] for finding in bad["findings"] if finding["status"] == "failed"}
    assert (bad["ok"], wrong) == (False, {f"packed/{name}", "notes[bold]"})
