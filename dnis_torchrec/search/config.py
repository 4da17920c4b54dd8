"""Configuration of a search: all of its settings, checked before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dnis_torchrec.checks import check
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search.alpha_optimizer import Pressure
from dnis_torchrec.search.budget import Size, check_compresses
from dnis_torchrec.search.pruning import check_form_of_elements
from dnis_torchrec.search.settings import STRUCTURES, SearchSettings
from dnis_torchrec.soft_selection.table_shards import dense_parameters


@dataclass(frozen=True, kw_only=True)
class SearchConfig(SearchSettings):
    """Configuration of a search: the settings of the command line and, with defaults that suit a recipe, all others.

    NOTE[DIFF]: the paper does not turn tables into their principal axes (`rotate`, where a model is `Rotatable`).

    Attributes:
        size: the requested size of all tables.
        pressure: lead alpha to the size while training. NOTE[DIFF]: False is the paper's search, where validation loss
            alone moves alpha and pruning has to reach the size afterwards.
        unrolled: take the gradient of alpha through one unrolled step of the weights (see `hypergradient`), each at its
            learning rate of the epoch; needs tables without a fused optimizer.
        structure: what pruning drops at the end, see `prune`. With pressure whole columns are dead by then.
        patience: epochs of the release without a better selection loss before stopping.
        column_sharing: see `Pressure`.
        column_order: see `Pressure.order`.
        upper_every: lower steps per upper step.
        upper_batch_parts: parts that a validation batch is cut into; an upper step takes one, and costs less (see
            `BatchParts`). On several ranks each takes its slice of every part.
        search_table_learning_rate: see `Recipe`; for searches with pressure.
        search_dense_learning_rate: see `Recipe`; for searches with pressure.
        search_row_learning_rate: see `Recipe`; for searches with pressure.
        release_table_learning_rate: see `Recipe`; for searches with pressure.
        release_dense_learning_rate: see `Recipe`; for searches with pressure.
        release_decay: see `Recipe`; for searches with pressure.
        alpha_learning_rate: see `AlphaOptimizer`.
        alpha_averaging: see `AlphaOptimizer`.
    """

    size: Size
    pressure: bool = True
    unrolled: bool = False
    structure: str = "block"
    patience: int = 3
    column_sharing: float = 0.0
    column_order: str = "alpha"
    upper_every: int = 1
    upper_batch_parts: int = 2
    search_table_learning_rate: float | None = None
    search_dense_learning_rate: float | None = None
    search_row_learning_rate: float | None = None
    release_table_learning_rate: float | None = None
    release_dense_learning_rate: float | None = None
    release_decay: float = 1.0
    alpha_learning_rate: float | None = None
    alpha_averaging: float = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("patience", "upper_every", "upper_batch_parts"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for part in ("search_table", "search_dense", "search_row", "release_table", "release_dense"):
            name = f"{part}_learning_rate"
            rate = getattr(self, name)
            check(rate is None or rate > 0, name, "a number above 0", rate)
        decay = self.release_decay
        check(0 < decay <= 1, "release_decay", "a number above 0 and at most 1", decay)
        check(self.structure in STRUCTURES, "structure", f"one of {STRUCTURES}", repr(self.structure))
        if self.structure == "element":
            check_form_of_elements(self.size.form)
        self.pressure_over(1)

    @property
    def epochs(self) -> int:
        """Epochs at most."""
        return self.warm_up_epochs + self.ramp_epochs + self.release_epochs

    def pressure_over(self, ramp_steps: int) -> Pressure:
        """Returns the pressure that leads a search to its size in a ramp of so many upper steps.

        Args:
            ramp_steps: upper steps of the ramp, at least 1.

        Raises:
            ValueError: if the number of steps, `column_sharing` or `column_order` is out of range.
        """
        sharing, order = self.column_sharing, self.column_order
        return Pressure(size=self.size, ramp_steps=ramp_steps, column_sharing=sharing, order=order)

    def within(self, max_epochs: int) -> SearchConfig:
        """A configuration of at most so many epochs: each part shorter by the same share, none below one epoch.

        Args:
            max_epochs: 3 at least, one of each part; fewer count as 3. What parts of one epoch cannot give up, the
                longest one does.

        Example:
            >>> parts = {"warm_up_epochs": 2, "ramp_epochs": 8, "release_epochs": 10}
            >>> short = SearchConfig(size=Size(compression=2), **parts).within(10)
            >>> short.warm_up_epochs, short.ramp_epochs, short.release_epochs
            (1, 4, 5)
        """
        if self.epochs <= max_epochs:
            return self
        names = ("warm_up_epochs", "ramp_epochs", "release_epochs")
        parts = {name: max(1, getattr(self, name) * max_epochs // self.epochs) for name in names}
        while sum(parts.values()) > max(max_epochs, len(parts)):
            parts[max(parts, key=lambda name: parts[name])] -= 1
        return replace(self, **parts)

    @staticmethod
    def of(recipe: Recipe, size: Size, settings: Mapping[str, Any] | None = None) -> SearchConfig:
        """The configuration that suits a recipe.

        Args:
            recipe: gives every setting that it has a field for.
            size: see `size`; with pressure not above that of the recipe's `least_compression`.
            settings: any field by name, instead of the recipe's or the default.

        Raises:
            ValueError: for a field out of range, or a size above that of the uncompressed tables.
        """
        of_recipe = {
            part.name: getattr(recipe, part.name) for part in fields(SearchConfig) if hasattr(recipe, part.name)
        }
        config = SearchConfig(size=size, **of_recipe | dict(settings or {}))
        parameters = dense_parameters(recipe.model)
        check_compresses(size, parameters)
        if not config.pressure or recipe.least_compression == 1:
            return config
        return replace(config, size=size.pressed_to(recipe.least_compression, parameters))
