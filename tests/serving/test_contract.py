"""Served collections do what a model expects of TorchRec's: the stock modules are the oracle, one test a point."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.fx import symbolic_trace
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact.load import serve
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import MeanForUnknownIds, MixedDimensionEmbeddingBagCollection, ServedEmbeddingCollection
from dnis_torchrec.serving.sequences import table_of_single_ids
from tests.reference import pruned, table_scheme

pytestmark = [
    # what TorchScript says of TorchRec's own modules and of every KeyedJaggedTensor
    pytest.mark.filterwarnings("ignore:The TorchScript type system doesn't support:UserWarning"),
    pytest.mark.filterwarnings("ignore:TorchScript will treat type annotations:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

POOLED = ("packed", "mixed_dimension", "mean")
UNPOOLED = ("packed sequences", "mixed_dimension sequences")
ROWS, DIM = 20, 8
TABLES = {"t1": ("f1", "f3"), "t/2": ("f2",), "t3": ("f1",)}
"""Two features that share a table, and a feature that reads two."""
SHARED = {"t1": ("f1", "f3"), "t2": ("f2",)}
"""Tables whose names may stand in a script, of which no feature reads two."""


def scheme_of(pooling: str, *, is_weighted: bool, tables: dict[str, tuple[str, ...]]) -> MixedDimensionScheme:
    """A scheme of three blocks for each table; the coldest rows are in none."""
    schemes, draw = {}, torch.Generator().manual_seed(3)
    for index, (name, features) in enumerate(tables.items()):
        routing = RowRouting.from_map(torch.randint(4, (ROWS,), generator=draw), 3)
        if index == 1:
            routing = RowRouting(ROWS, 3, boundaries=torch.tensor([0, 4, 11, 18]))
        retained = torch.rand(3, DIM, generator=draw) < 0.6
        options = {"feature_names": features, "pooling": pooling, "is_weighted": is_weighted}
        schemes[name] = table_scheme(name, routing, retained, **options)
    return MixedDimensionScheme(schemes)


def served_as(form: str, scheme: MixedDimensionScheme, weights: dict[str, Tensor]) -> Any:
    """A served module of one of the forms."""
    form = form.removesuffix(" sequences")
    if next(iter(scheme.tables.values())).pooling == "none":
        singles = {name: table_of_single_ids(table) for name, table in scheme.tables.items()}
        return ServedEmbeddingCollection(scheme, {n: served_as(form, single, weights) for n, single in singles.items()})
    if form == "mean":
        return MeanForUnknownIds(scheme, serve(scheme, weights, "packed", unknown_ids="zero"))
    return serve(scheme, weights, form)


def pair(
    form: str,
    *,
    pooling: str = "mean",
    is_weighted: bool = False,
    tables: dict[str, tuple[str, ...]] = TABLES,
    need_indices: bool = True,
) -> tuple[Any, Any]:
    """TorchRec's collection of pruned tables, and the served one."""
    pooling = "none" if form in UNPOOLED else pooling
    scheme = scheme_of(pooling, is_weighted=is_weighted, tables=tables)
    torch.manual_seed(0)
    weights = {n: pruned(torch.randn(ROWS, DIM), t.routing, t.retained) for n, t in scheme.tables.items()}
    shape = {"num_embeddings": ROWS, "embedding_dim": DIM}
    stock: Any
    if form in UNPOOLED:
        scheme = MixedDimensionScheme({n: replace(t, need_indices=need_indices) for n, t in scheme.tables.items()})
        ids = [EmbeddingConfig(name=name, feature_names=list(of), **shape) for name, of in tables.items()]
        stock = EmbeddingCollection(tables=ids, need_indices=need_indices)
    else:
        kind = PoolingType.MEAN if pooling == "mean" else PoolingType.SUM
        bags = [EmbeddingBagConfig(name=n, feature_names=list(of), pooling=kind, **shape) for n, of in tables.items()]
        stock = EmbeddingBagCollection(tables=bags, is_weighted=is_weighted)
    parts = stock.embeddings if form in UNPOOLED else stock.embedding_bags
    for name, weight in weights.items():
        parts[name].weight.data.copy_(weight)
    return stock, served_as(form, scheme, weights)


def batch(seed: int = 0, size: int = 5, *, keys: tuple[str, ...] = ("f2", "no", "f3", "f1"), **options: Any) -> Any:
    """Bags with weights, empty ones among them, keys in an order of their own, and one that nobody reads."""
    draw = torch.Generator().manual_seed(seed)
    strides = options.get("strides") or [size] * len(keys)
    lengths = torch.randint(4, (sum(strides),), generator=draw, dtype=options.get("dtype", torch.int32))
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=draw)
    by_key = {"stride_per_key_per_rank": [[stride] for stride in strides]} if "strides" in options else {"stride": size}
    inverse = options.get("inverse")
    weights = torch.rand(len(ids), generator=draw)
    return KeyedJaggedTensor(list(keys), ids, weights, lengths=lengths, inverse_indices=inverse, **by_key)


def check_same(output: Any, expected: Any) -> None:
    """Same keys in the same order, same layout, same values."""
    if isinstance(expected, dict):
        assert list(output) == list(expected)
        for name, jagged in expected.items():
            torch.testing.assert_close(output[name].values(), jagged.values(), rtol=1e-5, atol=1e-5)
            assert output[name].lengths().equal(jagged.lengths())
            if jagged.weights_or_none() is not None:
                assert output[name].weights().equal(jagged.weights())
        return
    assert output.keys() == expected.keys()
    assert list(output.offset_per_key()) == list(expected.offset_per_key())
    torch.testing.assert_close(output.values(), expected.values(), rtol=1e-5, atol=1e-5)


def saved_and_loaded(scripted: Any) -> Any:
    """Through a file, as a server without the Python class gets it."""
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("form", [*POOLED, *UNPOOLED])
@pytest.mark.parametrize(
    "tables", [{"t1": ("f1",), "t2": ("f2",)}, {"t1": ("f1", "f2")}, {"t1": ("f1",), "t2": ("f1",)}, TABLES], ids=len
)
def test_keys_layout_and_values(form: str, tables: dict[str, tuple[str, ...]]) -> None:
    """Also with shared tables and with shared features."""
    stock, served = pair(form, tables=tables)
    check_same(served(batch()), stock(batch()))


@pytest.mark.parametrize("form", POOLED)
def test_weights_of_bags(form: str) -> None:
    stock, served = pair(form, pooling="sum", is_weighted=True)
    assert served.is_weighted()
    check_same(served(batch()), stock(batch()))
    assert not pair(form)[1].is_weighted()


@pytest.mark.parametrize("form", [*POOLED, *UNPOOLED])
def test_the_meta_device(form: str) -> None:
    """Shapes without values."""
    served = pair(form, pooling="sum", is_weighted=form in POOLED)[1]
    assert served.device == torch.device("cpu")
    assert served.to("meta").device == torch.device("meta")
    output = served(batch().to(torch.device("meta")))
    if form in UNPOOLED:
        assert list(output) == ["f1@t1", "f3", "f2", "f1@t3"]
        assert {(jagged.values().shape[1], jagged.values().device.type) for jagged in output.values()} == {
            (DIM, "meta")
        }
        return
    assert (output.values().shape, output.values().device.type) == ((5, 4 * DIM), "meta")
    assert output.offset_per_key() == [0, DIM, 2 * DIM, 3 * DIM, 4 * DIM]


@pytest.mark.parametrize(
    ("trace", "form"), [(torch.fx.symbolic_trace, "packed"), *((symbolic_trace, form) for form in (*POOLED, *UNPOOLED))]
)
def test_fx_with_the_collection_as_root(trace: Callable[[nn.Module], Any], form: str) -> None:
    """One call of the whole module; the graph takes other batches, compiles in TorchScript, and shares the tables."""
    stock, served = pair(form)
    graph = trace(served)
    graph.graph.lint()
    for features in (batch(1, 3), batch(2, 7)):
        check_same(graph(features), stock(features))
    check_same(torch.jit.script(graph)(batch(1, 3)), stock(batch(1, 3)))
    assert len(graph.graph.nodes) == 3
    assert {tensor.data_ptr() for tensor in graph.buffers()} == {tensor.data_ptr() for tensor in served.buffers()}


@pytest.mark.parametrize("form", [*POOLED, *UNPOOLED])
def test_torchscript_of_the_collection(form: str) -> None:
    """Scripted and saved ones predict the same, and the module serves on as it was."""
    stock, served = pair(form)
    names = list(served.state_dict())
    scripted = torch.jit.script(served.eval())
    assert set(scripted.state_dict()) >= set(names)
    for features in (batch(1, 3), batch(2, 7), batch(3, 1)):
        check_same(scripted(features), stock(features))
    for module in (saved_and_loaded(scripted), served):
        check_same(module(batch(1, 3)), stock(batch(1, 3)))
    assert list(served.state_dict()) == names


@pytest.mark.parametrize("form", POOLED)
def test_torchscript_of_weighted_bags(form: str) -> None:
    stock, served = pair(form, pooling="sum", is_weighted=True)
    check_same(saved_and_loaded(torch.jit.script(served))(batch(4)), stock(batch(4)))


@pytest.mark.parametrize("form", ["packed", "mixed_dimension", "packed sequences"])
def test_torchscript_refuses_what_is_no_row(form: str) -> None:
    scripted = torch.jit.script(pair(form, tables={"t1": ("f1",)})[1])
    unknown = KeyedJaggedTensor(["f1"], torch.tensor([1, ROWS]), lengths=torch.tensor([1, 1]))
    with pytest.raises(Exception, match="expected ids"):
        scripted(unknown)
    with pytest.raises(Exception, match="'f1' is not in list|f1"):
        scripted(KeyedJaggedTensor(["other"], torch.tensor([1]), lengths=torch.tensor([1])))


@pytest.mark.parametrize("form", POOLED)
def test_torchscript_of_ids_that_are_no_rows(form: str) -> None:
    """They add nothing, or the mean of cold rows, as without TorchScript."""
    scheme = scheme_of("sum", is_weighted=False, tables=TABLES)
    weights = {n: pruned(torch.randn(ROWS, DIM), t.routing, t.retained) for n, t in scheme.tables.items()}
    served = served_as(form, scheme, weights) if form == "mean" else serve(scheme, weights, form, unknown_ids="zero")
    features = batch(1)
    features = KeyedJaggedTensor(features.keys(), features.values() * 3 - 9, lengths=features.lengths())
    check_same(torch.jit.script(served)(features), served(features))


def test_two_tables_of_one_name_are_refused() -> None:
    table = next(iter(scheme_of("sum", is_weighted=False, tables=TABLES).tables.values()))
    with pytest.raises(ValueError, match="every table under its own name"):
        MixedDimensionEmbeddingBagCollection(MixedDimensionScheme({"t1": table, "t2": table}))


def test_device_of_tables_to_train_on() -> None:
    """As given, as the context manager says, or the CPU."""
    scheme = scheme_of("sum", is_weighted=False, tables=TABLES)
    assert MixedDimensionEmbeddingBagCollection(scheme, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert MixedDimensionEmbeddingBagCollection(scheme).device.type == "meta"
    assert MixedDimensionEmbeddingBagCollection(scheme).device.type == "cpu"


@pytest.mark.parametrize("form", [*POOLED, *UNPOOLED])
def test_configs_are_those_of_the_stock_collection(form: str) -> None:
    stock, served = pair(form)
    fields = ("name", "num_embeddings", "embedding_dim", "feature_names", "data_type", "pooling")
    of_both = []
    for module in (stock, served):
        configs = module.embedding_configs() if form in UNPOOLED else module.embedding_bag_configs()
        of_both.append([[getattr(config, field, None) for field in fields] for config in configs])
    assert of_both[0] == of_both[1]
    if form in UNPOOLED:
        assert served.embedding_names_by_table() == stock.embedding_names_by_table()
        assert served.embedding_dim() == stock.embedding_dim()


@pytest.mark.parametrize(("forms", "name"), [(POOLED, "embedding_bags"), (UNPOOLED, "embeddings")])
def test_tables_are_not_reached_into(forms: tuple[str, ...], name: str) -> None:
    """No float32 table of N rows is there: the refusal says where, what and what else."""
    for form in forms:
        served = pair(form)[1]
        assert not hasattr(served, name)
        with pytest.raises(AttributeError, match=rf"^{type(served).__name__}: expected no use of '{name}', .*; look"):
            getattr(served, name)
        with pytest.raises(AttributeError, match="'nothing'"):
            served.nothing  # noqa: B018


@pytest.mark.parametrize("form", [*POOLED, *UNPOOLED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_outputs_are_float32(form: str, dtype: torch.dtype) -> None:
    """Whatever dtype a model around the collection is converted to, as TorchRec's are."""
    stock, served = pair(form, pooling="sum")
    for module in (stock, served):
        output = module.to(dtype)(batch())
        values = [jagged.values() for jagged in output.values()] if form in UNPOOLED else [output.values()]
        assert {part.dtype for part in values} == {torch.float32}


INVERSE = (["f1", "f2", "no", "f3"], torch.tensor([[0, 0, 1, 0], [2, 1, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0]]))


@pytest.mark.parametrize("form", POOLED)
@pytest.mark.parametrize("scripted", [False, True])
def test_a_batch_size_for_each_feature(form: str, scripted: bool) -> None:
    """Bags are pooled once and go to all samples that have them."""
    stock, served = pair(form)
    module = torch.jit.script(served) if scripted else served
    features = batch(3, strides=[3, 2, 1, 2], inverse=INVERSE)
    check_same(module(features), stock(features))
    assert module(features).values().shape == (4, 4 * DIM)
    same_size = batch(3, 3, inverse=INVERSE)
    check_same(module(same_size), stock(same_size))
    with pytest.raises(Exception, match="one batch size for all features, or inverse indices"):
        module(batch(3, strides=[3, 2, 1, 2]))


@pytest.mark.parametrize("form", UNPOOLED)
@pytest.mark.parametrize("scripted", [False, True])
def test_a_batch_size_for_each_sequence(form: str, scripted: bool) -> None:
    stock, served = pair(form)
    features = batch(3, strides=[3, 2, 1, 2], dtype=torch.int64)  # of int32 TorchRec's script of its class breaks
    check_same((torch.jit.script(served) if scripted else served)(features), stock(features))


def test_gradients_of_a_batch_size_for_each_feature() -> None:
    served = pair("mixed_dimension")[1]
    served(batch(3, strides=[3, 2, 1, 2], inverse=INVERSE)).values().sum().backward()
    assert any(bool(weight.grad.any()) for weight in served.parameters())


@pytest.mark.parametrize("form", UNPOOLED)
@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("scripted", [False, True])
def test_need_indices(form: str, need_indices: bool, scripted: bool) -> None:
    stock, served = pair(form, need_indices=need_indices)
    assert served.need_indices() == stock.need_indices() == need_indices
    output = (torch.jit.script(served) if scripted else served)(batch())
    for name, feature in (("f2", "f2"), ("f1@t3", "f1")):
        weights = output[name].weights_or_none()
        assert weights.equal(batch()[feature].values()) if need_indices else weights is None


@pytest.mark.parametrize("form", [*POOLED, *UNPOOLED])
def test_repr_names_tables_and_bytes(form: str) -> None:
    served = pair(form)[1]
    lines = repr(served).splitlines()
    modules = served.tables if form in UNPOOLED else dict.fromkeys(TABLES, served)
    for name in TABLES:
        line = f"{name}: {ROWS} rows of {DIM}, {modules[name].bytes_of_table(name):,} bytes"
        assert line in [text.strip() for text in lines]
    if form in ("packed", "mixed_dimension"):
        assert served.table_bytes() == sum(map(served.bytes_of_table, TABLES)) > 0


@pytest.mark.parametrize("form", [*POOLED, *UNPOOLED])
def test_torch_export(form: str) -> None:
    _, served = pair(form, tables={"t1": ("f1", "f3"), "t2": ("f2",)})
    first = batch(1)
    program = torch.export.export(served, (first,), strict=False)
    ids = (first.values() + 7) % ROWS
    other = KeyedJaggedTensor(first.keys(), ids, first.weights(), lengths=first.lengths().flip(0), stride=5)
    other.offsets()
    check_same(program.module()(first), served(first))
    if form in POOLED:
        check_same(program.module()(other), served(other))


class OnTensors(nn.Module):
    """A collection called with plain tensors, whose sizes are symbols in a graph."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        stride = lengths.shape[1]
        bags = KeyedJaggedTensor(["f1", "f2"], ids, lengths=lengths.flatten(), stride=stride)
        pooled: Tensor = self.collection(bags).values()
        return pooled


@pytest.mark.parametrize("form", POOLED)
def test_torch_export_takes_any_number_of_ids(form: str) -> None:
    model = OnTensors(pair(form, tables={"t1": ("f1",), "t2": ("f2",)})[1])
    sizes = {"ids": {0: torch.export.Dim("ids", min=2)}, "lengths": {1: torch.export.Dim("bags", min=2)}}
    inputs = (torch.arange(8), torch.tensor([[1, 0, 3], [2, 2, 0]]))
    program = torch.export.export(model, inputs, dynamic_shapes=sizes, strict=False).module()
    other = (torch.arange(11), torch.tensor([[2, 1, 3, 0, 1], [0, 2, 0, 1, 1]]))
    torch.testing.assert_close(program(*other), model(*other))
    if form != "mean":
        with pytest.raises(Exception, match=r"expected ids|Runtime assertion"):
            program(torch.arange(8) + ROWS, inputs[1])
        # AOTInductor leaves it out on a CPU
        assert not any("_assert_async" in str(node.target) for node in program.graph.nodes)


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "dlrm": lambda tables: DLRM(tables, 6, [10, DIM], [5, 1]),
    "deepfm": lambda tables: SimpleDeepFMNN(6, tables, 10, 5),
}


def model_pair(kind: str, form: str, *, is_weighted: bool = False) -> tuple[nn.Module, nn.Module]:
    """A model of TorchRec's over its own collection, and over a served one."""
    models = []
    for collection in pair(form, pooling="sum", is_weighted=is_weighted, tables=SHARED):
        torch.manual_seed(1)
        models.append(MODELS[kind](collection).eval())
    stock, served = models
    dense = {n: v for n, v in stock.state_dict().items() if "embedding_bag_collection" not in n}
    served.load_state_dict(dense, strict=False)
    return stock, served


@pytest.mark.parametrize("kind", MODELS)
def test_models_are_traced_and_scripted(kind: str) -> None:
    """The model alone, its graph, and the script of either, from a file, too; other forms: test_scripted.py."""
    stock, served = model_pair(kind, "mean")
    inputs = [torch.rand(5, 6), batch(2)]
    graph = symbolic_trace(served)
    assert "embedding_bag_collection" in graph.code
    assert "KeyedJaggedTensor" in graph.code
    for module in (graph, saved_and_loaded(torch.jit.script(graph)), torch.jit.script(served), served):
        torch.testing.assert_close(module(*inputs), stock(*inputs), rtol=1e-4, atol=1e-5)
