"""Folders that several ranks fill, and that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dnis_torchrec.checks import check
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.storage.whole_folders import FolderKind, new_folder


@contextmanager
def shared_folder(
    path: Path, *, overwrite: bool = False, kind: FolderKind, ranks: Ranks
) -> Iterator[Path]:
    """`new_folder` of rank 0, for all ranks to fill: it appears once all of them have left without
    an error."""
    with ExitStack() as stack:
        with together(ranks.group):
            made = (
                str(stack.enter_context(new_folder(path, overwrite=overwrite, kind=kind)))
                if ranks.is_first
                else ""
            )
        folder = Path(ranks.gather_texts(made)[0])
        with together(ranks.group):
            remedy = "write to storage that all ranks see"
            check(
                folder.is_dir(),
                f"{kind.name} {str(path)!r}",
                "to see the folder of rank 0",
                "none",
                remedy,
            )
        yield folder
        with together(ranks.group):
            stack.close()
