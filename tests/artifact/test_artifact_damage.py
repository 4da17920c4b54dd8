"""Artifacts that were damaged, moved, forged or written by others: refused, by the name of the file."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dnis_torchrec.artifact import exact_rows, load, load_dense_state, read_manifest, read_scheme, verify_files
from dnis_torchrec.artifact import manifest as artifact
from tests.serving_reference import MIXED_FILE, PACKED_FILE, all_rows, whole_table, write_two_tables


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_tables(tmp_path_factory.mktemp("original") / "artifact")


@pytest.fixture
def written(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "artifact"))


def restate(path: Path, change: Callable[[dict], object]) -> None:
    """Changes the manifest as an attacker would: with its own hash made right again."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    manifest.pop("sha256", None)
    content = json.dumps(manifest | {"sha256": 64 * "0"}).encode()
    before, _, after = content.rpartition(64 * b"0")
    (path / "manifest.json").write_bytes(before + hashlib.sha256(content).hexdigest().encode() + after)


def header(file: Path) -> dict:
    """What the manifest says of a safetensors file's tensors."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    names = {"F32": "float32", "F16": "float16", "U8": "uint8", "I16": "int16", "I32": "int32"}
    names |= {"I64": "int64", "BOOL": "bool"}
    return {
        name: {"dtype": names[f["dtype"]], "shape": f["shape"], "offset": 8 + length + f["data_offsets"][0]}
        for name, f in json.loads(content[8 : 8 + length]).items()
    }


def restate_file(path: Path, name: str, *, tensors: bool = True) -> None:
    """Makes the manifest state the size, hash and tensors that a file has now."""
    content = (path / name).read_bytes()
    stated = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if tensors:
        stated["tensors"] = header(path / name)
    restate(path, lambda manifest: manifest["files"][name].update(stated))


def readers() -> list[Callable[[Path], object]]:
    return [lambda path: load(path, form="mixed_dimension"), exact_rows, read_scheme, load_dense_state]


@pytest.mark.parametrize("name", [MIXED_FILE, PACKED_FILE, "scheme.safetensors", "dense_state.safetensors"])
def test_flipped_bit_is_named(written: Path, name: str) -> None:
    verified = [lambda path: load(path, form="mixed_dimension", verify=True), *readers()[1:]]
    reader = dict(
        zip((MIXED_FILE, PACKED_FILE, "scheme.safetensors", "dense_state.safetensors"), verified, strict=True)
    )
    verify_files(written)
    flip(written / name, -1)
    for verify in (reader[name], verify_files):
        with pytest.raises(ValueError, match=f"file '{name}': expected sha256 .*damaged"):
            verify(written)


def flip(file: Path, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def test_a_flipped_bit_of_the_manifest_is_found(written: Path) -> None:
    content = (written / "manifest.json").read_bytes()
    for position in range(0, len(content), 29):
        flip(written / "manifest.json", position, position % 8)
        with pytest.raises(ValueError, match=r"file 'manifest\.json': expected"):
            read_manifest(written)
        (written / "manifest.json").write_bytes(content)


@pytest.mark.parametrize("name", [MIXED_FILE, PACKED_FILE, "scheme.safetensors", "dense_state.safetensors"])
def test_truncated_missing_and_renamed_files_are_named(written: Path, name: str) -> None:
    content = (written / name).read_bytes()
    for damage in (content[:-1], content + b"x", b""):
        (written / name).write_bytes(damage)
        for reader in readers():
            with pytest.raises(ValueError, match=f"file '{name}': expected {len(content)} bytes, got {len(damage)}"):
                reader(written)
    (written / name).rename(written / "elsewhere")
    for reader in readers():
        with pytest.raises(ValueError, match=f"file '{name}': expected a file, got none"):
            reader(written)


def test_exchanged_files_are_named(written: Path) -> None:
    """Both are whole and ours, only not in their place."""
    other = PACKED_FILE.replace("000_movie_seen", "001_user")
    (written / PACKED_FILE).rename(written / "aside")
    (written / other).rename(written / PACKED_FILE)
    (written / "aside").rename(written / other)
    with pytest.raises(ValueError, match=f"file '{PACKED_FILE}': expected"):
        exact_rows(written)


def test_linked_file_is_refused(written: Path, tmp_path: Path) -> None:
    (written / MIXED_FILE).rename(tmp_path / "outside")
    (written / MIXED_FILE).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"file '{MIXED_FILE}': expected a plain file, got a link or a folder"):
        load(written)


def test_linked_folder_is_refused(written: Path, tmp_path: Path) -> None:
    (written / "packed").rename(tmp_path / "outside")
    (written / "packed").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="expected a plain file, got a link or a folder"):
        read_manifest(written)


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../outside", "csr/../../outside", "./x", "", "a//b", "C:\\x", "a\\b", "a\0b"]
)
def test_path_out_of_the_folder_is_refused(written: Path, name: str) -> None:
    (written.parent / "outside").write_text("secret")
    restate(written, lambda manifest: manifest["files"].update({name: {"sha256": "", "bytes": 6}}))
    with pytest.raises(ValueError, match="expected a relative path within the folder"):
        read_manifest(written)


def test_table_may_not_name_an_unlisted_file(written: Path) -> None:
    restate(written, lambda m: m["tables"]["user"]["shards"]["mixed_dimension"][0].update(file="../outside"))
    with pytest.raises(ValueError, match=r"file '../outside': expected a known file"):
        load(written, form="mixed_dimension")


def test_damaged_manifest_is_refused(written: Path) -> None:
    file = written / "manifest.json"
    content = file.read_text()
    for damage in (content[: len(content) // 2], "", "\udcff", "[" * 100_000):
        file.write_bytes(damage.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"file 'manifest.json': expected JSON"):
            read_manifest(written)
    file.write_text(content.replace('"movie"', '"mov1e"'))
    with pytest.raises(ValueError, match=r"file 'manifest.json': expected the sha256 that it states of itself"):
        read_manifest(written)
    file.unlink()
    with pytest.raises(ValueError, match=r"file 'manifest.json': expected a file, got none"):
        read_manifest(written)


@pytest.mark.parametrize("content", ["[]", "{}", "3", "null", '{"format": "onnx", "format_version": "1.0"}'])
def test_foreign_manifest_is_refused(written: Path, content: str) -> None:
    (written / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"file 'manifest.json': expected format 'dnis-torchrec-artifact', got"):
        load(written)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere': expected a folder"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.0", r"file 'manifest.json': expected a format_version up to 1\.x, got '2\.0'; update"),
        ("10", r"up to 1\.x, got '10'"),
        (1, "expected a format_version like '1.1', got 1"),
        (None, "expected a format_version like"),
        ("new", "expected a format_version like"),
        ("9" * 5000, "expected a format_version like"),
    ],
)
def test_newer_and_strange_versions_are_refused(written: Path, version: object, message: str) -> None:
    restate(written, lambda manifest: manifest.update(format_version=version))
    with pytest.raises(ValueError, match=message):
        load(written)


def test_newer_minor_version_is_read(written: Path) -> None:
    restate(written, lambda manifest: manifest.update(format_version="1.7", novelty=[1]))
    load(written)


def test_manifest_lacking_a_field_is_refused(written: Path) -> None:
    restate(written, lambda manifest: manifest.pop("tables"))
    with pytest.raises(ValueError, match=r"expected all fields, got none of \['tables'\]"):
        read_manifest(written)


def test_an_artifact_of_a_development_version_is_refused_clearly(written: Path) -> None:
    """Before 1.0 was final a table named its files, one per form, and the manifest neither scheme nor dense state."""

    def older(manifest: dict) -> None:
        del manifest["scheme"], manifest["dense_state"]
        for table in manifest["tables"].values():
            table["files"] = {form: shards[0]["file"] for form, shards in table.pop("shards").items()}

    restate(written, older)
    for reader in readers():
        with pytest.raises(ValueError, match=r"it is of a version before 1\.0 was final, or not whole; export again"):
            reader(written)


def test_file_of_another_kind_is_refused(written: Path) -> None:
    (written / MIXED_FILE).write_bytes(b"PK\x03\x04 a pickle, perhaps")
    restate_file(written, MIXED_FILE, tensors=False)
    with pytest.raises(ValueError, match=f"file '{MIXED_FILE}': expected a safetensors file"):
        load(written, form="mixed_dimension")
    for content in (b"{}", b"[1]", b'{"b0": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}', b"[" * 9999):
        (written / MIXED_FILE).write_bytes(len(content).to_bytes(8, "little") + content)
        restate_file(written, MIXED_FILE, tensors=False)
        with pytest.raises(ValueError, match=f"file '{MIXED_FILE}': expected (a safetensors file|tensors)"):
            load(written, form="mixed_dimension")


@pytest.mark.parametrize(
    "tensors",
    [
        {"b0": torch.zeros(3, 5)},
        {"b0": torch.zeros(3, 5), "b1": torch.zeros(3, 3)},
        {"b0": torch.zeros(3, 5), "b1": torch.zeros(3, 2).half()},
        {"b0": torch.zeros(3, 5), "b1": torch.zeros(3, 2), "b2": torch.zeros(3, 1)},
    ],
)
def test_other_tensors_than_stated_are_refused(written: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, written / MIXED_FILE)
    restate_file(written, MIXED_FILE, tensors=False)
    with pytest.raises(ValueError, match=f"file '{MIXED_FILE}': expected tensors"):
        load(written, form="mixed_dimension")
    # and where the manifest goes along with it, the scheme does not
    restate_file(written, MIXED_FILE)
    with pytest.raises(ValueError, match=r"expected tensors \['b0', 'b1'\]|expected block 1: float32 of shape"):
        load(written, form="mixed_dimension")


def test_scheme_that_does_not_fit_is_refused(written: Path) -> None:
    restate(written, lambda manifest: manifest["tables"]["user"].update(embedding_dim=6))
    with pytest.raises(ValueError, match="table 'user': expected retained of shape"):
        load(written)


@pytest.mark.parametrize(
    "shards",
    [
        None,
        [],
        [None],
        [{"file": PACKED_FILE}],
        [{"file": PACKED_FILE, "first_row": 1, "num_rows": 9}],
        [{"file": PACKED_FILE, "first_row": 0, "num_rows": 9}],
        [{"file": PACKED_FILE, "first_row": 0, "num_rows": 10}, {"file": PACKED_FILE, "first_row": 10, "num_rows": 0}],
        [{"file": PACKED_FILE, "first_row": 0, "num_rows": True}],
    ],
)
def test_shards_that_are_not_all_rows_in_order_are_refused(written: Path, shards: object) -> None:
    restate(written, lambda manifest: manifest["tables"]["movie/seen"]["shards"].update(packed=shards))
    where = r"field tables\.movie/seen\.shards\.packed.*: expected"
    form = rf"{where}|expected a?.*shards? of table 'movie/seen', form 'packed'"
    with pytest.raises(ValueError, match=form):
        load(written)


def test_map_with_a_block_that_does_not_exist_is_refused(written: Path) -> None:
    name = "scheme.safetensors"
    tensors = artifact.read_artifact_file(written, read_manifest(written), name)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    tensors["movie/seen/block_of_row"][0] = 200
    save_file(tensors, written / name)
    restate_file(written, name)
    with pytest.raises(
        ValueError, match=r"file 'scheme.safetensors': table 'movie/seen': expected blocks 0\.\.3, got 200"
    ):
        load(written)


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of everything in a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("forged", [None, -1, "x", [], "gone"])
def test_forged_manifest_is_read_or_refused(written: Path, forged: object) -> None:
    """Whatever stands in a manifest, reading gives a module or a ValueError, never another error."""
    original = json.loads((written / "manifest.json").read_text())
    for fields in original["tables"].values():
        del fields["blocks"]  # said for people; the scheme's tensors say it for `load`
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
        try:
            load(written, collection="ebc")
            exact_rows(written)
        except ValueError:
            continue


def test_artifacts_of_format_1_0_are_read(written: Path) -> None:
    """Their sparse rows are passed over."""
    exact = load(written)(all_rows()).values()

    def as_before(manifest: dict) -> None:
        manifest["format_version"] = "1.0"
        manifest["forms"] = ["mixed_dimension", "csr"]
        for table in manifest["tables"].values():
            table["shards"]["csr"] = table["shards"].pop("packed")

    restate(written, as_before)
    assert read_manifest(written)["forms"] == ["mixed_dimension"]
    assert load(written)(all_rows()).values().equal(exact)
    assert whole_table(written, "movie/seen").shape == (10, 5)
    verify_files(written)
