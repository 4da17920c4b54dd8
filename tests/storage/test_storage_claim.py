"""One job at a time writes to a URL: the living keep it, the dead and earlier attempts of the same job do not."""

from __future__ import annotations

import json

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.storage import claim, outputs
from dnis_torchrec.storage.claim import claimed

URL, WRITER = "memory://claims/run", "/claims/run.writer"


def left_behind(files: MemoryFileSystem, job: str = "another") -> None:
    """The claim of a job that was killed."""
    files.pipe_file(WRITER, json.dumps({"writer": "process 7 on far", "job": job, "sign": "0"}).encode())


def test_a_second_job_is_refused_while_the_first_lives(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.002)
    monkeypatch.setattr(claim, "DEAD_SECONDS", 60.0)
    with outputs.output(URL) as folder:
        folder.mkdir()
        (folder / "a").write_text("first")
        message = (
            r"address memory://claims/run: expected no other job at work there, got process \d+ on .*; wait for it"
        )
        with pytest.raises(ValueError, match=message), outputs.output(URL):
            pass
    assert remote.cat_file("/claims/run/a") == b"first"
    with outputs.output(f"{URL}/") as folder:  # the first has let go
        assert [path.name for path in folder.iterdir() if path.name != ".fetched.json"] == ["a"]
    assert not remote.exists(WRITER)


def test_the_place_of_a_dead_job_is_taken(remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "DEAD_SECONDS", 0.02)
    left_behind(remote)
    with claimed(URL):
        assert json.loads(remote.cat_file(WRITER))["job"] != "another"
    assert not remote.exists(WRITER)


def test_a_restart_does_not_wait_for_what_it_was_itself(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim.time, "sleep", lambda seconds: pytest.fail("waited"))
    left_behind(remote, f"{claim.gethostname()} ranks of 5")
    with claimed(URL, job="ranks of 5"):
        assert "ranks of 5" in json.loads(remote.cat_file(WRITER))["job"]


def test_of_two_that_begin_together_one_is_refused(remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one writes its claim after this one has looked."""
    write = MemoryFileSystem.pipe_file

    def and_the_other(self: MemoryFileSystem, path: str, content: bytes, **options: object) -> None:
        write(self, path, content, **options)
        if b"far" not in content:
            left_behind(remote)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", and_the_other)
    with pytest.raises(ValueError, match="got process 7 on far"), claimed(URL):
        pass
    assert json.loads(remote.cat_file(WRITER))["job"] == "another"


def test_a_claim_outlives_storage_that_stumbles(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = claim.Claim(URL, "job")
    held.take()

    class Twice:
        waits = iter([False, True])

        def wait(self, seconds: float) -> bool:
            return next(self.waits)

    def gone(*_: object, **__: object) -> None:
        raise ConnectionResetError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", gone)
        held.renew_until(Twice())
        patch.setattr(MemoryFileSystem, "rm_file", gone)
        held.release()
    assert "the claim is renewed later" in caplog.text
    assert remote.exists(WRITER)
