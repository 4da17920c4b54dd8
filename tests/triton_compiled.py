"""Kernels compiled by Triton for an H100, on any machine that has Triton: what their assembly may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_compiled(kernel: Any, types: Mapping[str, str], fixed: Mapping[str, Any], num_warps: int) -> None:
    """Checks that no multiplication is fused into an addition, and that nothing is added atomically.

    Args:
        kernel: what Triton's ``jit`` returned.
        types: argument -> its type, as Triton writes it.
        fixed: argument -> the constant that it is.
        num_warps: as the launch says.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    source = ASTSource(fn=kernel, signature={**types, **dict.fromkeys(fixed, "constexpr")}, constexprs=dict(fixed))
    options = {"enable_fp_fusion": False, "num_warps": num_warps}  # as the launch says
    assembly = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "st.global" in assembly
    assert "fma" not in assembly
    assert "atom" not in assembly
