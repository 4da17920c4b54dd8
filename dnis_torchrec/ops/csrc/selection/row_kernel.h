// The innermost loops of soft selection, compiled once per instruction set: row_loops.h includes this file in a namespace
// and a target region of its own. Nothing of the standard library here: a shared inline function compiled for one
// instruction set could be called on a machine without it.
//
// Every instruction set gives the same bits: one multiplication and at most one addition per number, never fused.

inline uint32_t bits_of(float number) {
  uint32_t bits;
  __builtin_memcpy(&bits, &number, sizeof(bits));
  return bits;
}

inline uint64_t bits_of(double number) {
  uint64_t bits;
  __builtin_memcpy(&bits, &number, sizeof(bits));
  return bits;
}

// Whether a number is NaN or infinite: then its exponent is all ones. Integers, because the order of a sum of floats must
// not change and so is not vectorised.
inline uint32_t is_bad(float number) { return (bits_of(number) & 0x7f800000u) == 0x7f800000u; }

inline uint64_t is_bad(double number) { return (bits_of(number) & 0x7ff0000000000000u) == 0x7ff0000000000000u; }

// to = left * right; `to` may be `left`.
template <typename Number>
void multiply(const Number* left, const Number* right, Number* to, int64_t count) {
  for (int64_t d = 0; d < count; ++d) to[d] = left[d] * right[d];
}

// to += left * right.
template <typename Number>
void add_product(const Number* left, const Number* right, Number* to, int64_t count) {
  for (int64_t d = 0; d < count; ++d) to[d] += left[d] * right[d];
}

// to = left * right; whether `left` is finite throughout.
template <typename Number>
bool multiply_finite(const Number* left, const Number* right, Number* to, int64_t count) {
  decltype(is_bad(Number(0))) bad = 0;
  for (int64_t d = 0; d < count; ++d) {
    to[d] = left[d] * right[d];
    bad |= is_bad(left[d]);
  }
  return bad == 0;
}

template <typename Number>
bool are_finite(const Number* numbers, int64_t count) {
  decltype(is_bad(Number(0))) bad = 0;
  for (int64_t d = 0; d < count; ++d) bad |= is_bad(numbers[d]);
  return bad == 0;
}

template <typename Number>
constexpr RowLoops<Number> LOOPS{multiply<Number>, add_product<Number>, multiply_finite<Number>, are_finite<Number>};
