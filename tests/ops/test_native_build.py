"""Building the compiled lookup: once, whole or not at all, by several processes at once, from nobody else's files."""

from __future__ import annotations

import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dnis_torchrec.ops import build as native_build
from dnis_torchrec.ops.build import LOOKUPS, built_elsewhere, find_compiler, library_folder


def build(*, compiler: str | None = None) -> Path:
    """The library of lookups, by a compiler that the variable CXX names."""
    with pytest.MonkeyPatch.context() as patch:
        if compiler is not None:
            patch.setenv("CXX", compiler)
        return LOOKUPS.build()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "dnis_torchrec"


def compiler(tmp_path: Path, body: str) -> str:
    """A program that is called like a compiler and does what `body` says: `output` is the path after -o."""
    program = tmp_path / "compiler"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "output = sys.argv[sys.argv.index('-o') + 1]\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv) + '\\n')\n"
        f"{body}\n"
    )
    program.chmod(0o755)
    return str(program)


WORKS = "open(output, 'w').write('library')"


def test_builds_once(tmp_path: Path, cache: Path) -> None:
    command = compiler(tmp_path, WORKS)
    library = build(compiler=command)
    assert library.parent == cache == library_folder()
    assert library.read_text() == "library"
    assert (cache.stat().st_mode & 0o777, library.stat().st_mode & 0o777) == (0o700, 0o755)
    assert build(compiler=command) == library
    assert build(compiler="/nowhere") == library  # a library outlives its compiler
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert str(LOOKUPS.sources / "csr_embedding_bag.cpp") in call
    assert "-ffp-contract=off" in call


def test_another_source_or_torch_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    command = compiler(tmp_path, WORKS)
    libraries = {build(compiler=command)}
    monkeypatch.setattr("torch.__version__", "2.99.0")
    libraries.add(build(compiler=command))
    changed = tmp_path / "csrc"
    changed.mkdir()
    for source in LOOKUPS.sources.iterdir():
        (changed / source.name).write_text(source.read_text() + "// changed\n")
    monkeypatch.setenv("CXX", command)
    libraries.add(replace(LOOKUPS, sources=changed).build())
    assert len(libraries) == 3
    assert set(cache.iterdir()) == libraries


def test_failure_is_quoted_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    command = compiler(tmp_path, "open(output, 'w').write('half'); sys.exit('error: no such header')")
    with pytest.raises(RuntimeError, match=r"CSR lookup: expected .*compiler to compile it(.|\n)*no such header"):
        build(compiler=command)
    assert list(cache.iterdir()) == []


def test_endless_compiler_is_stopped(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "SECONDS_TO_COMPILE", 0.2)
    with pytest.raises(RuntimeError, match=r"to compile it within 0\.2 s"):
        build(compiler=compiler(tmp_path, "time.sleep(60)"))
    assert list(cache.iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() is None
    with pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler: CXX or one of .*got none; install one"):
        build()
    assert not cache.exists()


def test_finds_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = compiler(tmp_path, WORKS)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    os.symlink(named, tmp_path / "clang++")
    assert find_compiler() == str(tmp_path / "clang++")
    os.symlink(named, tmp_path / "c++")
    assert find_compiler() == str(tmp_path / "c++")
    monkeypatch.setenv("CXX", named)
    assert find_compiler() == named


def test_several_may_build_at_once(tmp_path: Path, cache: Path) -> None:
    slowly = "stream = open(output, 'w'); stream.write('lib'); stream.flush(); time.sleep(.1); stream.write('rary')"
    command = compiler(tmp_path, slowly)
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build(compiler=command).read_text(), range(4)))
    assert built == ["library"] * 4
    assert len(list(cache.iterdir())) == 1


def test_a_library_appears_whole_or_not_at_all(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        build(compiler=compiler(tmp_path, WORKS))
    assert list(cache.iterdir()) == []


def test_a_library_that_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    command = compiler(tmp_path, WORKS)
    library = build(compiler=command)
    library.chmod(0o775)
    with pytest.raises(RuntimeError, match=r"expected a library that only you or root can write.*remove it"):
        build(compiler=command)


def test_a_library_of_somebody_else_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = compiler(tmp_path, WORKS)
    owner = build(compiler=command).stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:
        assert build(compiler=command).exists()
    else:
        with pytest.raises(RuntimeError, match="expected a library that only you or root can write"):
            build(compiler=command)


@pytest.mark.parametrize("num_bytes", [0, 3, 63, 64, 127])
def test_a_library_that_was_cut_off_is_built_again(tmp_path: Path, cache: Path, num_bytes: int) -> None:
    """As by a full disk or a crash: a process that loads one is killed by SIGBUS, if not refused."""
    header = struct.pack("=4s36xQ10xHH2x", b"\x7fELF", 64, 64, 1)  # one section of 64 bytes, from byte 64
    command = compiler(tmp_path, f"open(output, 'wb').write({header + bytes(64)!r})")
    library = build(compiler=command)
    assert build(compiler="/nowhere").read_bytes() == header + bytes(64)
    library.write_bytes(library.read_bytes()[:num_bytes])
    with pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler"):
        build(compiler="/nowhere")
    assert build(compiler=command).read_bytes() == header + bytes(64)
    assert list(cache.iterdir()) == [library]
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize("mended", [True, False])
def test_a_library_that_cannot_be_loaded_is_built_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, mended: bool
) -> None:
    loaded = []

    def load_library(library: Path) -> None:
        loaded.append((library.parent, library.read_text()))
        if not mended or library.read_text() != "library":
            raise OSError("version `GLIBC_2.99' not found")

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    monkeypatch.setenv("CXX", compiler(tmp_path, WORKS))
    build().write_text("of another machine")
    with nullcontext() if mended else pytest.raises(OSError, match="GLIBC"):
        LOOKUPS.load()
    assert loaded == [(cache, "of another machine"), (cache, "library")]


def test_what_was_built_elsewhere_does_where_nothing_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    other, library = tmp_path / "block_operators_01234567.so", tmp_path / "csr_embedding_bag_01234567.so"
    working = compiler(tmp_path, WORKS)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with built_elsewhere([other, library]):
        assert build() == library
        cache.parent.write_text("no folder")
        assert build(compiler=working) == library
        cache.parent.unlink()
    with built_elsewhere([other]), pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler"):
        build()
    with pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler"):
        build()
    with built_elsewhere([library]):
        assert build(compiler=working).parent == cache
