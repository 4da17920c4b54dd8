"""What all is measured with, and whether both operators give on the device what they give on the CPU."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import serving, step_time
from benchmarks.gpu.step import Run
from benchmarks.gpu.steps.serving import look_up
from benchmarks.gpu.steps.step_time import wrapped_tables
from dnis_torchrec.checks import versions

TABLES, ROWS, BATCH_SIZE = 3, 400, 64


def run(run: Run) -> None:
    """Notes versions, the card, and differences: selection of single ids and of bags, and packed lookups."""
    for package, number in versions().items():
        run.figures.note("version", number, package=package)
    if run.device.type == "cuda":
        run.figures.note("card", torch.cuda.get_device_name(), number=torch.cuda.device_count())
    for name in ("criteo", "dlrm_v2"):
        shape = step_time.vary(step_time.SHAPES[name], TABLES, ROWS, None, batch_size=BATCH_SIZE)
        wrapper = wrapped_tables(shape, torch.device("cpu"))
        wrapper.alpha.of(shape.embedding_dim).data.uniform_(0.5, 1.5)
        compare(run, f"select, {name}", steps, wrapper, step_time.make_batches(shape, 1, seed=1)[0].sparse_features)
    case = serving.compressed("smoke", [ROWS] * TABLES, is_sorted=False)
    bags = case.kjt(case.draw(BATCH_SIZE, 3))
    compare(run, "packed", lambda packed, bags: [look_up(packed, bags)], case.packed, bags)


def steps(wrapper: nn.Module, bags: KeyedJaggedTensor) -> list[Tensor]:
    """Outputs and gradients of a lower and of an upper step."""
    values, alphas = wrapper(bags).values(), [wrapper.alpha.of(dim) for dim in wrapper.alpha.dims]
    lower = torch.autograd.grad(values.square().sum(), list(wrapper.parameters()))
    with wrapper.alpha.upper_level():
        return [values, *lower, *torch.autograd.grad(wrapper(bags).values().square().sum(), alphas)]


def compare(run: Run, name: str, call: Callable, module: nn.Module, bags: KeyedJaggedTensor) -> None:
    """Notes the largest difference between CPU and device; one that is more than rounding fails the step."""
    expected = [part.detach() for part in call(module, bags)]
    found = [part.detach().cpu() for part in call(module.to(run.device), bags.to(run.device))]
    largest = max(float((part - other).abs().max()) for part, other in zip(found, expected, strict=True))
    run.figures.note("largest difference", largest, operator=name)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
