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

from dnis_torchrec.export import artifact, load, load_csr, load_dense_state, read_manifest, read_scheme
from tests.serving_reference import CSR_FILE, MIXED_FILE, write_two_tables


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
    fields = {key: value for key, value in manifest.items() if key != "sha256"}
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def restate_file(path: Path, name: str) -> None:
    """Makes the manifest state the size and hash that a file has now."""
    content = (path / name).read_bytes()
    stated = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    restate(path, lambda manifest: manifest["files"][name].update(stated))


def readers() -> list[Callable[[Path], object]]:
    return [load, lambda path: load_csr(path, "movie/seen"), read_scheme, load_dense_state]


@pytest.mark.parametrize("name", [MIXED_FILE, CSR_FILE, "scheme.safetensors", "dense_state.safetensors"])
def test_flipped_bit_is_named(written: Path, name: str) -> None:
    reader = dict(zip((MIXED_FILE, CSR_FILE, "scheme.safetensors", "dense_state.safetensors"), readers(), strict=True))
    content = bytearray((written / name).read_bytes())
    content[-1] ^= 1
    (written / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"file '{name}': expected sha256 .*damaged"):
        reader[name](written)


@pytest.mark.parametrize("name", [MIXED_FILE, CSR_FILE, "scheme.safetensors", "dense_state.safetensors"])
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
    other = CSR_FILE.replace("000_movie_seen", "001_user")
    (written / CSR_FILE).rename(written / "aside")
    (written / other).rename(written / CSR_FILE)
    (written / "aside").rename(written / other)
    with pytest.raises(ValueError, match=f"file '{CSR_FILE}': expected"):
        load_csr(written, "movie/seen")


def test_linked_file_is_refused(written: Path, tmp_path: Path) -> None:
    (written / MIXED_FILE).rename(tmp_path / "outside")
    (written / MIXED_FILE).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"file '{MIXED_FILE}': expected a plain file, got a link or a folder"):
        load(written)


def test_linked_folder_is_refused(written: Path, tmp_path: Path) -> None:
    (written / "csr").rename(tmp_path / "outside")
    (written / "csr").symlink_to(tmp_path / "outside")
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
    restate(written, lambda m: m["tables"]["user"]["files"].update(mixed_dimension="../outside"))
    with pytest.raises(ValueError, match=r"file '../outside': expected a known file"):
        load(written)


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
        (1, "expected a format_version like '1.0', got 1"),
        (None, "expected a format_version like"),
        ("new", "expected a format_version like"),
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


def test_file_of_another_kind_is_refused(written: Path) -> None:
    (written / MIXED_FILE).write_bytes(b"PK\x03\x04 a pickle, perhaps")
    restate_file(written, MIXED_FILE)
    with pytest.raises(ValueError, match=f"file '{MIXED_FILE}': expected a safetensors file"):
        load(written)


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
    restate_file(written, MIXED_FILE)
    with pytest.raises(ValueError, match=f"file '{MIXED_FILE}': expected tensors"):
        load(written)
    # and where the manifest goes along with it, the scheme does not
    stated = {k: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for k, t in tensors.items()}
    restate(written, lambda manifest: manifest["files"][MIXED_FILE].update(tensors=stated))
    with pytest.raises(ValueError, match=r"expected tables of blocks|block 1: expected float32 of shape"):
        load(written)


def test_scheme_that_does_not_fit_is_refused(written: Path) -> None:
    restate(written, lambda manifest: manifest["tables"]["user"].update(embedding_dim=6))
    with pytest.raises(ValueError, match="table 'user': expected retained of shape"):
        load(written)


def test_sparse_rows_that_do_not_fit_are_refused(written: Path) -> None:
    shutil.rmtree(written / "mixed_dimension")

    def only_csr(manifest: dict) -> None:
        manifest["forms"] = ["csr"]
        manifest["files"] = {k: v for k, v in manifest["files"].items() if not k.startswith("mixed_dimension")}

    restate(written, only_csr)
    load(written)
    tensors = {
        "values": torch.ones(1),
        "columns": torch.zeros(1, dtype=torch.uint8),
        "row_pointers": torch.tensor([0, 1], dtype=torch.int32),
    }
    save_file(tensors, written / CSR_FILE)
    restate_file(written, CSR_FILE)
    stated = {k: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for k, t in tensors.items()}
    restate(written, lambda manifest: manifest["files"][CSR_FILE].update(tensors=stated))
    with pytest.raises(ValueError, match=f"file '{CSR_FILE}': expected 10 rows, got 1"):
        load(written)


def test_map_with_a_block_that_does_not_exist_is_refused(written: Path) -> None:
    name = "scheme.safetensors"
    tensors = artifact.read_tensors(written, read_manifest(written), name)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    tensors["movie/seen/block_of_row"][0] = 200
    save_file(tensors, written / name)
    restate_file(written, name)
    with pytest.raises(ValueError, match=r"expected blocks 0\.\.3 in table 'movie/seen'"):
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
            load_csr(written, "user")
        except ValueError:
            continue
