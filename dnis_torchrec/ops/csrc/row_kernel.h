// The innermost loops of soft selection, compiled once per instruction set, see levels.h. Nothing
// of the standard library here: a shared inline function compiled for one instruction set could be
// called on a machine without it.
//
// Every instruction set gives the same bits: one multiplication and at most one addition per
// number, never fused.

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

// Whether a number is NaN or infinite: then its exponent is all ones. Integers, because the order
// of a sum of floats must not change and so is not vectorised.
inline uint32_t is_bad(float number) { return (bits_of(number) & 0x7f800000u) == 0x7f800000u; }

inline uint64_t is_bad(double number) {
  return (bits_of(number) & 0x7ff0000000000000u) == 0x7ff0000000000000u;
}

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

// weight = the nearest of the values that codes stand for to weight + residual, residual = what it
// lacks of that, half a step at most: see dnis_torchrec/ops/select.py. Four fields follow one
// another, `count` numbers each.
inline void round_row(const float* fields, float* weight, float* residual, int64_t count) {
  constexpr float TO_INTEGERS =
      12'582'912.f;  // from 2^23 on floats are integers, so that adding it rounds, to even
  const float *scale = fields, *half_shift = fields + count, *largest = fields + 2 * count,
              *half_step = fields + 3 * count;
  for (int64_t d = 0; d < count; ++d) {
    const float latent = weight[d] + residual[d];
    float code = latent / scale[d] - half_shift[d];
    code = code < 0.f ? 0.f : code;
    code = code > largest[d] ? largest[d] : code;
    code = (code + TO_INTEGERS) - TO_INTEGERS;
    const float coded = scale[d] * code + scale[d] * half_shift[d];
    const float rounded = largest[d] == __builtin_inff() ? latent : coded;
    float lacking = latent - rounded;
    lacking = lacking < -half_step[d] ? -half_step[d] : lacking;
    lacking = lacking > half_step[d] ? half_step[d] : lacking;
    weight[d] = rounded;
    residual[d] = lacking;
  }
}

template <typename Number>
constexpr RowLoops<Number> LOOPS{
    multiply<Number>, add_product<Number>, multiply_finite<Number>, are_finite<Number>};
