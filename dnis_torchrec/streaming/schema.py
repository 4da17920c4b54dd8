"""StreamSchema: the meaning of every column of the files, and the way from raw values to rows of
the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dnis_torchrec.checks import check, check_known


@dataclass(frozen=True, kw_only=True)
class StreamSchema:
    """The meaning of every column of a stream."""

    label: str
    dense: tuple[str, ...] = ()
    single_id: Mapping[str, int] = field(default_factory=dict)
    multi_hot: Mapping[str, int] = field(default_factory=dict)
    hashed: bool = True
    log_dense: bool = False
    text_columns: tuple[str, ...] = ()
    separator: str = "\t"
    list_separator: str = "|"
    split_by: str | None = None

    def __post_init__(self) -> None:
        place = "StreamSchema"
        check(
            bool(self.num_embeddings),
            place,
            "at least one feature in single_id or multi_hot",
            "none",
        )
        both = sorted(set(self.single_id) & set(self.multi_hot))
        check(not both, f"{place}.multi_hot", "features that single_id lacks", both)
        lowest = 2 if self.hashed else 1
        remedy = "row 0 is that of missing values" if self.hashed else ""
        for name, rows in self.num_embeddings.items():
            in_range = lowest <= rows < 2**31
            check(
                in_range, f"feature {name!r}", f"num_embeddings in {lowest}..2**31-1", rows, remedy
            )
        is_separator = (
            len(self.separator) == 1 and self.separator.isascii() and self.separator not in "\r\n"
        )
        check(
            is_separator,
            f"{place}.separator",
            "one character of ASCII that ends no line",
            repr(self.separator),
        )
        check(bool(self.list_separator), f"{place}.list_separator", "at least one character", "''")
        repeated = sorted({name for name in self.text_columns if self.text_columns.count(name) > 1})
        check(not repeated, f"{place}.text_columns", "distinct names", repeated)
        if self.text_columns:
            for name in self.columns:
                check_known(f"{place}: column", name, self.text_columns)

    @property
    def num_embeddings(self) -> dict[str, int]:
        """Feature -> rows of its table, in the order of the KJT's keys: single-id features first."""
        return dict(self.single_id) | dict(self.multi_hot)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        split_by = () if self.split_by is None else (self.split_by,)
        return tuple(
            dict.fromkeys((self.label, *self.dense, *self.single_id, *self.multi_hot, *split_by))
        )

    def to_json(self) -> dict[str, Any]:
        """All settings; what is parsed with other ones is something else."""
        # Pairs, because the order of the features is that of the columns of `ids`.
        pairs = {
            "single_id": list(self.single_id.items()),
            "multi_hot": list(self.multi_hot.items()),
        }
        return asdict(self) | pairs
