"""Fuzzes every compiled operator under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.fuzz_operators [--seed N] [--cases N]

Valid arguments have to give what plain loops give. Hostile ones (numbers out of any range, other shapes, dtypes and
strides, memory that two arguments share) have to be refused by an exception, or to do something within their tensors:
a read or write beside one, or undefined behaviour, ends the process. The libraries are compiled anew for it, with
portable loops only, because sanitizers do not see what vector intrinsics read; the cache keeps them. Where the compiler
has no sanitizers, that is said, and nothing is done.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.ops import build as native_build
from dnis_torchrec.ops import select as block_operators
from dnis_torchrec.ops.packed import load_operator
from tests import fuzz_cases

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined")
FLAGS = (*native_build.FLAGS, *SANITIZERS, "-DDNIS_PORTABLE", "-O1", "-g1")
OPTIONS = {
    # leaks of Python's are none of ours; a size that nobody has is torch's to refuse
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_NUM_THREADS": "1",
}
SECONDS = 600
"""After which a call counts as one that does not end; on two idle cores all takes half a minute."""

NAMESPACE = "dnis_torchrec::"
HOSTILE_PER_CASE = 12
NUMBERS = (-(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, 16, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
DTYPES = (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
REFUSALS = (ValueError, RuntimeError, TypeError, IndexError, NotImplementedError, MemoryError)


def hostile_number(random: Random, number: int) -> int:
    """One beside it, or any that makes trouble."""
    return random.choice([number - 1, number + 1, *NUMBERS])


def within(number: int, dtype: torch.dtype) -> int:
    """The nearest number that the dtype has."""
    bounds = torch.iinfo(dtype)
    return min(max(number, bounds.min), bounds.max)


def with_another_element(random: Random, tensor: Tensor) -> Tensor:
    """One of its numbers is another; or two are."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.view(-1)
    for _ in range(random.randint(1, 2) if len(flat) else 0):
        place = random.randrange(len(flat))
        if tensor.dtype.is_floating_point:
            flat[place] = random.choice([torch.nan, torch.inf, -1e30])
        else:
            flat[place] = within(hostile_number(random, int(flat[place])), tensor.dtype)
    return tensor


def of_another_shape(random: Random, tensor: Tensor) -> Tensor:
    """Shorter, longer, of other dimensions, with gaps between its numbers, or with none at all."""
    if tensor.dim() == 0:
        return tensor.unsqueeze(0)
    gaps = torch.stack([tensor, tensor], dim=-1)[..., 0]
    huge = tensor.new_empty(0, random.choice([2**40, 2**60]))
    cut = [tensor[:-1], tensor[1:], tensor[:0], tensor[..., :-1]]
    more = [torch.cat([tensor, tensor[:1]]), tensor.expand(2, *tensor.shape), huge, huge.t(), gaps]
    return random.choice([*cut, *more, tensor.flatten(), tensor.unsqueeze(0), tensor.unsqueeze(1)])


def over_the_memory_of(other: Tensor, tensor: Tensor) -> Tensor:
    """Of the same dtype, and shape if there is room, where another argument lies."""
    found = torch.empty(0, dtype=tensor.dtype).set_(other.untyped_storage())
    return found[: tensor.numel()].view(tensor.shape) if found.numel() >= tensor.numel() else found


def spoiled(random: Random, argument: Any, tensors: list[Tensor]) -> Any:
    """An argument of about the same kind that the operator may well not expect."""
    if isinstance(argument, Tensor):
        changes: list[Callable[[], Tensor]] = [
            lambda: with_another_element(random, argument),
            lambda: with_another_element(random, argument),
            lambda: of_another_shape(random, argument),
            lambda: argument.to(random.choice(DTYPES)),
            lambda: over_the_memory_of(random.choice(tensors), argument),
            lambda: random.choice(tensors),
        ]
        return random.choice(changes)()
    if isinstance(argument, bool):
        return not argument
    if isinstance(argument, int):
        return hostile_number(random, argument)
    if isinstance(argument, list):
        changed = list(argument)
        place = random.randrange(len(changed) + 1)
        kind = random.choice(["one less", "one more", "another", "another", "none"])
        if kind == "none" or not changed:
            return []
        if kind == "one less":
            del changed[-1]
        elif kind == "one more":
            changed.insert(place, random.choice(changed))
        else:
            place = min(place, len(changed) - 1)
            changed[place] = spoiled(random, changed[place], tensors)
        return changed
    return random.choice([None, *tensors])


def tensors_of(arguments: list[Any]) -> list[Tensor]:
    """All of them, those in lists, too."""
    flat = [part for argument in arguments for part in (argument if isinstance(argument, list) else [argument])]
    return [part for part in flat if isinstance(part, Tensor)]


def operators() -> dict[str, Callable[[Random], fuzz_cases.Case]]:
    """Every operator of the libraries, with what draws its arguments."""
    registered = {name.removeprefix(NAMESPACE) for name in torch._C._dispatch_get_all_op_names() if NAMESPACE in name}
    drawn = {name: getattr(fuzz_cases, name) for name in registered if hasattr(fuzz_cases, name)}
    missing = registered - drawn.keys()
    assert not missing, f"tests/fuzz_cases.py: expected a function for every operator, got none for {sorted(missing)}"
    return dict(sorted(drawn.items()))


def fuzz(seed: int, num_cases: int, last: Path) -> None:
    """Calls every operator with valid and hostile arguments; `last` tells which call was the last one."""
    native_build.FLAGS = FLAGS
    assert load_operator(), "expected the lookups to be compiled"
    assert block_operators.are_compiled(), "expected the operators on blocks to be compiled"
    for name, draw in operators().items():
        operator, refused = getattr(torch.ops.dnis_torchrec, name).default, 0
        for index in range(num_cases):
            case_seed = f"{seed}:{name}:{index}"
            random = Random(case_seed)
            torch.manual_seed(random.getrandbits(32))
            last.write_text(f"{case_seed}, valid")
            case = draw(random)
            case.check(operator(*case.arguments))
            tensors = tensors_of(case.arguments)
            for attempt in range(HOSTILE_PER_CASE):
                arguments = list(case.arguments)
                for place in random.sample(range(len(arguments)), random.choice([1, 1, 2, 3])):
                    arguments[place] = spoiled(random, arguments[place], tensors)
                last.write_text(f"{case_seed}, hostile {attempt}")
                try:
                    operator(*arguments)
                except REFUSALS:
                    refused += 1
        print(f"fuzz: {name}: {num_cases} valid, {num_cases * HOSTILE_PER_CASE} hostile of which {refused} refused")


def sanitizer_runtimes(compiler: str, folder: Path) -> list[str]:
    """What has to be loaded before Python, or nothing if the compiler cannot compile a program with the sanitizers."""
    source, program = folder / "trivial.cpp", folder / "trivial"
    source.write_text("int main() { return 0; }\n")
    command = [compiler, *SANITIZERS, str(source), "-o", str(program)]
    if subprocess.run(command, capture_output=True).returncode or subprocess.run([program]).returncode:
        return []
    names = ("libasan.so", "libstdc++.so")  # the second, because the first looks for what throws exceptions
    found = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    runtimes = [done.stdout.strip() for done in found]
    return runtimes if all(Path(runtime).is_absolute() for runtime in runtimes) else []


def build() -> None:
    """Compiles both libraries with the sanitizers, at the same time."""
    native_build.FLAGS = FLAGS
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda build: build(), [native_build.LOOKUPS.build, native_build.SELECTION.build]))


def main() -> int:
    """Compiles, and fuzzes in a process of its own. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200, help="valid ones of every operator, each with hostile ones")
    parser.add_argument("--last", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.last is not None:
        fuzz(options.seed, options.cases, options.last)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        compiler = native_build.find_compiler()
        runtimes = sanitizer_runtimes(compiler, Path(folder)) if compiler else []
        if not runtimes:
            print("fuzz: skipped: the C++ compiler has no AddressSanitizer and UndefinedBehaviorSanitizer")
            return 0
        build()
        last = Path(folder) / "last"
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz_operators", "--last", str(last)]
        command += ["--seed", str(options.seed), "--cases", str(options.cases)]
        variables = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(runtimes)}
        try:
            status = subprocess.run(command, env=variables, timeout=SECONDS).returncode
        except subprocess.TimeoutExpired:
            status = 124
        if status:
            print(f"fuzz: failed with status {status}, at {last.read_text() if last.exists() else 'the start'}")
        return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
