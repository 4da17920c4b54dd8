// Compiles DNIS_LOOPS, a file of inner loops, once for each instruction set, in a namespace and a
// target region of its own, with DNIS_LEVEL 0 (what the compiler may assume anyway), 1 (AVX2) or 2
// (AVX-512 with VBMI): one library serves every machine, so that it may be built on another one.
// Stands in a namespace without a name, because each library has a level of its own.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(DNIS_PORTABLE)
#define DNIS_X86 1
#endif
#define DNIS_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define DNIS_TARGET(features) \
  DNIS_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define DNIS_TARGET_END DNIS_PRAGMA(clang attribute pop)
#else
#define DNIS_TARGET(features) DNIS_PRAGMA(GCC push_options) DNIS_PRAGMA(GCC target(features))
#define DNIS_TARGET_END DNIS_PRAGMA(GCC pop_options)
#endif

namespace baseline {
#define DNIS_LEVEL 0
#include DNIS_LOOPS
#undef DNIS_LEVEL
}  // namespace baseline

#ifdef DNIS_X86
DNIS_TARGET("avx2,popcnt")
namespace avx2 {
#define DNIS_LEVEL 1
#include DNIS_LOOPS
#undef DNIS_LEVEL
}  // namespace avx2
DNIS_TARGET_END
DNIS_TARGET("popcnt,bmi2,avx512vl,avx512dq,avx512vbmi,avx512bitalg,avx512vpopcntdq")
namespace avx512 {
#define DNIS_LEVEL 2
#include DNIS_LOOPS
#undef DNIS_LEVEL
}  // namespace avx512
DNIS_TARGET_END
#endif

constexpr const char* LEVELS[] = {"baseline", "avx2", "avx512"};

// The widest instruction set of this machine, or up to `limit`: a place in LEVELS.
inline int widest_level(int limit) {
#ifdef DNIS_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2");  // a machine with AVX2 has POPCNT
  const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bitalg") &&
      __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("bmi2");
  return std::min(limit, has_avx512 ? 2 : has_avx2 ? 1 : 0);
#endif
  return 0;
}

std::atomic<int> level{widest_level(2)};

// What a name of DNIS_LOOPS stands for at the level that the library runs on.
#ifdef DNIS_X86
#define DNIS_WIDEST(name) (level == 2 ? avx512::name : level == 1 ? avx2::name : baseline::name)
#else
#define DNIS_WIDEST(name) baseline::name
#endif

// Which instruction set the loops run on, and, with a limit, from now on up to that one.
const char* limit_level(const char* limit) {
  for (int i = 0; limit != nullptr && i < 3; ++i)
    if (std::string(limit) == LEVELS[i]) level = widest_level(i);
  return LEVELS[level];
}
