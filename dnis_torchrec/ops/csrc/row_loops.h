// The innermost loops of soft selection, in the widest instruction set of this machine: a row of D
// numbers at a time. One library serves every machine, so that it may be built on another one.

#pragma once

#include <atomic>
#include <cstdint>

namespace dnis_torchrec {

template <typename Number>
struct RowLoops {
  void (*multiply)(const Number* left, const Number* right, Number* to, int64_t count);
  void (*add_product)(const Number* left, const Number* right, Number* to, int64_t count);
  bool (*multiply_finite)(const Number* left, const Number* right, Number* to, int64_t count);
  bool (*are_finite)(const Number* numbers, int64_t count);
};

using RoundRow = void (*)(const float* fields, float* weight, float* residual, int64_t count);

namespace baseline {
#include "row_kernel.h"
}  // namespace baseline

#if defined(__x86_64__) && !defined(DNIS_PORTABLE)
#define DNIS_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#include "row_kernel.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512vl")
#endif
namespace avx512 {
#include "row_kernel.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

enum class InstructionSet { BASELINE, AVX2, AVX512 };

// The widest instruction set of this machine, or up to `limit`.
inline InstructionSet widest_instruction_set(InstructionSet limit) {
#ifdef DNIS_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && limit == InstructionSet::AVX512) return InstructionSet::AVX512;
  if (has_avx2 && limit != InstructionSet::BASELINE) return InstructionSet::AVX2;
#endif
  return InstructionSet::BASELINE;
}

inline std::atomic<InstructionSet> instruction_set{widest_instruction_set(InstructionSet::AVX512)};

template <typename Number>
const RowLoops<Number>& row_loops() {
#ifdef DNIS_X86
  if (instruction_set == InstructionSet::AVX512) return avx512::LOOPS<Number>;
  if (instruction_set == InstructionSet::AVX2) return avx2::LOOPS<Number>;
#endif
  return baseline::LOOPS<Number>;
}

inline RoundRow row_rounding() {
#ifdef DNIS_X86
  if (instruction_set == InstructionSet::AVX512) return avx512::round_row;
  if (instruction_set == InstructionSet::AVX2) return avx2::round_row;
#endif
  return baseline::round_row;
}

}  // namespace dnis_torchrec
