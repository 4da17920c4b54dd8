"""Task: how a batch becomes a loss, and which predictions of which kinds a model is judged by."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import CLEAN, RankingBatch, check_batch

BINARY, REGRESSION, RANKING = "binary", "regression", "ranking"
LOSS = "loss"  # its name among the metrics
RANKING_KS = (1, 5, 10)  # cut-offs of the ranking metrics
_RANKING = [f"{name}@{k}" for k in reversed(RANKING_KS) for name in ("ndcg", "recall", "mrr")]
METRICS: Mapping[str, Mapping[str, bool | None]] = {
    BINARY: {"auc": True, "logloss": False, "ne": False, "calibration": None},
    REGRESSION: {"mse": False},
    RANKING: dict.fromkeys(_RANKING, True),
}
"""Kind -> metric, the kind's own first -> whether higher is better; None where neither is."""
Outputs: TypeAlias = Tensor | Mapping[str, Any]  # a row a sample; or such tensors by name
SEQUENCES = (EmbeddingCollectionInterface, ShardedEmbeddingCollection)  # which pool nothing
_COLLECTIONS = (
    EmbeddingBagCollectionInterface,
    ShardedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,  # which does not call the collection in it
    *SEQUENCES,
)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of one name and what they are judged by, ``(B,)`` or ``(B, 1)`` each."""

    values: Tensor
    labels: Tensor  # 0 or 1 where the kind is binary or a ranking
    weights: Tensor | None = None  # >= 0; 0 leaves a sample without a label out
    queries: Tensor | None = None  # of a ranking: whose candidate each sample is


class Task(nn.Module):
    """A loss of one's own, on a model of any number of outputs: the long way, where `Recipe.loss`
    is the short one.

    `TrainTask` makes a module of model and task that TorchRec's pipelines call with a batch. A task
    itself holds no model, so that the model it is asked about may be a prepared, sharded or served
    one, and no weights: what learns belongs to the model, which is saved. The loss is a function of
    the outputs: their second derivatives in it say what columns are worth.

    Attributes:
        kinds: name of each prediction -> its kind, ``"binary"``, ``"regression"`` or ``"ranking"``.
            Metrics have the name in front, as in ``"click_auc"``. The first metric of the first
            name is the one that a recipe is judged by.

    Example:
        >>> class ClickAndRating(Task):
        ...     kinds = {"click": "binary", "rating": "regression"}
        ...
        ...     def loss(self, batch, outputs):
        ...         click, rating = batch.labels.unbind(1)
        ...         bce = nn.functional.binary_cross_entropy_with_logits(outputs["click"], click)
        ...         return bce + 0.5 * nn.functional.mse_loss(outputs["rating"], rating)
        ...
        ...     def predictions(self, batch, outputs):
        ...         labels = batch.labels.unbind(1)
        ...         of_kinds = zip(self.kinds, labels)
        ...         return {name: Predictions(outputs[name], of) for name, of in of_kinds}
        >>> list(possible_metrics(ClickAndRating()))
        ['loss', 'click_auc', 'click_logloss', 'click_ne', 'click_calibration', 'rating_mse']
    """

    kinds: Mapping[str, str] = {}

    def kinds_of(self, batch: Batch | None) -> Mapping[str, str]:
        """Returns the kinds of a split's predictions, by name: `kinds`.

        Args:
            batch: of the split; None where it is not known.
        """
        return self.kinds

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Calls the model, as ``model(dense_features=..., sparse_features=...)``; override it for
        any other call.

        Args:
            model: the recipe's, or what takes its place.
            batch: samples, on the model's device.
        """
        call = cast(Callable[..., Outputs], _taking_features(model))
        return call(dense_features=batch.dense_features, sparse_features=batch.sparse_features)

    def loss(self, batch: Batch, outputs: Any) -> Tensor:
        """Computes the loss of a batch, a scalar: a mean over samples, which may be weighted, since
        ranks average it.

        It is called with other values in place of the outputs, too, so it takes all that comes from
        the model from there. The loss of a sample depends on the outputs of no other one, and can
        be derived twice in them.

        Args:
            batch: the samples, on the model's device.
            outputs: what `outputs` returned for this batch.
        """
        raise NotImplementedError(f"task {type(self).__name__}: expected a method 'loss'")

    def predictions(self, batch: Batch, outputs: Any) -> Mapping[str, Predictions]:
        """Returns what is judged: for each name of `kinds` its predictions.

        Args:
            batch: the samples, on the model's device.
            outputs: what `outputs` returned for this batch.
        """
        raise NotImplementedError(f"task {type(self).__name__}: expected a method 'predictions'")


def _taking_features(model: nn.Module) -> nn.Module:
    """The module that takes features: the model itself, or its ``model`` (DLRMTrain)."""
    for module in (model, getattr(model, "model", None)):
        with suppress(TypeError, AttributeError):
            forward = cast(nn.Module, module).forward
            inspect.signature(forward).bind(dense_features=None, sparse_features=None)
            return cast(nn.Module, module)
    requirement = "a model that is called with dense_features and sparse_features"
    call = f"{type(model).__name__}.forward{inspect.signature(model.forward)}"
    remedy = "give a Task whose method outputs calls it: see docs/models.md"
    raise TypeError(describe("model", requirement, call, remedy))


class LossTask(Task):
    """The task of a model with one prediction per sample, judged by a loss of torch's own."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion
        self.kinds = {"": BINARY if isinstance(criterion, nn.BCEWithLogitsLoss) else REGRESSION}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predictions as ``(B,)``."""
        # Not squeeze: a batch of one sample stays a batch.
        return cast(Tensor, super().outputs(model, batch)).flatten()

    def loss(self, batch: Batch, outputs: Tensor) -> Tensor:
        """The criterion of predictions and labels."""
        return cast(Tensor, self.criterion(outputs, batch.labels.float()))

    def predictions(self, batch: Batch, outputs: Tensor) -> Mapping[str, Predictions]:
        """Predictions without a name."""
        queries = batch.queries if isinstance(batch, RankingBatch) else None
        return {"": Predictions(outputs, batch.labels.float(), queries=queries)}

    def kinds_of(self, batch: Batch | None) -> Mapping[str, str]:
        """Candidates are ranked, whatever the criterion."""
        return {"": RANKING} if isinstance(batch, RankingBatch) else self.kinds


def task_of(loss: nn.Module | Callable[..., Tensor]) -> Task:
    """The task that a loss stands for; a task itself."""
    return loss if isinstance(loss, Task) else LossTask(loss)  # type: ignore[arg-type]


def check_kinds(task: Task) -> None:
    """Checks what a recipe's task says of itself; to train and compress needs no kinds."""
    place, kinds = f"task {type(task).__name__}", dict(task.kinds)
    check(bool(kinds), f"{place}.kinds", "at least one name with its kind", kinds)
    for name, kind in kinds.items():
        requirement = f"a kind of {', '.join(METRICS)}"
        check(kind in METRICS, f"{place}, prediction {name!r}", requirement, repr(kind))
    names = [name for name, _ in task.named_parameters()]
    check(not names, place, "no weights of its own, as a model is what is saved", names)


class TrainTask(nn.Module):
    r"""A model with its task, in the shape that TorchRec's train pipelines call, as
    torchrec.models.dlrm.DLRMTrain.

    In training mode an L2 penalty on the looked-up embeddings of B samples is added to the loss:

    $$L = L_{\text{data}} + \lambda \frac{1}{B} \sum_{b, f} {\lVert v_{bf} \rVert}^2$$

    v_bf is the pooled embedding of feature f of sample b as the model reads it: of a single-id
    feature the row itself, of a bag its sum, mean or weighted sum, under soft selection what alpha
    has left of it. So the penalty is the same before alpha is merged into the tables and after, and
    a dropped column has none. Only what a batch looks up is pulled towards zero, as often as it is
    looked up. The gradient comes to the tables through their own backward pass, hence exactly,
    fused optimizers and every sharding included. Over ranks it is averaged as the data's loss is.

    Of an `EmbeddingCollection`, which pools nothing, every id of a sample has such a term of its
    own. Weights that are no tables are not penalised.

    Args:
        model: a model as `Recipe.model` describes it, prepared or plain.
        task: a loss or a task, see `Recipe.loss`.
        embedding_l2: lambda, >= 0; 0 for no penalty. See `Recipe.embedding_l2`.

    Attributes:
        data_terms_only: leave the penalty out, as upper steps want it (see `data_terms_only`). A
            subclass that adds terms of its own to the loss may ask it too.

    Raises:
        ValueError: for an `embedding_l2` that is negative, infinite or NaN.
    """

    def __init__(self, model: nn.Module, task: nn.Module, *, embedding_l2: float = 0.0) -> None:
        super().__init__()
        check_l2(embedding_l2)
        self.model: nn.Module = model
        self.task = task_of(task)
        self.embedding_l2 = embedding_l2
        self.data_terms_only = False

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Outputs]]:
        """Computes the loss of a batch.

        Args:
            batch: on the model's device, with labels of any dtype, one row per sample.

        Returns:
            ``(loss, (detached loss of the data alone, detached outputs of the model))``.
        """
        if isinstance(batch, Proxy):  # a pipeline traces what reaches the collections: no loss does
            return cast(Any, self.task.outputs(self.model, batch))
        has_penalty = self.training and self.embedding_l2 > 0 and not self.data_terms_only
        with ExitStack() as stack:
            lookups = stack.enter_context(collect_outputs(self.model)) if has_penalty else []
            outputs = self.task.outputs(self.model, batch)
        loss = self.task.loss(batch, outputs)
        values = loss.detach(), detach(outputs)
        return loss + self.embedding_l2 * squared_norm(lookups) if has_penalty else loss, values


@contextmanager
def data_terms_only(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The loss of each `TrainTask` is that of the data alone in the block, in training mode too."""
    tasks = [task for task in modules if isinstance(task, TrainTask) and not task.data_terms_only]
    for task in tasks:
        task.data_terms_only = True
    try:
        yield
    finally:
        for task in tasks:
            task.data_terms_only = False


def check_l2(value: float) -> None:
    """Checks the lambda of an L2 penalty."""
    is_fit = math.isfinite(value) and value >= 0
    check(is_fit, "embedding_l2", "a finite number >= 0", value, "0 leaves embeddings alone")


@contextmanager
def collect_outputs(model: nn.Module) -> Iterator[list[tuple[nn.Module, Any]]]:
    """Collects the collections that a model calls in the block, each with its output. Local."""
    outputs: list[tuple[nn.Module, Any]] = []

    def note(module: nn.Module, bags: object, output: Any) -> None:
        outputs.append((module, output))  # which may be awaited later

    with ExitStack() as stack:
        for collection in dict.fromkeys(_outermost_collections(model)):
            stack.callback(collection.register_forward_hook(note).remove)
        yield outputs


def squared_norm(outputs: Sequence[tuple[nn.Module, Any]]) -> Tensor | float:
    """The mean squared norm of looked-up embeddings: ``1/B sum over b, f of |v_bf|^2``."""
    norms: list[Any] = []
    for module, output in outputs:
        if isinstance(module, SEQUENCES):
            rows = [output[key] for key in _keys_of(module)]
            squares = [
                part.values().float().square().sum() / part.lengths().numel() for part in rows
            ]
            norms.append(sum(squares))
        else:
            norms.append(output.values().float().square().sum(dim=1).mean())
    return sum(norms, 0.0)


def _keys_of(collection: nn.Module) -> list[str]:
    """The output keys of an EmbeddingCollection, sharded or not."""
    if isinstance(collection, ShardedEmbeddingCollection):
        names = get_embedding_names_by_table(collection._embedding_configs)
    else:
        names = cast(EmbeddingCollectionInterface, collection).embedding_names_by_table()
    return [name for of_table in names for name in of_table]


def _outermost_collections(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, _COLLECTIONS):
        yield module
    else:
        for child in module.children():
            yield from _outermost_collections(child)


def detach(outputs: Outputs) -> Outputs:
    """Outputs without their graph, as TorchRec's pipelines hand them on."""
    if not isinstance(outputs, Mapping):
        return outputs.detach()
    return {
        name: part.detach() if hasattr(part, "detach") else part for name, part in outputs.items()
    }


def metric_name(prediction: str, metric: str) -> str:
    """The name of a metric among those of all predictions."""
    return f"{prediction}_{metric}" if prediction else metric


def possible_metrics(task: Task) -> dict[str, bool | None]:
    """All metrics that a recipe may have, the loss first -> whether higher is better."""
    kinds = [*task.kinds.items(), *([("", RANKING)] if isinstance(task, LossTask) else [])]
    directions = {metric_name(n, m): is_up for n, k in kinds for m, is_up in METRICS[k].items()}
    return {LOSS: False} | directions


def direction_of(task: Task, metric: str) -> bool | None:
    """Whether higher is better of a metric; None where neither is."""
    directions = possible_metrics(task)
    check(metric in directions, f"metric {metric!r}", f"one of {', '.join(directions)}", metric)
    return directions[metric]


def check_labels(labels: Tensor, loss: object, place: str) -> None:
    """Checks that there is one label per sample, and that it lies in the domain of the loss."""
    # A loss of (B,) and (B, 1) would be one of B times B differences.
    check(labels.dim() == 1, place, "labels of shape (B,)", tuple(labels.shape), "flatten them")
    values = labels.float()
    _refuse(values, ~values.isfinite(), place, "finite labels", CLEAN)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        outside, remedy = (values < 0) | (values > 1), "map the labels to 0 and 1, or use MSELoss"
        _refuse(values, outside, place, "labels in [0, 1] for BCEWithLogitsLoss", remedy)


def check_classes(labels: Tensor, place: str) -> None:
    """Checks that labels are classes, which AUC, NE and calibration are defined for."""
    remedy = "labels of train alone may be others"
    _refuse(labels, (labels != 0) & (labels != 1), place, "labels 0 or 1", remedy)


def _refuse(values: Tensor, bad: Tensor, place: str, requirement: str, remedy: str = "") -> None:
    if bool(bad.any()):
        raise ValueError(describe(place, requirement, float(values[bad][0]), remedy))


def check_candidates(queries: Tensor, k: int = max(RANKING_KS), place: str = "ranking") -> None:
    """Checks that every query has enough candidates: recall@k of fewer than k is always 1."""
    check(queries.numel() > 0, place, "at least one query", 0)
    names, sizes = queries.unique(return_counts=True)
    index = int(sizes.argmin())
    where, fewest = f"{place}, query {int(names[index])}", int(sizes[index])
    remedy = "add negatives, or leave the query out"
    check(fewest >= k, where, f"at least k={k} candidates", fewest, remedy)


def check_batches(batches: Iterable[Batch], task: nn.Module, name: str) -> Iterator[Batch]:
    """The batches of a split, each after a check of its labels, dense features and weights."""
    has_metrics = name in ("selection", "test")
    for index, batch in enumerate(batches):
        check_samples(batch, task, f"{name} batch {index}", has_metrics=has_metrics)
        yield batch


def check_samples(batch: Batch, task: nn.Module, place: str, *, has_metrics: bool) -> None:
    """Checks labels, dense features and weights of a batch; metrics of clicks need classes."""
    task = task_of(task)
    check_batch(batch, place)
    if isinstance(task, LossTask):
        check_labels(batch.labels, task.criterion, place)
        is_binary = isinstance(task.criterion, nn.BCEWithLogitsLoss)
        if has_metrics and (is_binary or isinstance(batch, RankingBatch)):
            check_classes(batch.labels, place)


def check_outputs(outputs: object, place: str) -> None:
    """Checks that outputs are a tensor, or tensors by name."""
    if not isinstance(outputs, Tensor | Mapping):
        kind, requirement = type(outputs).__name__, "a tensor, or tensors by name, of the model"
        raise TypeError(describe(f"{place}, outputs", requirement, kind, "return a dict"))


def check_predictions(task: Task, batch: Batch, outputs: Any, place: str) -> dict[str, Predictions]:
    """What a model is judged by in a batch, each ``(B,)``, checked."""
    predictions, kinds = task.predictions(batch, outputs), task.kinds_of(batch)
    where, requirement = f"{place}, task {type(task).__name__}", f"the predictions {list(kinds)}"
    check(set(predictions) == set(kinds), where, requirement, list(predictions))
    places = {name: f"{place}, prediction {name!r}" if name else place for name in kinds}
    return {
        name: check_prediction(predictions[name], kind, len(batch.labels), places[name])
        for name, kind in kinds.items()
    }


def check_prediction(predictions: Predictions, kind: str, number: int, place: str) -> Predictions:
    """Predictions of a name for so many samples, ``(B,)``, checked."""
    parts = dict(vars(predictions))
    for name, part in parts.items():
        if part is not None or name in ("values", "labels") or (name, kind) == ("queries", RANKING):
            shape = tuple(part.shape) if isinstance(part, Tensor) else "none"
            is_fit = shape in ((number,), (number, 1))
            check(is_fit, place, f"{name} ({number},), one for each sample", shape)
            parts[name] = part.detach().flatten()
    labels, weights = parts["labels"], parts["weights"]
    if weights is not None:
        check(kind != RANKING, place, "no weights of candidates that are ranked", "some")
        unfit = ~(weights.isfinite() & (weights >= 0))
        _refuse(weights, unfit, place, "weights that are finite and >= 0")
        # A missing label, as NaN, does not vanish with a weight of 0.
        parts["labels"] = torch.where(weights > 0, labels, torch.zeros_like(labels))
        labels = labels[weights > 0]
    remedy = "give samples without a label a weight of 0"
    _refuse(labels, ~labels.isfinite(), place, "finite labels", remedy)
    if kind == BINARY:
        check_classes(labels, place)
    return Predictions(**parts)


@torch.no_grad()
def check_task(model: nn.Module, task: Task, batch: Batch, place: str) -> None:
    """Tries a task of one's own out before training: one forward pass in evaluation mode."""
    weights = list(model.parameters())
    if any(weight.is_meta for weight in weights):
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        batch = batch.to(weights[0].device) if weights else batch
        outputs = task.outputs(model.eval(), batch)
    finally:
        for module, mode in modes:
            module.training = mode
    check_outputs(outputs, place)
    loss: object = task.loss(batch, outputs)
    shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    where = f"{place}, task {type(task).__name__}"
    check(shape == (), where, "a loss that is a scalar", shape, "take its mean")
    check_predictions(task, batch, outputs, place)
