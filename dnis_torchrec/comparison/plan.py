"""Plan of a comparison: methods x sizes x seeds, and the rules that all its cells share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.comparison.cells import Cell, CellResult, CellTask, read_result
from dnis_torchrec.comparison.methods.method import needs_validation
from dnis_torchrec.comparison.methods.uniform import dense_table_bytes
from dnis_torchrec.comparison.processes import default_jobs
from dnis_torchrec.comparison.registry import REGISTRY, load_registry
from dnis_torchrec.comparison.settings import COMPARED_PRECISIONS, CompareSettings, training_rules
from dnis_torchrec.data.files import check_plain
from dnis_torchrec.data.labels import RankingBatch, check_candidates
from dnis_torchrec.data.over_ranks import SPLITS, fingerprints, warn_of_overlaps, with_notes
from dnis_torchrec.data.recipe import Recipe, build_recipe, checked_batches
from dnis_torchrec.data.trial import try_out
from dnis_torchrec.forms import PRECISIONS
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.report.content import DENSE, NO_EMBEDDINGS
from dnis_torchrec.selection.shards import collections, table_configs
from dnis_torchrec.training.evaluate import primary_metric
from dnis_torchrec.training.shard import check_pooling

SETTINGS = "settings"
"""Name of the rule that holds the recipe's settings."""
RULES_OF_OLDER = {"precisions": ["fp32"]}
"""Rules that older versions did not write down, and kept."""


@dataclass(frozen=True, kw_only=True)
class Comparison(CompareSettings):
    """Arguments of `dnis compare`."""

    recipe: str
    data: Path | None
    out: Path
    methods: tuple[str, ...]
    sizes: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    precisions: tuple[str, ...] = COMPARED_PRECISIONS
    registry: str = REGISTRY
    data_address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            check_known("method", name, load_registry(self.registry))
        for name in self.precisions:
            check_known("precision", name, PRECISIONS)
        for place in ("methods", "sizes", "seeds", "precisions"):
            values = getattr(self, place)
            check(bool(values), place, "at least one", "none")
            check(len(set(values)) == len(values), place, "each once", list(values))
        for size in self.sizes:
            check(math.isfinite(size) and size > 1, "sizes", "compressions above 1", size)
        for seed in self.seeds:
            check(seed >= 0, "seeds", "integers >= 0", seed)
        is_file = self.out.exists() and not self.out.is_dir()
        check(not is_file, f"folder {self.out}", "a folder", "a file", "choose another name")
        is_ours = (
            not self.out.exists() or (self.out / "cells").is_dir() or not any(self.out.iterdir())
        )
        remedy = "choose another folder"
        check(
            is_ours,
            f"folder {self.out}",
            "a new folder or one of a comparison",
            "another one",
            remedy,
        )
        check_plain(self.out, f"folder {self.out}")
        self.check_rules(self.rules())

    def cells(self) -> tuple[Cell, ...]:
        """All cells, seed by seed, so that early results can be compared; the uncompressed model
        comes first."""
        methods, cells = load_registry(self.registry), []
        for seed in self.seeds:
            for method in (DENSE, *(name for name in self.methods if name != DENSE)):
                for size in (None,) if method in (DENSE, NO_EMBEDDINGS) else self.sizes:
                    own_split = (False,) if needs_validation(methods[method]) else (False, True)
                    cells += [
                        Cell(method=method, size=size, seed=seed, with_validation=on)
                        for on in own_split
                    ]
        return tuple(cells)

    def folder(self, cell: Cell) -> Path:
        """Folder of a cell."""
        return self.out / "cells" / cell.name

    def task(self, cell: Cell, rules: Mapping[str, Any], *, cells_at_once: int) -> CellTask:
        """Returns the task of the process that runs a cell."""
        return CellTask(
            cell=cell,
            rules=rules,
            data=self._local_data,
            registry=self.registry,
            cells_at_once=cells_at_once,
            processes=max(1, self.num_jobs // cells_at_once),
            artifact=self.artifacts,
            trained=str(self.trained / cell.training),
        )

    @property
    def trained(self) -> Path:
        """Folder of trainings that cells share, there while they run."""
        return self.out / "trained"

    @property
    def _local_data(self) -> str | None:
        return None if self.data is None else str(self.data.resolve())

    @property
    def num_jobs(self) -> int:
        """Processes at a time."""
        return default_jobs() if self.jobs is None else self.jobs

    def rules(self) -> dict[str, Any]:
        """Returns the settings that all cells share. Results under other rules are never compared
        with these."""
        return {
            "recipe": self.recipe,
            "data": self.data_address or self._local_data,
            "precisions": list(self.precisions),
            **training_rules(vars(self)),
        }

    def finished(self) -> dict[Cell, CellResult]:
        """Results of the cells that need not be run."""
        found = {cell: read_result(self.folder(cell)) for cell in self.cells()}
        return {cell: result for cell, result in found.items() if result is not None}

    def check_rules(self, rules: Mapping[str, Any]) -> None:
        """Checks that no finished cell below `out` was run under other rules."""
        for folder in sorted((self.out / "cells").glob("*")):
            result = read_result(folder)
            for name, value in rules.items():
                older = RULES_OF_OLDER.get(name, value)  # an older version knew fewer
                there = value if result is None else result.rules.get(name, older)
                remedy = "give the arguments of the older comparison, or another --out"
                for part, before, now in _parts(name, there, value):
                    check(
                        before == now,
                        f"{folder}, {part}",
                        f"{before!r} as when it was run",
                        repr(now),
                        remedy,
                    )

    def check_first_seed(self, facts: RecipeFacts) -> None:
        """Checks that no finished cell of the first seed had other tables or other test samples."""
        for cell, result in self.finished().items():
            trained = result.trained
            if cell.seed != self.seeds[0] or trained is None:
                continue
            there, here = trained.dense_bytes, facts.dense_bytes
            remedy = "set the environment of the older comparison, or give another --out"
            place = f"{self.folder(cell)}, uncompressed tables"
            check(there == here, place, f"{there} bytes as when it was run", here, remedy)
            is_same = trained.test_fingerprint in (None, facts.test_fingerprint)
            remedy = "give another --out for other data"
            check(
                is_same,
                f"{self.folder(cell)}, test split",
                "the samples that it was evaluated on",
                "others",
                remedy,
            )


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """The facts about a recipe that its comparison needs."""

    embedding_dims: Mapping[str, int]
    dense_bytes: int
    primary_metric: str
    higher_is_better: bool
    test_fingerprint: int
    settings: Mapping[str, Any]
    notes: tuple[str, ...]

    def rules(self) -> dict[str, Any]:
        """Returns the rules of a cell that come from the recipe: its rates, blocks and
        embedding_dims."""
        return {"embedding_dims": dict(self.embedding_dims), SETTINGS: dict(self.settings)}


def recipe_facts(comparison: Comparison) -> RecipeFacts:
    """Builds the recipe once and reads all of its splits, so that no method is trained on data that
    another refuses."""
    place = f"recipe {comparison.recipe!r}"
    recipe = build_recipe(comparison.recipe, comparison.data, seed=comparison.seeds[0])
    check_pooling(recipe.model, world_size=1)  # as every cell is trained
    batch_sizes: dict[str, int] = {}
    noted = with_notes(recipe.data)
    for name in SPLITS:
        num_batches, queries = 0, []
        for batch in checked_batches(getattr(noted, name), recipe.task, name):
            num_batches += 1
            batch_sizes.setdefault(name, len(batch.labels))
            if isinstance(batch, RankingBatch):
                queries.append(batch.queries)
        remedy = f"give its DataSplits a {name} part of its own"
        check(num_batches > 0, place, f"at least one {name} batch", "none", remedy)
        if queries:
            check_candidates(torch.cat(queries), place=f"{place}, {name} split")
    warn_of_overlaps(noted, Ranks())
    try_out(recipe)
    metric, higher = primary_metric(recipe.task, recipe.data.test)
    return RecipeFacts(
        embedding_dims={table.name: table.embedding_dim for table in table_configs(recipe.model)},
        dense_bytes=dense_table_bytes(recipe.model),
        primary_metric=metric,
        higher_is_better=higher,
        test_fingerprint=fingerprints(noted, Ranks())["test"],
        settings=_settings_of(recipe) | {"batch_size": batch_sizes["train"]},
        notes=tuple(recipe.notes),
    )


def _parts(name: str, there: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, what it was, what it is) of a rule; of the recipe's settings, of which there may be
    more now, of each."""
    if name != SETTINGS:
        yield name, there, value
        return
    for part in there:
        if part in value:
            yield f"{name}.{part}", there[part], value[part]


def _settings_of(recipe: Recipe) -> dict[str, Any]:
    """Collects the settings that decide how a recipe's model is trained and searched, as JSON gives
    them back."""
    others = ("model", "data", "loss", "task", "redraw", "notes")
    names = [part.name for part in fields(recipe) if part.name not in others]
    own = {name: getattr(recipe, name) for name in names}
    of_tables = {
        id(weight)
        for module in collections(recipe.model).values()
        for weight in module.parameters()
    }
    network = {
        name: list(w.shape[1:])
        for name, w in recipe.model.named_parameters()
        if id(w) not in of_tables
    }
    loss = recipe.task if recipe.loss is None else recipe.loss
    lists = {"row_weights": list(recipe.row_weights), "leave_alone": list(recipe.leave_alone)}
    return own | lists | {"loss": type(loss).__name__, "network": network}


def parse_names(
    text: str, place: str, requirement: str = "names with commas between them"
) -> tuple[str, ...]:
    """Words between commas."""
    names = tuple(part.strip() for part in text.split(","))
    check(all(names), place, requirement, repr(text))
    return names


def parse_sizes(text: str, place: str) -> tuple[float, ...]:
    """Numbers between commas."""
    requirement = "numbers with commas between them"
    return tuple(_numbers(parse_names(text, place, requirement), float, place, requirement))


def parse_seeds(text: str, place: str) -> tuple[int, ...]:
    """Parses a number of seeds, counted from 0, or with a comma in it the seeds themselves."""
    requirement = "a number of seeds, or seeds with commas between them"
    seeds = _numbers(
        parse_names(text.strip().removesuffix(","), place, requirement), int, place, requirement
    )
    if "," in text:
        return tuple(seeds)
    check(seeds[0] >= 1, place, "at least one seed", seeds[0])
    return tuple(range(seeds[0]))


def _numbers(parts: Sequence[str], kind: type, place: str, requirement: str) -> list:
    try:
        return [kind(part) for part in parts]
    except ValueError as error:
        raise ValueError(describe(place, requirement, repr(",".join(parts)))) from error
