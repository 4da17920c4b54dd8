"""The command line of `benchmarks.gpu`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu.figures import RESULTS
from benchmarks.gpu.schedule import STEPS, Step, run_all

MINUTES = 8.0


def chosen_steps(text: str) -> tuple[Step, ...]:
    """The steps of a comma-separated list, in the order of `STEPS`."""
    names, known = text.split(","), [step.name for step in STEPS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {unknown[0]!r}")
    return tuple(step for step in STEPS if step.name in names)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the steps; asked to end, it kills the one at work first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    description = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=benchmarks.gpu.__doc__, formatter_class=description
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all steps together ({MINUTES:g})")
    parser.add_argument("--steps", type=chosen_steps, default=STEPS, metavar="NAME,NAME", help="some of them")
    parser.add_argument("--stand-in", action="store_true", help="on the CPU, in small")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    arguments = parser.parse_args(argv)
    run_all(arguments.steps, arguments.out, 60 * arguments.minutes, is_stand_in=arguments.stand_in)
    print(f"results: {arguments.out / RESULTS}")


if __name__ == "__main__":
    main()
