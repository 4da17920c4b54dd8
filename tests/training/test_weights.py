"""Weights of a user's own in files of every kind: what is read from them, and what is refused by name."""

from __future__ import annotations

import time
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import save as save_distributed

from dnis_torchrec.training.weights import weights_for_

SHAPES = {"user.weight": (6, 4), "over.weight": (1, 4), "over.bias": (1,), "norm.num_batches_tracked": ()}
State = dict[str, Any]


def model() -> nn.Module:
    norm = nn.ModuleDict()
    norm.register_buffer("num_batches_tracked", torch.tensor(0))
    return nn.ModuleDict({"user": nn.EmbeddingBag(6, 4), "over": nn.Linear(4, 1), "norm": norm})


def weights(prefix: str = "", table: object = None) -> State:
    """The model's weights behind a prefix, perhaps with another table."""
    generator = torch.Generator().manual_seed(3)
    state: State = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state["norm.num_batches_tracked"] = torch.tensor(7)
    state["user.weight"] = state["user.weight"] if table is None else table
    return {prefix + name: value for name, value in state.items()}


def save_safetensors(state: State, path: Path) -> Path:
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def save_zip(state: object, path: Path) -> Path:
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def save_folder(state: State, path: Path) -> Path:
    save_distributed(state, checkpoint_id=path.with_suffix(".dcp"))
    return path.with_suffix(".dcp")


Save = Callable[[Any, Path], Path]
KINDS: dict[str, Save] = {"safetensors": save_safetensors, "zip": save_zip, "folder": save_folder}


class Attributes(OrderedDict):
    """A dict of one's own, which nobody imports who reads it."""


def as_parameters(state: State) -> State:
    table = nn.Parameter(state["user.weight"])
    table.owner = "a user"
    return state | {"user.weight": table}


FORMS: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "behind a prefix": lambda state: {f"module.{name}": value for name, value in state.items()},
    "in a dict": lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {0: {"step": torch.ones(())}}}},
    "of half width": lambda state: state | {"user.weight": state["user.weight"].half()},
    "a view": lambda state: state | {"user.weight": torch.cat([torch.ones(2, 6), state["user.weight"].T]).T[:, 2:]},
}
FORMS_OF_ZIPS: dict[str, Callable[[State], Any]] = {
    "parameters": as_parameters,
    "a dict of one's own": lambda state: Attributes(state, more=Attributes()),
    "one dict twice": lambda state: {"args": (args := {"lr": 0.1}), "again": args, "state_dict": state},
    "float64": lambda state: state | {"user.weight": state["user.weight"].double()},
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("form", [*FORMS, *FORMS_OF_ZIPS])
def test_weights_are_read_as_they_were_saved(gloo, tmp_path: Path, kind: str, form: str) -> None:
    if form in FORMS_OF_ZIPS:
        path = save_zip(FORMS_OF_ZIPS[form](weights()), tmp_path / "w")
    else:
        state = FORMS["plain" if kind == "safetensors" and form in ("in a dict", "a view") else form](weights())
        path = KINDS[kind](state, tmp_path / "w")
    result, wanted = weights_for_(model(), path), weights()
    assert {name for name in result if name in wanted} == set(wanted)
    for name, value in wanted.items():
        tolerance = 1e-3 if form == "of half width" else 0
        torch.testing.assert_close(result[name].whole(), value, rtol=tolerance, atol=0, check_dtype=False)


def cyclic() -> State:
    state: State = weights()
    state["self"] = state
    return state


def doubled() -> State:
    state: State = {"x": torch.ones(1)}
    for _ in range(64):
        state = {"a": state, "b": state}
    return weights() | {"more": state}


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)])


def deflated(state: State, path: Path) -> Path:
    """What `zip` makes of the same files."""
    stored = save_zip(state, path.with_name("stored"))
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path.with_suffix(".pt"), "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return path.with_suffix(".pt")


def in_order(order: bytes) -> Save:
    def save(state: State, path: Path) -> Path:
        stored = save_zip(state, path.with_name("stored"))
        with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path.with_suffix(".pt"), "w") as new:
            for name in old.namelist():
                new.writestr(name, order if name.endswith("byteorder") else old.read(name))
        return path.with_suffix(".pt")

    return save


def with_pickle(*opcodes: bytes) -> Save:
    """A zip as torch.save makes it, with a pickle of another's own."""

    def save(_: State, path: Path) -> Path:
        with zipfile.ZipFile(path.with_suffix(".pt"), "w") as file:
            file.writestr("w/data.pkl", b"\x80\x02" + b"".join(opcodes) + b".")
        return path.with_suffix(".pt")

    return save


def cut(state: State, path: Path) -> Path:
    path = save_zip(state, path)
    path.write_bytes(path.read_bytes()[:-300])
    return path


def of_old_torch(state: State, path: Path) -> Path:
    torch.save(state, path.with_suffix(".pt"), _use_new_zipfile_serialization=False)
    return path.with_suffix(".pt")


def with_metadata(*opcodes: bytes) -> Save:
    """Saves a checkpoint folder, then replaces its metadata by a pickle of these opcodes."""

    def save(state: State, path: Path) -> Path:
        folder = save_folder(state, path)
        (folder / ".metadata").write_bytes(b"\x80\x04" + b"".join(opcodes) + b".")
        return folder

    return save


def record(name: str, state: bytes) -> bytes:
    """A record of a class with this state, as opcodes."""
    return text("torch.distributed.checkpoint") + text(name) + b"\x93)\x81" + state + b"b"


def fields(**values: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in values.items()) + b"u"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def tuples(depth: int) -> bytes:
    """A tuple of two of itself, and so on: few bytes, 2 ** depth places."""
    opcodes = b"K\x01"
    for number in range(depth):
        opcodes += b"\x94h" + bytes([number]) + b"\x86"
    return opcodes


def joined(depth: int) -> bytes:
    """A name made of two of itself, and so on."""
    opcodes = text("ab")
    for number in range(depth):
        opcodes += b"\x94h" + bytes([number]) + b"\x93"
    return opcodes


def index(**values: bytes) -> bytes:
    return record("MetadataIndex", fields(**{"fqn": text("user.weight"), "index": b"K\x00", "offset": b"N"} | values))


def info(**values: bytes) -> bytes:
    place = {"relative_path": text("__0_0.distcp"), "offset": b"K\x00", "length": b"K\x09"}
    return record("_StorageInfo", fields(**place | values))


def tensor(**values: bytes) -> bytes:
    properties = record("TensorProperties", text("torch.float32") + b"\x85")
    entries = {"properties": properties, "size": b"K\x06K\x04\x86", "chunks": b"]"} | values
    return b"}" + text("user.weight") + record("TensorStorageMetadata", fields(**entries)) + b"s"


def metadata(*, storage: bytes = b"}", state: bytes = b"}") -> Save:
    return with_metadata(record("Metadata", fields(state_dict_metadata=state, storage_data=storage)))


TABLE = r"user\.weight"
BOTH = r"ema\.\*, model\.\*"
HUGE = b"\x8a\xff" + b"\xff" * 254 + b"\x01"
SHARED: dict[str, tuple[Callable[[], State], str]] = {
    "two models": (lambda: weights("model.") | weights("ema."), BOTH),
    "a model beside another": (lambda: weights() | weights("ema."), r"\*, ema\.\*"),
    "integers": (lambda: weights(table=torch.ones(6, 4).long()), f"{TABLE}.*int64"),
    "bytes": (lambda: weights(table=torch.ones(6, 4).byte()), f"{TABLE}.*uint8"),
    "flags": (lambda: weights(table=torch.ones(6, 4).bool()), f"{TABLE}.*bool"),
    "complex numbers": (lambda: weights(table=torch.ones(6, 4, dtype=torch.complex64)), f"{TABLE}.*complex64"),
    "numbers that have a scale": (lambda: weights(table=torch.ones(6, 4).to(torch.float8_e4m3fn)), f"{TABLE}.*float8"),
    "a count of floats": (lambda: weights() | {"norm.num_batches_tracked": torch.tensor(7.0)}, "num_batches.*float32"),
    "another shape": (lambda: weights(table=torch.ones(4, 6)), rf"{TABLE}.*\(4, 6\)"),
}
OF_ZIPS: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: weights(table=torch.ones(6, 4).to_sparse()), f"{TABLE}.*sparse"),
    "sparse rows": (lambda: weights(table=torch.ones(6, 4).to_sparse_csr()), f"{TABLE}.*sparse"),
    "quantized": (
        lambda: weights(table=torch.quantize_per_tensor(torch.ones(6, 4), 0.1, 0, torch.qint8)),
        f"{TABLE}.*qtensor",
    ),
    "meta": (lambda: weights(table=torch.ones(6, 4, device="meta")), f"{TABLE}.*meta"),
    "tensors in a tensor": (lambda: weights(table=nested()), f"{TABLE}.*nested"),
    "a negative view": (lambda: weights(table=torch._neg_view(torch.ones(6, 4))), f"{TABLE}.*view"),
    "a dict that holds itself": (cyclic, "w.pt"),
    "dicts that double": (doubled, "w.pt"),
    "no dict": (lambda: [1, 2], "w.pt"),
    "no tensor": (lambda: {"user.weight": 3}, "missing"),
}
FILES: dict[str, tuple[Save, str]] = {
    "compressed": (deflated, "w.pt.*compressed"),
    "another order of bytes": (in_order(b"big"), "w.pt.*order"),
    "cut": (cut, "w.pt"),
    "before zips": (of_old_torch, "w.pt"),
    "a call that takes memory": (with_pickle(b"c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x40\x85R"), "w.pt"),
    "dicts in dicts": (with_pickle((b"}" + text("a")) * 20_000, b"}", b"s" * 20_000), "w.pt"),
    "a name of names": (with_pickle(joined(100)), "w.pt"),
    "a tensor without a storage": (
        with_pickle(
            b"}" + text("user.weight") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + tuples(60) + b"K\x00))\x89NtRs"
        ),
        "w.pt",
    ),
    "metadata: a name of names": (with_metadata(joined(100)), r"w\.dcp.*characters"),
    "metadata: a tuple as a key": (with_metadata(b"}", tuples(60), b"K\x01s"), "w.dcp"),
    "metadata: tuples in a field": (metadata(storage=tuples(60)), "w.dcp"),
    "metadata: a chunk of tuples": (metadata(storage=b"}" + index(fqn=tuples(60)) + info() + b"s"), r"w\.dcp.*text"),
    "metadata: a file of tuples": (
        metadata(storage=b"}" + index() + info(relative_path=tuples(60)) + b"s"),
        r"w\.dcp.*text",
    ),
    "metadata: a place out of reach": (
        metadata(storage=b"}" + index() + info(offset=HUGE, length=HUGE) + b"s"),
        r"w\.dcp.*sizes",
    ),
    "metadata: tuples as a size": (metadata(state=tensor(size=tuples(60))), r"w\.dcp.*sizes"),
    "metadata: tuples as a kind": (
        metadata(state=tensor(properties=record("TensorProperties", tuples(60)))),
        r"w\.dcp.*text",
    ),
    "metadata: a huge table": (metadata(state=tensor(size=HUGE + HUGE + b"\x86")), r"w\.dcp.*sizes"),
    "metadata: a large table": (metadata(state=tensor(size=b"\x8a\x06\0\0\0\0\0\x01" * 2 + b"\x86")), "w.dcp.*missing"),
    "metadata: a chunk in no file": (
        metadata(
            state=tensor(chunks=b"](" + record("Chunk", fields(offsets=b"K\0K\0\x86", sizes=b"K\x06K\x04\x86")) + b"e")
        ),
        "w.dcp",
    ),
    "metadata: lists in lists": (with_metadata(b"]" * 20_000, b"a" * 19_999), "w.dcp"),
    "metadata: a text without an end": (with_metadata(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x0f"), "w.dcp"),
    "metadata: nothing remembered": (with_metadata(b"j\xff\xff\xff\xff"), "w.dcp"),
    "metadata: empty": (with_metadata(), "w.dcp"),
}
Case = tuple[Callable[[Path], Path], str]
CASES: dict[str, Case] = {
    **{
        f"{kind}: {name}": (lambda path, save=save, make=make: save(make(), path), place)
        for kind, save in KINDS.items()
        for name, (make, place) in SHARED.items()
    },
    **{
        f"zip: {name}": (lambda path, make=make: save_zip(make(), path), place)
        for name, (make, place) in OF_ZIPS.items()
    },
    **{name: (lambda path, save=save: save(weights(), path), place) for name, (save, place) in FILES.items()},
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch advises against some of these kinds
@pytest.mark.parametrize("case", list(CASES))
def test_what_does_not_fit_or_was_made_to_harm_ends_in_one_line(gloo, tmp_path: Path, case: str) -> None:
    """Quickly, and before memory is asked for that the file does not have."""
    write, place = CASES[case]
    path = write(tmp_path / "w")
    begin = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"^(weights|checkpoint) {tmp_path}.*{place}") as caught:
            weights_for_(model(), path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.monotonic() - begin < 60
    assert peak < 1 << 28


@pytest.mark.parametrize("kind", ["meta", "float16"])
def test_a_chunk_of_another_kind_than_the_folder_says_is_refused_when_it_is_read(gloo, tmp_path, kind: str) -> None:
    other = {"meta": torch.ones(6, 4, device="meta"), "float16": torch.ones(6, 4).half()}[kind]
    folder, chunk = save_folder(weights(), tmp_path / "w"), save_zip(other, tmp_path / "chunk").read_bytes()
    places = FileSystemReader(folder).read_metadata().storage_data
    (place,) = [place for at, place in places.items() if at.fqn == "user.weight"]
    file = folder / place.relative_path
    content = bytearray(file.read_bytes())
    content[place.offset : place.offset + place.length] = chunk.rjust(place.length, b"\0")  # a zip may begin later
    assert len(content) == file.stat().st_size
    file.write_bytes(content)
    stored = weights_for_(model(), folder)["user.weight"]
    with pytest.raises(ValueError, match=rf"^checkpoint {folder}, {TABLE}.*{kind}"):
        stored.whole()
