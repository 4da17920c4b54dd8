"""How to search: every setting of a search, checked before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dnis_torchrec.blocks.blocking import SCOPES
from dnis_torchrec.checks import check
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search.alpha_optimizer import Pressure
from dnis_torchrec.search.budget import Size, check_compresses
from dnis_torchrec.search.pruning import STRUCTURES, check_form_of_elements
from dnis_torchrec.soft_selection.table_shards import dense_parameters
from dnis_torchrec.streaming import CountLimits


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How to search.

    Attributes:
        size: the requested size of all tables.
        pressure: lead alpha to the size while training. NOTE[DIFF]: False is the paper's search, where validation loss
            alone moves alpha and pruning has to reach the size afterwards.
        unrolled: take the gradient of alpha through one unrolled step of the weights (see `hypergradient`), each at its
            learning rate of the epoch; needs tables without a fused optimizer.
        structure: what pruning drops at the end, see `prune`. With pressure whole columns are dead by then.
        num_blocks: S.
        scope: see `blocks_from_counts`.
        strategy: see `blocks_from_counts`.
        exact_count_rows: rows are counted exactly in tables of up to so many; in larger ones in bounded memory, with a
            stated error (see `CountLimits.exact_rows` and `FrequencyCounts.error_bounds`).
        warm_up_epochs: epochs of lower steps alone.
        ramp_epochs: epochs in which the mean of alpha is led to the size.
        release_epochs: epochs at most after the ramp; without pressure the epochs of the ramp are added to them.
        patience: epochs of the release without a better selection loss before stopping.
        rotate: turn tables into their principal axes after the warm-up, where the model is `Rotatable` (see
            `rotation`). NOTE[DIFF]: the paper does not.
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
    num_blocks: int = 10
    scope: str = "global"
    strategy: str = "equal_rows"
    exact_count_rows: int = CountLimits.exact_rows
    warm_up_epochs: int = 2
    ramp_epochs: int = 12
    release_epochs: int = 14
    patience: int = 3
    rotate: bool = True
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
        epochs = ("warm_up_epochs", "ramp_epochs", "release_epochs", "patience")
        for name in ("num_blocks", *epochs, "upper_every", "upper_batch_parts"):
            check(getattr(self, name) >= 1, name, "expected at least 1", getattr(self, name))
        for part in ("search_table", "search_dense", "search_row", "release_table", "release_dense"):
            name = f"{part}_learning_rate"
            rate = getattr(self, name)
            check(rate is None or rate > 0, name, "expected a number above 0", rate)
        decay = self.release_decay
        check(0 < decay <= 1, "release_decay", "expected a number above 0 and at most 1", decay)
        check(self.scope in SCOPES, "scope", f"expected one of {SCOPES}", repr(self.scope))
        check(self.structure in STRUCTURES, "structure", f"expected one of {STRUCTURES}", repr(self.structure))
        if self.structure == "element":
            check_form_of_elements(self.size.form)
        CountLimits(exact_rows=self.exact_count_rows)
        self.pressure_over(1)

    @property
    def epochs(self) -> int:
        """Epochs at most."""
        return self.warm_up_epochs + self.ramp_epochs + self.release_epochs

    def pressure_over(self, ramp_steps: int) -> Pressure:
        """What leads a search of so many upper steps of ramp to its size.

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
            recipe: gives the number and the scope of blocks, the number of epochs, the order and the sharing of
                columns, alpha's rate, how often it steps, and the rates of the search and of its release.
            size: see `size`; with pressure not above that of the recipe's `least_compression`.
            settings: any field by name, instead of the recipe's or the default.

        Raises:
            ValueError: for a field out of range, or a size above that of the uncompressed tables.
        """
        names = (
            "num_blocks",
            "scope",
            "warm_up_epochs",
            "ramp_epochs",
            "release_epochs",
            "column_sharing",
            "column_order",
            "alpha_learning_rate",
            "search_table_learning_rate",
            "search_dense_learning_rate",
            "search_row_learning_rate",
            "release_table_learning_rate",
            "release_dense_learning_rate",
            "release_decay",
            "upper_every",
        )
        config = SearchConfig(size=size, **{name: getattr(recipe, name) for name in names} | dict(settings or {}))
        parameters = dense_parameters(recipe.model)
        check_compresses(size, parameters)
        if not config.pressure or recipe.least_compression == 1:
            return config
        return replace(config, size=size.pressed_to(recipe.least_compression, parameters))
