"""The wording of errors, an environment that goes together, and dependencies that keep their troubles to themselves."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec import checks

ROOT = Path(__file__).parents[1]
NAMES = st.lists(st.text(min_size=1, max_size=6), max_size=12)
CPU = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"} | dict.fromkeys(
    checks.NEEDED_BY_TORCHREC, "1"
)
CUDA = {name: number for name, number in CPU.items() if name != "fbgemm-gpu-cpu"} | {"fbgemm-gpu": "1.8.0"}


def test_order_of_the_words() -> None:
    assert checks.describe("seed", "an integer", "x", "give 0") == "seed: expected an integer, got x; give 0"
    assert checks.describe("ranks", "supported is one process", 2) == "ranks: supported is one process, got 2"
    checks.check(True, "seed", "an integer >= 0", -1)
    with pytest.raises(ValueError, match=r"^seed: expected an integer >= 0, got -1$"):
        checks.check(False, "seed", "an integer >= 0", -1)


@given(st.text(min_size=1, max_size=6), NAMES)
def test_check_known_lets_exactly_the_known_names_through(name: str, names: list[str]) -> None:
    if name in names:
        checks.check_known("table", name, iter(names))
        return
    with pytest.raises(ValueError, match="expected a known table") as caught:
        checks.check_known("table", name, iter(names))
    assert str(caught.value).endswith(checks.nearest(name, names))
    assert not names or any(repr(other) in checks.nearest(name, names) for other in names)


@pytest.mark.parametrize(
    ("numbers", "flavour"),
    [
        (CPU, None),
        (CPU, "cpu"),
        (CUDA, "cuda"),
        (CPU | {"torch": "2.12.0+cpu", "torchrec": "1.7.0", "fbgemm-gpu-cpu": "1.7.0"}, None),
        (None, None),
    ],
)
def test_what_goes_together_is_accepted(numbers: dict[str, str] | None, flavour: str | None) -> None:
    checks.check_dependencies(flavour, numbers=numbers)


@pytest.mark.parametrize(
    ("changes", "flavour", "name"),
    [
        *((dict.fromkeys([name]), None, name) for name in CPU),
        ({"torch": "2.12.0"}, None, "torch"),
        ({"torch": "2.1.3"}, None, "torch"),
        ({"torchrec": "1.7.0"}, None, "torchrec"),
        ({"torchrec": "1.10.0"}, None, "torchrec"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, None, "fbgemm-gpu-cpu"),
        ({"fbgemm-gpu": "1.8.0"}, None, "both builds"),
        ({}, "cuda", "no fbgemm-gpu"),
    ],
)
def test_what_does_not_is_refused_with_the_commands_that_mend_it(
    changes: dict[str, str | None], flavour: str | None, name: str
) -> None:
    numbers = {key: number for key, number in (CPU | changes).items() if number is not None}
    with pytest.raises(ImportError, match=name) as caught:
        checks.check_dependencies(flavour, numbers=numbers)
    assert "`make setup`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_check_imports_nothing_and_runs_as_a_program() -> None:
    """As the Makefile does, before torch is there."""
    code = "import runpy, sys; sys.argv = ['x', 'cpu']; "
    code += f"runpy.run_path({checks.__file__!r}, run_name='__main__'); "
    code += "print(sorted({'torch', 'torchrec', 'fbgemm_gpu', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n" or "error: torch, torchrec and fbgemm" in done.stderr


def test_pins_are_those_of_the_requirements() -> None:
    lines = [line for path in (ROOT / "requirements").glob("*.txt") for line in path.read_text().splitlines()]
    assert {pin for pin in checks.PINS.split() if "==" in pin} | {"torchrec==1.8.0", "fbgemm-gpu==1.8.0"} <= set(lines)


def test_only_the_named_warnings_and_log_lines_are_silenced(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks.silence_noise()
        for module in ("torchrec.distributed.embeddingbag", "somebody.else"):
            for message in ("`broadcast_buffers` is deprecated. Use another", "your model is wrong"):
                warnings.warn_explicit(message, FutureWarning, "file.py", 1, module=module)
    assert [str(warning.message)[:6] for warning in caught] == ["your m", "`broad", "your m"]
    with caplog.at_level(logging.WARNING):
        for logger, begin in checks.LOGS:
            logging.getLogger(logger or None).warning("%s, and more", begin)
            logging.getLogger("somebody.else").warning(begin)
    assert caplog.messages == [begin for _, begin in checks.LOGS]
