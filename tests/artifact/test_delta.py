"""Deltas: base and deltas are the whole artifact, byte for byte, in folders and in served modules; all or nothing."""

from __future__ import annotations

import copy
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact import load as loading
from dnis_torchrec.artifact.delta import (
    ServedState,
    _table_of,
    apply_delta,
    gaps_of,
    places_of,
    read_delta,
    read_state,
    write_delta,
    write_state,
)
from dnis_torchrec.artifact.export import Predictor, load_model
from dnis_torchrec.artifact.load import load
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.files import folder_lock
from dnis_torchrec.scheme import FORMS, PACKED, MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.gate import Gate
from dnis_torchrec.serving.packed import pack_rows
from tests import tiny
from tests.artifact.test_damage import bounded, restate, restate_file
from tests.programs import run_python
from tests.reference import all_rows, cases, coded_case, table_scheme, with_codes, write_coded_tables
from tests.tiny import files_of, write_tiny_artifact

MANY = {
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
    "deadline": None,
    "phases": (Phase.explicit, Phase.generate),
}


# ---- states: by hand, row by row


def encoded(table: TableScheme, weight: Tensor) -> Tensor:
    return pack_rows(table, [weight], table.routing.row_counts())


def with_newborn(table: TableScheme, rows: list[int], source: Random) -> TableScheme:
    """The same table with a block behind the others for rows that have had no byte."""
    last, dim = table.num_blocks, table.embedding_dim
    blocks = [last + 1 if block == last else block for block in table.routing.all_blocks().tolist()]
    for row in rows:
        blocks[row] = last
    one = table_scheme("new", RowRouting(1, 1, boundaries=torch.tensor([0, 1])), torch.ones(1, dim, dtype=torch.bool))
    codes = with_codes(one, seed=source.randrange(99), widths=(2, 3, 5, 32)).codes
    routing = RowRouting.from_map(torch.tensor(blocks), last + 1)
    parts = {n: torch.cat([getattr(table.codes, n), getattr(codes, n)]) for n in ("bits", "scale", "shift")}
    retained = parts["bits"] > 0
    area = int((routing.row_counts() * retained.sum(1)).sum())
    return replace(table, routing=routing, retained=retained, num_retained=area, **parts)


def blocks_of(table: TableScheme, rows: Tensor) -> list[list[list[int]]]:
    """The bytes of every row of every block; a float32 begins at a byte."""
    blocks, at, content = [], 0, rows.tolist()
    for widths, count in zip(table.column_bits().tolist(), table.routing.row_counts().tolist(), strict=True):
        end = 0
        for width in widths:
            end = ((end + 7) // 8 * 8 if width == 32 else end) + width
        stride = (end + 7) // 8
        blocks.append([content[at + row * stride : at + (row + 1) * stride] for row in range(count)])
        at += stride * count
    return blocks


def next_state(state: ServedState, source: Random, *, share: float | None = None, newborn: bool = True) -> ServedState:
    """A state that differs in whatever may: some rows, scales of some blocks, newborn rows, dense weights, the run."""
    tables, rows = dict(state.scheme.tables), dict(state.rows)
    for name, table in state.scheme.tables.items():
        if not table.has_codes:
            continue
        old_blocks = table.routing.all_blocks().tolist()
        has_bytes = [*table.retained.any(1).tolist(), False]
        free = [row for row, block in enumerate(old_blocks) if not has_bytes[block]]
        new = table
        if newborn and free and source.random() < 0.5:
            new = with_newborn(table, sorted(source.sample(free, source.randint(1, len(free)))), source)
        scale = new.scale.clone()
        for block in range(len(scale)):
            if source.random() < 0.3:
                scale[block] *= 2
        new = replace(new, scale=scale)
        tables[name] = new
        # rows that are not to change keep the bytes that they have had
        generator = torch.Generator().manual_seed(source.randrange(2**31))
        fresh = blocks_of(
            new, encoded(new, torch.randn(table.num_embeddings, table.embedding_dim, generator=generator))
        )
        old = blocks_of(table, state.rows[name])
        part = source.choice([0, 0.2, 1]) if share is None else share
        for block, of_block in enumerate(old):
            for row in range(len(of_block) if any(of_block) else 0):
                if source.random() >= part:
                    fresh[block][row] = of_block[row]
        rows[name] = torch.tensor([byte for block in fresh for row in block for byte in row], dtype=torch.uint8)
    dense = {key: (value + 1).to(value) if source.random() < 0.5 else value for key, value in state.dense.items()}
    changes: dict[str, Any] = {"scheme": MixedDimensionScheme(tables), "rows": rows, "dense": dense}
    return replace(state, **changes, run={"seed": source.randrange(99)}, sequence=state.sequence + 1)


def values(module: nn.Module, features: Any = None) -> Tensor:
    with torch.no_grad():
        return module(all_rows() if features is None else features).values()


def same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.nan_to_num(7e7).equal(second.nan_to_num(7e7))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two tables in bit fields, with a dense state and a run."""
    return write_coded_tables(tmp_path / "base")


# ---- gaps


@given(st.sets(st.integers(0, 3000)), st.integers(0, 600))
def test_gaps_are_counted_one_by_one(places: set[int], more: int) -> None:
    expected, previous = [], -1
    for place in sorted(places):
        gap = place - previous - 1
        while gap >= 255:
            expected.append(255)
            gap -= 255
        expected.append(gap)
        previous = place
    gaps = gaps_of(torch.tensor(sorted(places), dtype=torch.int64))
    assert gaps.tolist() == expected
    assert places_of(gaps, 3001 + more, "here").tolist() == sorted(places)
    for damage in ([*expected, 255], [*expected, 255, 255, *13 * [255], 254]):
        with pytest.raises(ValueError, match="here: expected places below"):
            places_of(torch.tensor(damage, dtype=torch.uint8), 3001, "here")


# ---- base and deltas are the whole


@settings(max_examples=15, **MANY)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_base_and_deltas_are_the_whole_artifact(tmp_path: Path, case: Any, seed: int) -> None:
    source = Random(seed)
    case, weights = coded_case(case, seed)
    dense = {"a.weight": torch.randn(2, 3), "a.step": torch.tensor(3), "b": torch.tensor([True])}
    for name in ("base", "folder"):
        write_artifact(weights, case.scheme, tmp_path / name, forms=[PACKED], dense_state=dense, overwrite=True)
    state, served = read_state(tmp_path / "base"), load(tmp_path / "base")
    for number in range(2):
        state = next_state(state, source)
        delta = write_delta(tmp_path / "base", state, tmp_path / f"delta-{number}", overwrite=True)
        whole = write_state(state, tmp_path / "base", overwrite=True)
        assert apply_delta(tmp_path / "folder", delta) == tmp_path / "folder"
        assert files_of(tmp_path / "folder") == files_of(whole)
        assert read_state(whole).content_id == read_delta(delta).result
        assert apply_delta(served, delta) is served
        fresh = load(whole)
        assert same(values(served, case.kjt()), values(fresh, case.kjt()))
        assert {n: v.tolist() for n, v in served.state_dict().items()} == {
            n: v.tolist() for n, v in fresh.state_dict().items()
        }
        assert (served.content_id, served.sequence) == (fresh.content_id, number + 1)


def test_nothing_changed_is_nothing_but_a_number(base: Path, tmp_path: Path) -> None:
    delta = write_delta(base, read_state(base), tmp_path / "delta")
    assert [file.name for file in delta.iterdir()] == ["manifest.json"]
    before = files_of(base)
    apply_delta(base, delta)
    assert {name for name, content in files_of(base).items() if content != before[name]} == {"manifest.json"}
    assert read_state(base).sequence == 1


def large(path: Path, num_rows: int) -> tuple[Path, ServedState]:
    """A table of rows of eight bytes in four blocks, one of them without a byte."""
    retained = torch.tensor([[1] * 16, [1] * 16, [1] * 8 + [0] * 8, [0] * 16], dtype=torch.bool)
    cuts = torch.tensor([0, num_rows // 10, num_rows // 2, num_rows * 9 // 10, num_rows])
    table = table_scheme("t", RowRouting(num_rows, 4, boundaries=cuts), retained)
    codes = with_codes(table, widths=(4,)).codes
    table = table.with_codes(replace(codes, bits=(retained * 4).to(torch.uint8)))
    scheme = MixedDimensionScheme({"t": table, "other": replace(table, name="other")})
    size = int(table.file_bytes(PACKED))
    rows = {name: torch.randint(0, 256, (size,), dtype=torch.uint8) for name in scheme.tables}
    state = ServedState(scheme=scheme, rows=rows, dense={"w": torch.randn(8, 8)}, run={})
    write_state(state, path)
    return path, state


def some_rows_changed(state: ServedState, share: float) -> ServedState:
    rows = state.rows["t"].clone()
    eighths = rows[: len(rows) // 8 * 8].view(-1, 8)
    chosen = torch.rand(len(eighths)) < share
    eighths[chosen] = torch.randint(0, 256, (int(chosen.sum()), 8), dtype=torch.uint8)
    return replace(state, rows={**state.rows, "t": rows})


def test_a_delta_is_small_and_other_tables_stay_mapped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, state = large(tmp_path / "base", 100_000)
    both = some_rows_changed(state, 0.05)
    both = replace(both, rows={name: both.rows["t"] for name in both.rows})
    write_state(replace(state, rows=dict.fromkeys(state.rows, state.rows["t"])), tmp_path / "twins")
    delta = write_delta(tmp_path / "twins", both, tmp_path / "small")
    sizes = [sum(len(content) for content in files_of(folder).values()) for folder in (delta, tmp_path / "twins")]
    assert sizes[0] <= 0.06 * sizes[1]
    served = load(path)
    before = {name: buffer.data_ptr() for name, buffer in served.tables.named_buffers()}
    apply_delta(served, write_delta(path, some_rows_changed(state, 0.01), tmp_path / "delta"))
    after = {name: buffer.data_ptr() for name, buffer in served.tables.named_buffers()}
    assert {name for name in before if before[name] != after[name]} == {"t/rows"}


# ---- what was loaded


def changed_base(base: Path, out: Path, seed: int = 0, **options: Any) -> tuple[Path, Path]:
    """A delta on a base, and the whole artifact that it leads to."""
    state = next_state(read_state(base), Random(seed), share=0.5, **options)
    return write_delta(base, state, out / "delta"), write_state(state, out / "whole")


def test_a_module_stays_a_module(base: Path, tmp_path: Path) -> None:
    """It moves, is copied, pickled and loaded as before, and a copy takes the next delta by itself."""
    delta, whole = changed_base(base, tmp_path)
    served = load(base)
    twin = copy.deepcopy(served)
    old = values(twin)
    assert values(apply_delta(served, delta)).equal(values(load(whole)))
    assert values(twin).equal(old)
    for other in (copy.deepcopy(served), apply_delta(twin, delta), served.to("cpu").eval()):
        assert values(other).equal(values(served))
    stale = load(base)
    for other in (twin, stale):
        other.load_state_dict(served.state_dict())
        assert values(other).equal(values(served))
    with pytest.raises(ValueError, match="its scheme, got those of another state_dict; load the artifact"):
        apply_delta(stale, delta)


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_artifact(tmp_path_factory.mktemp("tiny") / "base", forms=(PACKED,), codes=True)


@pytest.mark.filterwarnings("ignore:TorchScript will treat type annotations")
def test_a_whole_model_takes_tables_and_dense_weights(tiny_base: Path, tmp_path: Path) -> None:
    delta, whole = changed_base(tiny_base, tmp_path, seed=1)
    model, fresh = (load_model(tiny.make_recipe(seed=seed).model, path) for seed, path in ((1, tiny_base), (2, whole)))
    batch = tiny.make_batch(16, 0)
    inputs = (batch.dense_features, batch.sparse_features)
    old = model(*inputs)
    expected = fresh(*inputs)
    assert not old.equal(expected)
    assert apply_delta(model, delta)(*inputs).equal(expected)
    assert all(value.equal(fresh.state_dict()[key]) for key, value in model.state_dict().items())
    program = torch.export.export(model.eval(), inputs, strict=False).module()
    for other in (symbolic_trace(model), torch.jit.script(model), copy.deepcopy(model), program):
        torch.testing.assert_close(other(*inputs), expected)
    assert "Gate" not in str([type(value) for value in model.__getstate__().values()])


# ---- refusals


def refused(target: Any, delta: Path, *words: str) -> None:
    with pytest.raises(ValueError) as raised:
        apply_delta(target, delta)
    text = str(raised.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_order_base_and_damage(base: Path, tmp_path: Path) -> None:
    first = next_state(read_state(base), Random(1), share=0.5)
    write_delta(base, first, tmp_path / "1")
    whole = write_state(first, tmp_path / "whole")
    write_delta(whole, next_state(first, Random(2), share=0.5), tmp_path / "2")
    other = write_state(replace(first, sequence=0, dense={**first.dense, "step": torch.tensor(8)}), tmp_path / "other")
    served, model = load(base), nn.Sequential(load(base))
    for target in (base, served, model):
        place = target.state_dict if isinstance(target, nn.Module) else partial(files_of, target)
        before = copy.deepcopy(place())
        refused(target, tmp_path / "2", "number 1", "in order")
        assert str(place()) == str(before)
    refused(other, tmp_path / "1", "the base", "in order")
    refused(load(other), tmp_path / "1", "the base")
    for target in (base, served):
        apply_delta(target, tmp_path / "1")
        refused(target, tmp_path / "1", "number 2")
        apply_delta(target, tmp_path / "2")
    refused(nn.Linear(2, 2), tmp_path / "1", "Linear", "load")
    refused(load(whole, form="mixed_dimension"), tmp_path / "2", "form='packed'", "after deltas")
    write_coded_tables(tmp_path / "mixed", forms=FORMS)
    refused(tmp_path / "mixed", tmp_path / "1", "forms=['packed']")
    refused(tmp_path / "mixed", tmp_path / "mixed", "delta")
    refused(tmp_path / "none", tmp_path / "1", "check the path")
    refused(base, tmp_path / "none", "check the path")


def test_what_is_no_difference_of_one_scheme_is_not_written(base: Path, tmp_path: Path) -> None:
    state = read_state(base)
    user = state.scheme.tables["user"]
    bits = user.bits.clone()
    bits[0, 0] = 5
    moved = replace(user, routing=RowRouting.from_map(user.routing.all_blocks().flip(0), 3))
    others: list[dict[str, Any]] = [
        {"scheme": with_table(state, user.with_codes(replace(user.codes, bits=bits)))},
        {"scheme": with_table(state, moved)},
        {"scheme": with_table(state, replace(user, feature_names=("item",)))},
        {"scheme": MixedDimensionScheme({"user": user})},
        {"dense": {}},
        {"dense": {**state.dense, "step": torch.tensor(7.0)}},
        {"rows": {**state.rows, "user": state.rows["user"][1:]}},
    ]
    for changes in others:
        with pytest.raises(ValueError):
            write_delta(base, replace(state, **changes), tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def with_table(state: ServedState, table: TableScheme) -> MixedDimensionScheme:
    return MixedDimensionScheme({**state.scheme.tables, table.name: table})


# ---- threads: all that a version holds is its number


ROWS, DIM = 50, 4


def numbered(version: int, pooling: str, collections: tuple[str, ...]) -> ServedState:
    """A version of two tables for each collection and of dense weights."""
    schemes, rows = {}, {}
    for name in (f"{part}{index}" for part in collections for index in range(2)):
        routing = RowRouting(ROWS, 2, boundaries=torch.tensor([0, ROWS // 2, ROWS]))
        table = table_scheme(
            name, routing, torch.ones(2, DIM, dtype=torch.bool), pooling=pooling, feature_names=(name,)
        )
        table = replace(table, collection="" if len(collections) == 1 else name[:-1])
        schemes[name] = with_codes(table, widths=(32,))
        rows[name] = encoded(schemes[name], torch.full((ROWS, DIM), float(version)))
    dense = {"weight": torch.full((3,), float(version))}
    run, scheme = {"seed": version}, MixedDimensionScheme(schemes)
    return ServedState(scheme=scheme, rows=rows, dense=dense, run=run, encoder=b"%d" % version, sequence=version)


def ids_of(*tables: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        list(tables), torch.arange(len(tables) * 5) % ROWS, lengths=torch.ones(len(tables) * 5).int()
    )


class Numbered(nn.Module):
    """A model that takes its time between two collections and its own weights."""

    def __init__(self) -> None:
        super().__init__()
        configs = {
            part: [
                EmbeddingBagConfig(
                    name=f"{part}{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"{part}{i}"]
                )
                for i in range(2)
            ]
            for part in "ab"
        }
        self.a, self.b = (EmbeddingBagCollection(tables=tables) for tables in configs.values())
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        first = self.a(sparse_features).values()
        time.sleep(0.001)
        second = self.b(sparse_features).values()
        time.sleep(0.001)
        return torch.cat([dense_features, first.flatten(), second.flatten(), self.weight])


class NumberedRows:
    """An encoder that gives the number of its version along."""

    def __init__(self, content: bytes) -> None:
        self.version = float(content)

    @staticmethod
    def from_bytes(content: bytes, place: str) -> NumberedRows:
        del place
        return NumberedRows(content)

    def __call__(self, frame: Any) -> tuple[Tensor, KeyedJaggedTensor]:
        del frame
        return torch.full((1,), self.version), ids_of("a0", "a1", "b0", "b1")


def of_predictor(path: Path) -> tuple[Any, Callable[[], Tensor]]:
    predictor = Predictor(load_model(Numbered(), path), NumberedRows(b"0"))
    return predictor, lambda: predictor(None)


def of_sequences(path: Path) -> tuple[Any, Callable[[], Tensor]]:
    served: Any = load(path)
    return served, lambda: torch.cat([part.values() for part in served(ids_of("a0", "a1")).values()])


def of_mean(path: Path) -> tuple[Any, Callable[[], Tensor]]:
    served: Any = load(path, unknown_ids="mean")
    unknown = KeyedJaggedTensor(["a0", "a1"], torch.tensor([1, 99, 99, 2]), lengths=torch.ones(4).int())
    return served, lambda: served(unknown).values()


@pytest.mark.parametrize(
    ("kind", "num_threads", "num_deltas"), [(of_sequences, 2, 6), (of_mean, 2, 6), (of_predictor, 8, 50)]
)
def test_every_answer_is_that_of_one_version(tmp_path: Path, kind: Any, num_threads: int, num_deltas: int) -> None:
    pooling = "none" if kind is of_sequences else "sum"
    collections = ("a", "b") if kind is of_predictor else ("a",)
    base, whole = (write_state(numbered(0, pooling, collections), tmp_path / name) for name in ("base", "whole"))
    deltas = []
    for version in range(1, num_deltas + 1):
        state = numbered(version, pooling, collections)
        deltas.append(write_delta(whole, state, tmp_path / f"delta-{version}"))
        write_state(state, whole, overwrite=True)
    target, call = kind(base)
    answers: list[set[float]] = []
    done = threading.Event()

    def look_up() -> None:
        while not done.is_set():
            answers.append(set(call().flatten().tolist()))

    threads = [threading.Thread(target=look_up) for _ in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        for delta in deltas:
            apply_delta(target, delta)
            time.sleep(0.002)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert set(call().flatten().tolist()) == {float(num_deltas)}
    assert [answer for answer in answers if len(answer) != 1] == []
    assert len({value for answer in answers for value in answer}) > num_deltas // 3


def wait_inside(inside: threading.Event, hold: threading.Event, *_: object) -> None:
    inside.set()
    hold.wait(20)


def test_whoever_applies_a_delta_to_a_folder_at_once_waits(base: Path, tmp_path: Path) -> None:
    """Locks of two descriptors shut each other out, as those of two processes do."""
    delta, whole = changed_base(base, tmp_path)
    other = threading.Thread(target=apply_delta, args=(base, delta))
    with folder_lock(tmp_path):
        other.start()
        other.join(0.5)
        assert other.is_alive()
        assert read_state(base).sequence == 0
    other.join(60)
    assert not other.is_alive()
    assert files_of(base) == files_of(whole)


def test_calls_that_began_before_the_first_delta_are_waited_for(tmp_path: Path) -> None:
    """Also calls of `forward` itself."""
    for path in (tmp_path / "base", tmp_path / "whole"):
        write_state(numbered(0, "sum", ("a", "b")), path)
    delta = write_delta(tmp_path / "base", numbered(1, "sum", ("a", "b")), tmp_path / "delta")
    features = ids_of("a0", "a1", "b0", "b1")
    for name in ("__call__", "forward"):
        model = load_model(Numbered(), tmp_path / "base")
        inside, hold, answers = threading.Event(), threading.Event(), list[Tensor]()
        model.b.register_forward_pre_hook(partial(wait_inside, inside, hold))
        look_up = getattr(model, name)
        call = threading.Thread(target=lambda f=look_up, to=answers: to.append(f(torch.zeros(1), features)))
        call.start()
        assert inside.wait(20)
        change = threading.Thread(target=apply_delta, args=(model, delta))
        change.start()
        time.sleep(0.1)
        assert change.is_alive()
        hold.set()
        call.join(20)
        change.join(20)
        assert set(answers[0].flatten().tolist()) == {0.0}
        assert set(model(torch.ones(1), features).flatten().tolist()) == {1.0}


def test_the_gate_opens_again_whatever_happens() -> None:
    class Fails(nn.Module):
        def forward(self, inner: nn.Module | None) -> int:
            if inner is None:
                raise KeyError("inside")
            return 1 if inner is self else int(self(self))

    model = Fails()
    for _ in range(2):
        with pytest.raises(KeyError):
            model(None)
        assert model(nn.Linear(1, 1)) == 1  # a call within a call
        with pytest.raises(OSError), Gate.of(model).shut():
            raise OSError


# ---- kills and forgeries


KILLED = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from dnis_torchrec.artifact.delta import apply_delta, read_delta, read_state, write_delta, write_state
torch.set_num_threads(1)
folder = Path(sys.argv[1])
old, new = read_state(folder / "base"), read_state(folder / "whole")
delta = write_delta(folder / "base", new, folder / "delta")
twin = write_delta(folder / "base", old, folder / "twin")
ways = {
    "write": (twin, lambda place: write_delta(folder / "base", new, place, overwrite=True), read_delta),
    "apply": (folder / "base", lambda place: apply_delta(place, delta), read_state),
    "whole": (folder / "base", lambda place: write_state(new, place, overwrite=True), read_state),
}
random.seed(0)
for name, (source, change, read) in ways.items():
    state = lambda place: {k: v for k, v in vars(read(place)).items() if k in ("result", "content_id", "sequence")}
    shutil.copytree(source, folder / "place")
    first, begin = state(folder / "place"), time.perf_counter()
    change(folder / "place")
    last, seconds, ends = state(folder / "place"), time.perf_counter() - begin, []
    while len(ends) < 20:
        shutil.rmtree(folder / "place")
        shutil.copytree(source, folder / "place")
        child = os.fork()
        if not child:
            change(folder / "place")
            os._exit(0)
        time.sleep(seconds * random.uniform(0.05, 1.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ends.append(state(folder / "place"))
        assert ends[-1] in (first, last), name
    shutil.rmtree(folder / "place")
    assert first in ends and first != last, name
print("sound")
"""


def test_whoever_is_killed_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    _, state = large(tmp_path / "base", 60_000)
    write_state(replace(some_rows_changed(state, 0.4), sequence=1), tmp_path / "whole")
    done = run_python(tmp_path / "said", KILLED, tmp_path)
    assert done.stdout == "sound\n", done.stderr


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a delta on it that has everything."""
    folder = tmp_path_factory.mktemp("original")
    base = write_coded_tables(folder / "base")
    source = Random(6)
    state = next_state(read_state(base), source, share=0.5)
    while not all(state.scheme.tables[name].num_blocks == 4 for name in state.scheme.tables):
        state = next_state(read_state(base), source, share=0.5)
    write_delta(base, replace(state, encoder=b"an encoder"), folder / "delta")
    names = {name.rpartition("/")[2] for name in load_file(folder / "delta" / "tables.safetensors")}
    assert names >= {"newborn", "bits", "moved", "scale", "shift", "whole", "rows"}
    return folder


def test_every_damage_is_refused_and_changes_nothing(original: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "copy"))
    served, before = load(folder / "base"), files_of(folder / "base")
    expected = values(served)
    for file in sorted((folder / "delta").iterdir()):
        content = file.read_bytes()
        damages = [content[:-1], content + b"x", b"", *(flipped(content, at) for at in range(0, len(content), 97))]
        for damage in damages:
            file.write_bytes(damage)
            refused(served, folder / "delta", file.name)
        file.unlink()
        refused(folder / "base", folder / "delta", file.name)
        (tmp_path / "outside").write_bytes(content)
        file.symlink_to(tmp_path / "outside")
        refused(folder / "base", folder / "delta", "link", file.name)
        file.unlink()
        file.write_bytes(content)
    assert values(served).equal(expected)
    assert files_of(folder / "base") == before


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]


def outcome(target: Any, delta: Path) -> str:
    try:
        return type(apply_delta(target, delta)).__name__
    except ValueError as error:
        return str(error)


@settings(max_examples=60, **MANY)
@given(st.data())
def test_forged_deltas_are_refused_in_a_line_or_leave_sound_tables(original: Path, tmp_path: Path, data: Any) -> None:
    """Each hash is right, and tensors say anything."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    folder = Path(shutil.copytree(original, tmp_path / "copy"))
    file = folder / "delta" / "tables.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=3, unique=True)):
        part, way = tensors[name], data.draw(st.sampled_from(["drop", "cut", "more", "kind", "value", "move"]))
        if way == "drop":
            del tensors[name]
        elif way == "cut":
            tensors[name] = part[: len(part) // 2].clone()
        elif way == "more":
            tensors[name] = torch.cat([part, part])
        elif way == "kind":
            tensors[name] = part.float()
        elif way == "move":
            tensors[f"{data.draw(st.sampled_from(['user', 'movie/seen', 'x', '']))}/{name.rpartition('/')[2]}"] = part
        elif part.dtype == torch.bfloat16:
            part.flatten()[0] = data.draw(st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e38]))
        else:
            bounds = torch.iinfo(part.dtype)
            place = data.draw(st.integers(0, part.numel() - 1))
            part.flatten()[place] = data.draw(st.sampled_from([bounds.min, bounds.max, 0, 1, 9]))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file)
    restate_file(folder / "delta", file.name)
    served, before = load(folder / "base"), files_of(folder / "base")
    with bounded():
        lines = [outcome(target, folder / "delta") for target in (folder / "base", served)]
        assert values(served).shape == (10, 10)
    assert all("\n" not in line and len(line) < 500 for line in lines)
    same_files = files_of(folder / "base") == before
    assert same_files or load(folder / "base").content_id == read_delta(folder / "delta").result


def test_a_row_that_has_bytes_is_not_born_again(original: Path) -> None:
    table = next(iter(read_state(original / "base").scheme.tables.values()))
    has_bytes = torch.cat([(table.bits > 0).any(1), torch.zeros(1, dtype=torch.bool)])[table.routing.all_blocks()]
    dim, blocks = table.embedding_dim, torch.tensor([table.num_blocks], dtype=torch.int32)
    parts = {"bits": torch.full((dim,), 4, dtype=torch.uint8), "moved": blocks}
    parts |= {"scale": torch.ones(1, dim, dtype=torch.bfloat16), "shift": torch.zeros(1, dim, dtype=torch.int16)}
    for is_stored in (True, False):
        row = (has_bytes == is_stored).nonzero()[0]
        if is_stored:
            with pytest.raises(ValueError, match="rows without bytes"):
                _table_of(table, parts | {"newborn": gaps_of(row)}, "a delta")
        else:
            assert _table_of(table, parts | {"newborn": gaps_of(row)}, "a delta").num_blocks == table.num_blocks + 1


def test_a_forged_manifest_is_refused(original: Path, tmp_path: Path) -> None:
    forgeries: list[Callable[[dict], object]] = [
        lambda m: m.update(format="dnis-torchrec-artifact"),
        lambda m: m.update(format_version="2.0"),
        lambda m: m.update(sequence=0),
        lambda m: m.update(base=3),
        lambda m: m.update(base="0" * 64),
        lambda m: m.update(result="0" * 64),
        lambda m: m.update(tables=["../outside"]),
        lambda m: m.update(tables=["none"]),
        lambda m: m.update(run=[]),
        lambda m: m.pop("files"),
    ]
    for number, change in enumerate(forgeries):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        restate(folder / "delta", change)
        before = files_of(folder / "base")
        refused(folder / "base", folder / "delta")
        assert files_of(folder / "base") == before


def test_what_is_read_while_the_folder_changes_is_refused(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    delta, _ = changed_base(base, tmp_path, newborn=False)
    read, calls = loading.read_artifact_file, []

    def late(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        if arguments[2].startswith("packed") and not calls:
            calls.append(arguments)
            apply_delta(base, delta)
        return read(*arguments, **options)

    monkeypatch.setattr(loading, "read_artifact_file", late)
    with pytest.raises(ValueError, match="load it again"):
        load(base)
    assert load(base).sequence == 1
