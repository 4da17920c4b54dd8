"""StreamSchema: the meaning of every column of the files, and the way from raw values to rows of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dnis_torchrec.checks import check, check_known


@dataclass(frozen=True, kw_only=True)
class StreamSchema:
    """The meaning of every column of a stream.

    Attributes:
        label: column of the labels, numbers, none missing.
        dense: columns of the dense features, finite numbers; a missing one is 0, and in Parquet NaN is one too.
        single_id: feature (and column) -> num_embeddings; one value per sample. Text that is empty or white space is a
            missing value, and white space around a value does not count.
        multi_hot: feature (and column) -> num_embeddings; a list of values per sample, or text with `list_separator`
            between the values. Missing values are in no bag: a missing list and an empty field are an empty one.
        hashed: True hashes raw values into the tables, see `rows_of_values`; False takes them for row ids as they are.
            An integer, a whole float and its text are the same value in every file, see `hash_values`.
        log_dense: dense features become ``log(1 + max(x, 0))``.
        text_columns: names of all columns of a text file, in order; Parquet files bring their own.
        separator: separator of the fields of a text file, one character of ASCII.
        list_separator: separator of the values of a list in text, at least one character.
        split_by: column whose value decides which part of a split a sample belongs to (a user id, say, so that no user
            is in two parts); None splits by the number of the sample.

    Example:
        >>> schema = StreamSchema(label="y", single_id={"user": 1000}, text_columns=("y", "user"))
        >>> schema.num_embeddings
        {'user': 1000}
    """

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
        check(bool(self.num_embeddings), place, "at least one feature in single_id or multi_hot", "none")
        both = sorted(set(self.single_id) & set(self.multi_hot))
        check(not both, f"{place}.multi_hot", "features that single_id lacks", both)
        lowest = 2 if self.hashed else 1
        remedy = "row 0 is that of missing values" if self.hashed else ""
        for name, rows in self.num_embeddings.items():
            in_range = lowest <= rows < 2**31
            check(in_range, f"feature {name!r}", f"num_embeddings in {lowest}..2**31-1", rows, remedy)
        is_separator = len(self.separator) == 1 and self.separator.isascii() and self.separator not in "\r\n"
        check(is_separator, f"{place}.separator", "one character of ASCII that ends no line", repr(self.separator))
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
        return tuple(dict.fromkeys((self.label, *self.dense, *self.single_id, *self.multi_hot, *split_by)))

    def to_json(self) -> dict[str, Any]:
        """All settings; what is parsed with other ones is something else."""
        # Pairs, because the order of the features is that of the columns of `ids`.
        pairs = {"single_id": list(self.single_id.items()), "multi_hot": list(self.multi_hot.items())}
        return asdict(self) | pairs
