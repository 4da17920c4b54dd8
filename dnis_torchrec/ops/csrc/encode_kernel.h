// Rows become bit fields, or what these stand for, compiled once per instruction set, see levels.h.
// Nothing of the standard library here: see packed_kernel.h.
//
// Every instruction set gives the bytes of blocks/codes.py: the same float32 operations in the same
// order, never fused. Sixteen rows of a block are encoded at a time, and stand column by column.

constexpr int64_t ROUNDED = LANES >> (2 - DNIS_LEVEL);  // rows in a register
typedef float Lanes __attribute__((vector_size(4 * ROUNDED)));
typedef int32_t Integers __attribute__((vector_size(4 * ROUNDED)));

inline Lanes load(const float* column) {
  Lanes lanes;
  __builtin_memcpy(&lanes, column, sizeof(lanes));
  return lanes;
}

// Rounds the columns in the order of their widths; a column's error moves those that follow.
inline void round_columns(const BlockCodes& codes, int64_t dim, float* columns) {
  constexpr float TO_INTEGERS =
      12'582'912.f;  // from 2^23 on floats are integers, so that adding it rounds, to even
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t c = codes.order[i], width = codes.bits[c];
    if (width == FLOAT_BITS) return;  // and so are all that follow
    const float scale = codes.scales[c], half_shift = static_cast<float>(codes.shifts[c]) / 2;
    const int64_t num_codes = int64_t{1} << (width < 16 ? width : 16);
    const Lanes least = {}, largest = least + static_cast<float>(num_codes - 1);
    const Lanes column = load(columns + c * LANES);
    Lanes code = column / scale - half_shift;
    code = code > least ? code : least;  // also where it is NaN
    code = code < largest ? code : largest;
    code = (code + TO_INTEGERS) - TO_INTEGERS;
    const Integers integers = __builtin_convertvector(code, Integers);
    __builtin_memcpy(columns + c * LANES, &integers, sizeof(integers));
    if (codes.feedback == nullptr) continue;
    const Lanes errors = column - (code + half_shift) * (width == 0 ? 0.f : scale);
    for (int64_t j = i + 1; j < dim; ++j) {
      float* later = columns + codes.order[j] * LANES;
      const Lanes moved = load(later) - codes.feedback[i * dim + j] * errors;
      __builtin_memcpy(later, &moved, sizeof(moved));
    }
  }
}

// Writes the fields of up to sixteen rows, which follow one another, 32 bits at a time.
inline void write_fields(
    const BlockCodes& codes, int64_t dim, const float* columns, int64_t count, uint8_t* out) {
  uint64_t fields[LANES] = {};
  int64_t num_bits = 0;
  const auto write = [&](int64_t num_bytes) {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      if (lane < count && num_bytes == 4) {
        __builtin_memcpy(out + lane * codes.stride, &fields[lane], 4);
      } else if (lane < count) {
        __builtin_memcpy(out + lane * codes.stride, &fields[lane], static_cast<size_t>(num_bytes));
      }
      fields[lane] >>= 32;
    }
    out += num_bytes;
  };
  for (int64_t c = 0; c < dim; ++c) {
    const int64_t width = codes.bits[c];
    if (width == 0) continue;
    if (width == FLOAT_BITS) num_bits = (num_bits + 7) / 8 * 8;
    uint32_t column[LANES];
    __builtin_memcpy(column, columns + c * LANES, sizeof(column));
    for (int64_t lane = 0; lane < LANES; ++lane)
      fields[lane] |= static_cast<uint64_t>(column[lane]) << num_bits;
    for (num_bits += width; num_bits >= 32; num_bits -= 32) write(4);
  }
  write((num_bits + 7) / 8);
}

// Writes what the codes of some rows stand for.
inline void write_values(const BlockCodes& codes, int64_t dim, const float* columns,
    const int64_t* rows, int64_t count, float* out) {
  for (int64_t c = 0; c < dim; ++c) {
    const float scale = codes.scales[c], half_shift = static_cast<float>(codes.shifts[c]) / 2;
    for (int64_t lane = 0; lane < count; ++lane) {
      int32_t code;
      __builtin_memcpy(&code, columns + c * LANES + lane, sizeof(code));
      const float value = scale * static_cast<float>(code) + scale * half_shift;
      out[rows[lane] * dim + c] = codes.bits[c] == 0            ? 0.f
                                  : codes.bits[c] == FLOAT_BITS ? columns[c * LANES + lane]
                                                                : value;
    }
  }
}

// Encodes up to sixteen rows of a block, to `fields` or else to `out`; `columns` is room for them.
// Returns whether they are finite.
inline bool encode(const BlockCodes& codes, int64_t dim, const float* values, const int64_t* rows,
    int64_t count, float* columns, uint8_t* fields, float* out) {
  uint32_t bad = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) {
    const float* row = values + rows[lane < count ? lane : 0] * dim;
    for (int64_t c = 0; c < dim; ++c) {
      uint32_t bits;
      __builtin_memcpy(&bits, row + c, sizeof(bits));
      bad |= (bits & 0x7f800000u) == 0x7f800000u;  // an exponent of all ones
      columns[c * LANES + lane] = codes.gains == nullptr ? row[c] : row[c] * codes.gains[c];
    }
  }
  if (bad != 0 || codes.stride == 0) return bad == 0;
  for (int64_t lane = 0; lane < count; lane += ROUNDED) round_columns(codes, dim, columns + lane);
  if (fields != nullptr) {
    write_fields(codes, dim, columns, count, fields);
  } else {
    write_values(codes, dim, columns, rows, count, out);
  }
  return true;
}
