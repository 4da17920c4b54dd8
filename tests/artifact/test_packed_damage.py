"""Artifacts of bit fields that were damaged or forged: refused by name, and no lookup leaves its table."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dnis_torchrec.artifact import load, read_manifest, read_scheme, verify_files
from tests.artifact.test_artifact_damage import flip, places, restate, restate_file
from tests.coded_tables import PACKED_FILE, coded_tables, rounded, write_coded_tables
from tests.serving_reference import all_rows

SCHEME_FILE = "scheme.safetensors"
NAME = "movie/seen"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coded_tables(tmp_path_factory.mktemp("original") / "artifact")


@pytest.fixture
def written(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "artifact"))


def forge(path: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes tensors of a file, and all that is said of them, as an attacker would."""
    tensors = {key: tensor.clone() for key, tensor in load_file(path / name).items()}
    change(tensors)
    save_file(tensors, path / name)
    restate_file(path, name)


def test_a_flipped_bit_of_any_byte_is_found_and_never_leaves_the_table(written: Path) -> None:
    file = written / PACKED_FILE
    content, expected = file.read_bytes(), load(written)(all_rows()).values()
    first_value = read_manifest(written)["files"][PACKED_FILE]["tensors"]["rows"]["offset"]
    refused = 0
    for position in range(len(content)):
        flip(file, position, position % 8)
        with pytest.raises(ValueError, match=f"file '{PACKED_FILE}': expected sha256"):
            verify_files(written)
        try:
            out = load(written)(all_rows()).values()
            assert position >= first_value or out.equal(expected)
        except ValueError:
            refused += 1
        file.write_bytes(content)
    assert refused >= first_value - 16  # all of the header but the blanks at its end


def num_bytes() -> int:
    """Of the rows of the first table."""
    tables, scheme = coded_tables()
    assert rounded(scheme.tables[NAME], tables[NAME]).shape == (10, 5)
    counts = scheme.tables[NAME].routing.row_counts()
    return int(counts @ torch.tensor([8, 2, 0]))  # 4 bits, 32 from the second byte on, 7, 16; and 3, 1, 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], r"expected uint8 of shape \({},\), got torch.uint8"),
        (lambda rows: torch.cat([rows, rows[:1]]), r"expected uint8 of shape \({},\), got torch.uint8"),
        (lambda rows: rows[:0], r"expected uint8 of shape \({},\), got torch.uint8 \(0,\)"),
        (lambda rows: rows.unsqueeze(0), r"expected uint8 of shape \({},\), got torch.uint8 \(1, {}\)"),
        (lambda rows: rows.short(), r"expected uint8 of shape \({},\), got torch.int16"),
    ],
)
def test_rows_of_another_size_or_dtype_are_refused(
    written: Path, change: Callable[[Tensor], Tensor], message: str
) -> None:
    forge(written, PACKED_FILE, lambda tensors: tensors.update(rows=change(tensors["rows"]).contiguous()))
    size = num_bytes()
    for form in (None, "mixed_dimension"):
        with pytest.raises(ValueError, match=f"file '{PACKED_FILE}': " + message.format(size, size)):
            load(written, form=form)


@pytest.mark.parametrize("names", [{"rows": "b0"}, {"more": "more"}])
def test_other_tensors_are_refused(written: Path, names: dict[str, str]) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for old, new in names.items():
            tensors[new] = tensors.pop(old, torch.zeros(1))

    forge(written, PACKED_FILE, rename)
    with pytest.raises(ValueError, match=rf"file '{PACKED_FILE}': expected tensors \['rows'\]"):
        load(written)


SCALE, SHIFT, BITS = f"{NAME}/scale", f"{NAME}/shift", f"{NAME}/bits"


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (SCALE, 0.0, r"ColumnCodes.scale: expected finite bfloat16 values above 0, got 0.0 in block 1, column 4"),
        (SCALE, -1.0, "ColumnCodes.scale: .*got -1.0 in block 1, column 4"),
        (SCALE, torch.nan, "ColumnCodes.scale: .*got nan in block 1, column 4"),
        (SCALE, torch.inf, "ColumnCodes.scale: .*got inf in block 1, column 4"),
        (SCALE, 1.001, "ColumnCodes.scale: .*got 1.00.* in block 1, column 4"),
        (BITS, 9, r"table 'movie/seen': expected bits among \(0, 1, .*got \[9\]"),
        (BITS, 64, r"table 'movie/seen': expected bits among \(0, 1, .*got \[64\]"),
        (BITS, 255, r"table 'movie/seen': expected bits among \(0, 1, .*got \[255\]"),
        (BITS, 0, r"table 'movie/seen': expected bits of shape \(3, 5\), above 0 where a column is retained"),
    ],
)
def test_codes_that_no_writer_writes_are_refused(written: Path, part: str, value: float, message: str) -> None:
    forge(written, SCHEME_FILE, lambda tensors: tensors[part].__setitem__((1, 4), value))
    for read in (load, read_scheme, lambda path: load(path, form="mixed_dimension")):
        with pytest.raises(ValueError, match=f"file '{SCHEME_FILE}': {message}"):
            read(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({SCALE: torch.ones(3, 5).half()}, "ColumnCodes.scale: expected torch.float32"),
        ({SCALE: torch.ones(3, 4)}, r"ColumnCodes.scale: expected torch.float32 of shape \(3, 5\)"),
        ({SHIFT: torch.ones(3, 5).int()}, "ColumnCodes.shift: expected torch.int16"),
        ({SHIFT: torch.ones(2, 5).short()}, r"ColumnCodes.shift: expected torch.int16 of shape \(3, 5\)"),
        ({BITS: torch.ones(3, 5).int()}, "table 'movie/seen': expected bits|ColumnCodes.bits: expected torch.uint8"),
        ({BITS: torch.ones(3, 4).byte()}, r"table 'movie/seen': expected bits of shape \(3, 5\)"),
        ({BITS: None}, "table 'movie/seen': expected bits beside scales and shifts, got none"),
        ({SCALE: None}, "table 'movie/seen': expected bits, scales and shifts"),
        ({SHIFT: None}, "table 'movie/seen': expected bits, scales and shifts"),
    ],
)
def test_codes_of_another_shape_or_dtype_are_refused(
    written: Path, change: dict[str, Tensor | None], message: str
) -> None:
    def replace(tensors: dict[str, Tensor]) -> None:
        for name, value in change.items():
            tensors.pop(name)
            if value is not None:
                tensors[name] = value

    forge(written, SCHEME_FILE, replace)
    with pytest.raises(ValueError, match=f"file '{SCHEME_FILE}': ({message})"):
        load(written)


def test_rows_without_codes_are_refused(written: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in (BITS, SCALE, SHIFT):
            del tensors[name]

    forge(written, SCHEME_FILE, drop)
    with pytest.raises(ValueError, match=f"file '{PACKED_FILE}': expected uint8 of shape"):
        load(written)


def test_other_bits_than_the_rows_have_are_refused(written: Path) -> None:
    """Every width that makes another row of it; where the bytes stay, so does every lookup within them."""
    for width in (1, 2, 4, 8, 16, 32):
        forge(written, SCHEME_FILE, lambda tensors, width=width: tensors[BITS].__setitem__((0, 0), width))
        if width in (2, 4, 8):  # bits 32 begins at a whole byte: the row is as long
            assert load(written)(all_rows()).values().isfinite().all()
        elif width != 1:
            with pytest.raises(ValueError, match=rf"file '{PACKED_FILE}': expected uint8 of shape"):
                load(written)


def test_a_map_that_counts_other_rows_is_refused(written: Path) -> None:
    forge(written, SCHEME_FILE, lambda tensors: tensors[f"{NAME}/block_of_row"].fill_(0))
    with pytest.raises(ValueError, match=f"file '(scheme.safetensors|{PACKED_FILE})': .*expected"):
        load(written)


@pytest.mark.parametrize("forged", [None, "x", "gone"])
def test_forged_manifest_is_read_or_refused(written: Path, forged: object) -> None:
    original = json.loads((written / "manifest.json").read_text())
    for fields in original["tables"].values():
        del fields["blocks"]
    for place in places({key: original[key] for key in ("forms", "tables", "files")}):
        manifest = copy.deepcopy(original)
        *outer, last = place
        inner = manifest
        for key in outer:
            inner = inner[key]
        if forged == "gone":
            del inner[last]
        else:
            inner[last] = forged
        (written / "manifest.json").write_text(json.dumps(manifest))
        restate(written, lambda _: None)
        for read in (load, lambda path: load(path, form="mixed_dimension")):
            try:
                read(written)
            except ValueError:
                continue
