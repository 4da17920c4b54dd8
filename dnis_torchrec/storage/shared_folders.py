"""Folders that several ranks fill, and that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dnis_torchrec.checks import check
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.storage.whole_folders import FolderKind, new_folder


@contextmanager
def shared_folder(path: Path, *, overwrite: bool = False, kind: FolderKind, ranks: Ranks) -> Iterator[Path]:
    """`new_folder` of rank 0, for all ranks to fill: it appears once all of them have left without an error.

    Distributed: every rank calls it and leaves it; some texts are gathered. Of what is wrong on one rank within, the
    others have to learn there (see `dnis_torchrec.ranks.together`).

    Args:
        path: the folder to make, on storage that all ranks see.
        overwrite: see `new_folder`.
        kind: see `new_folder`.
        ranks: that fill it.

    Yields:
        The folder to fill.

    Raises:
        ValueError: on all ranks, as `new_folder`, or if one of them does not see the folder.
        OSError: on all ranks, if it cannot be made or put into its place.
    """
    with ExitStack() as stack:
        with together(ranks.group):
            made = str(stack.enter_context(new_folder(path, overwrite=overwrite, kind=kind))) if ranks.is_first else ""
        folder = Path(ranks.gather_texts(made)[0])
        with together(ranks.group):
            remedy = "write to storage that all ranks see"
            check(folder.is_dir(), f"{kind.name} {str(path)!r}", "to see the folder of rank 0", "none", remedy)
        yield folder
        with together(ranks.group):
            stack.close()
