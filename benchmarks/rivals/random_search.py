"""Random search: random falling numbers of columns over the blocks, each trained from scratch."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.rivals.mixed import Blocks, train_mixed
from benchmarks.rivals.task import Served, Task, UnmetError, best_of, largest_scale

TRIALS = 16


def random_search(task: Task) -> Served:
    """The best of 16 random sequences, each as high as the bytes allow."""
    blocks, generator = Blocks.of(task), torch.Generator().manual_seed(task.seed)
    trials = []
    for _ in range(task.trials or TRIALS):
        dims = random_dims(blocks, generator)
        masks = blocks.masks(dims, blocks.blocks.embedding_dims)
        settings = {name: " ".join(map(str, dim.tolist())) for name, dim in dims.items()}
        trials.append(partial(_train, blocks, masks, settings))
    return best_of(task, trials)


def _train(blocks: Blocks, masks: dict[str, Tensor], dims: dict[str, str]) -> Served:
    return train_mixed(blocks, blocks.task.build(None), masks, dims=dims)


def random_dims(blocks: Blocks, generator: torch.Generator) -> dict[str, Tensor]:
    """Heights that fall from block to block of every table, multiplied up to the task's bytes."""
    widths, heights = blocks.blocks.embedding_dims, {}
    for name, routing in blocks.routings.items():
        drawn = 1 - torch.rand(routing.num_blocks, generator=generator, dtype=torch.float64)
        heights[name] = drawn.sort(descending=True).values

    def at(scale: float) -> dict[str, Tensor]:
        return {
            name: (scale * height * widths[name]).floor().clamp(max=widths[name]).long()
            for name, height in heights.items()
        }

    def num_bytes(scale: float) -> int:
        return blocks.num_bytes(blocks.masks(at(scale), widths))

    high = 1 / min(float(height.min()) for height in heights.values())
    dims = at(largest_scale(num_bytes, blocks.task.num_bytes, high * (1 + 1e-9)))
    if not any(bool(dim.any()) for dim in dims.values()):
        raise UnmetError(f"{blocks.task.num_bytes} bytes pay for no column of a block")
    return dims
