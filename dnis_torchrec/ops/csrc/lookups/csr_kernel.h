// The lookup itself, compiled once per instruction set: csr_embedding_bag.cpp includes this file in a namespace and a
// target region of its own, with DNIS_LEVEL 0 (what the compiler may assume anyway), 1 (AVX2, F16C) or 2 (AVX-512).
// Nothing of the standard library here: a shared inline function compiled for one instruction set could be called on a
// machine without it.
//
// Every level gives the same bits: one multiplication and one addition per value, in the order of the ids, never fused.
// Whatever ids, offsets and tables hold, nothing outside the buffers is read or written.

// Number k of an array that may begin at any byte.
template <typename Number>
inline Number read(const uint8_t* numbers, int64_t k) {
  Number number;
  __builtin_memcpy(&number, numbers + k * sizeof(Number), sizeof(Number));
  return number;
}

inline float as_float(float value) { return value; }

inline float as_float(int8_t value) { return static_cast<float>(value); }

inline float as_float(Half value) {
#if DNIS_LEVEL >= 1
  return _cvtsh_ss(value.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return float_of_bits(sign | (magnitude + 0x70000000u));  // infinity, NaN
  const float shifted = float_of_bits(magnitude) * 0x1p112f;  // exponent bias 15 -> 127; exact, subnormals too
  return sign != 0 ? -shifted : shifted;
#endif
}

#if DNIS_LEVEL >= 2
// Eight numbers of which some are masked out, from any byte on; what is masked out is not read.
template <typename Number>
inline auto load8(__mmask8 lanes, const uint8_t* numbers) {
  if constexpr (std::is_same_v<Number, float>) return _mm256_maskz_loadu_ps(lanes, numbers);
  if constexpr (std::is_same_v<Number, Half>) return _mm256_cvtph_ps(_mm_maskz_loadu_epi16(lanes, numbers));
  if constexpr (std::is_same_v<Number, int8_t>) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, numbers)));
  }
  if constexpr (std::is_same_v<Number, uint8_t>) return _mm256_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, numbers));
  if constexpr (std::is_same_v<Number, uint16_t>) return _mm256_cvtepu16_epi32(_mm_maskz_loadu_epi16(lanes, numbers));
}
#endif

// out[k] += factor * values[k], or = where out is known to be zero: a row, or part of one, on neighbouring columns.
template <bool first, typename Value>
inline void add_run(float* out, const uint8_t* values, int64_t length, float factor) {
  int64_t k = 0;
#if DNIS_LEVEL >= 1
  if constexpr (sizeof(Value) == sizeof(Half)) {  // compilers vectorise the other two by themselves
    for (; k + 8 <= length; k += 8) {
      const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + k * sizeof(Half))));
      __m256 sum = _mm256_mul_ps(wide, _mm256_set1_ps(factor));
      if constexpr (!first) sum = _mm256_add_ps(_mm256_loadu_ps(out + k), sum);
      _mm256_storeu_ps(out + k, sum);
    }
  }
#endif
  for (; k < length; ++k) {
    const float scaled = as_float(read<Value>(values, k)) * factor;
    out[k] = first ? scaled : out[k] + scaled;
  }
}

// out[columns[k]] += factor * values[k], or = where out is known to be zero, so that nothing waits for the zeros to
// arrive in memory. False if a column lies outside the row; then some of it was added.
template <bool first, typename Value, typename Column>
inline bool add_scattered(float* out, const Row& row, float factor, uint32_t embedding_dim) {
  const uint8_t* columns_of_row = row.values + row.length * sizeof(Value);
#if DNIS_LEVEL >= 2
  // Eight at a time and the rest masked out: how many columns a row retains cannot be predicted, and a branch that is
  // mispredicted costs more than all the values of a short row.
  for (int64_t k = 0; k < row.length; k += 8) {
    const int64_t left = row.length - k;
    const __mmask8 lanes = static_cast<__mmask8>(left >= 8 ? 0xff : (1 << left) - 1);
    const __m256i columns = load8<Column>(lanes, columns_of_row + k * sizeof(Column));
    const __mmask8 outside = _mm256_mask_cmpge_epu32_mask(lanes, columns, _mm256_set1_epi32(embedding_dim));
    if (__builtin_expect(outside != 0, 0)) return false;
    __m256 sum = _mm256_mul_ps(load8<Value>(lanes, row.values + k * sizeof(Value)), _mm256_set1_ps(factor));
    if constexpr (!first) {
      const __m256 before = _mm256_mmask_i32gather_ps(_mm256_setzero_ps(), lanes, columns, out, sizeof(float));
      sum = _mm256_add_ps(before, sum);
    }
    _mm256_mask_i32scatter_ps(out, lanes, columns, sum, sizeof(float));
  }
#else
  for (int64_t k = 0; k < row.length; ++k) {
    const uint32_t column = read<Column>(columns_of_row, k);
    if (__builtin_expect(column >= embedding_dim, 0)) return false;
    const float scaled = as_float(read<Value>(row.values, k)) * factor;
    out[column] = first ? scaled : out[column] + scaled;
  }
#endif
  return true;
}

template <bool first, typename Value, typename Column>
inline bool add_row(float* out, const Row& row, uint32_t embedding_dim) {
  float factor = row.weight;
  if constexpr (SCALE_BYTES<Value> > 0) {
    if (row.length == 0) return true;  // of an unknown id, too, which has no scale
    factor *= float_of_bits(static_cast<uint32_t>(read<uint16_t>(row.values - SCALE_BYTES<Value>, 0)) << 16);
  }
  if (row.length >= RUN_LENGTH) {
    const uint8_t* columns = row.values + row.length * sizeof(Value);
    const int64_t begin = read<Column>(columns, 0), last = read<Column>(columns, row.length - 1);
    if (last - begin + 1 == row.length && last < embedding_dim) {
      add_run<first, Value>(out + begin, row.values, row.length, factor);
      return true;
    }
  }
  return add_scattered<first, Value, Column>(out, row, factor, embedding_dim);
}

inline int64_t values_before_scalar(const uint8_t* record, int64_t count) {
  int64_t sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += record[START_BYTES + k];
  return sum;
}

// How many values the first `count` rows of a record have together; `is_whole`: all its bytes may be read.
inline int64_t values_before(const uint8_t* record, int64_t count, bool is_whole) {
#if DNIS_LEVEL >= 1
#if DNIS_LEVEL >= 2
  // In halves: a processor takes its time before it runs the first instructions on all 64 bytes at full speed. Bytes
  // that are masked out are not read.
  (void)is_whole;
  const uint64_t lanes = ((uint64_t{1} << count) - 1) << START_BYTES;
  const __m256i lower = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(lanes), record);
  const __m256i upper = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(lanes >> 32), record + 32);
#else
  if (__builtin_expect(!is_whole, 0)) return values_before_scalar(record, count);
  const __m256i place = _mm256_setr_epi8(
      127, 127, 127, 127, 127, 127, 127, 127, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26,
      27, 28, 29, 30, 31);  // the first eight bytes are the record's start, no lengths
  const __m256i next = _mm256_setr_epi8(
      32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59,
      60, 61, 62, 63);
  const __m256i end = _mm256_set1_epi8(static_cast<char>(START_BYTES + count));
  const __m256i* halves = reinterpret_cast<const __m256i*>(record);
  const __m256i lower = _mm256_and_si256(_mm256_loadu_si256(halves), _mm256_cmpgt_epi8(end, place));
  const __m256i upper = _mm256_and_si256(_mm256_loadu_si256(halves + 1), _mm256_cmpgt_epi8(end, next));
#endif
  const __m256i zero = _mm256_setzero_si256();
  const __m256i sums = _mm256_add_epi64(_mm256_sad_epu8(lower, zero), _mm256_sad_epu8(upper, zero));
  const __m128i halved = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return _mm_cvtsi128_si64(_mm_add_epi64(halved, _mm_unpackhi_epi64(halved, halved)));
#else
  (void)is_whole;
  return values_before_scalar(record, count);
#endif
}

// Where a row's values begin, and how many it has. False if that makes no sense; then nothing was set.
template <typename Value, typename Column>
inline bool find_values(const Shard& shard, int64_t row, const uint8_t*& values, int64_t& length) {
  int64_t first, count;
  if (shard.compact_pointers.data != nullptr) {
    const uint8_t* record = shard.compact_pointers.record_of(row);
    const int64_t place = row % ROWS_PER_RECORD;
    __builtin_memcpy(&first, record, sizeof(first));
    if (__builtin_expect(first < 0 || first > shard.num_bytes, 0)) return false;
    first += values_before(record, place, shard.compact_pointers.has_all_of(record));
    count = record[START_BYTES + place];
  } else {
    first = shard.row_pointers[row];
    const int64_t last = shard.row_pointers[row + 1];
    if (__builtin_expect(first < 0 || first > last || last > shard.num_bytes, 0)) return false;
    count = last - first;
  }
  constexpr int64_t entry_bytes = sizeof(Value) + sizeof(Column);
  const int64_t begin = first * entry_bytes + (row + 1) * SCALE_BYTES<Value>;
  if (__builtin_expect(begin + count * entry_bytes > shard.num_bytes, 0)) return false;
  values = shard.rows + begin;
  length = count;
  return true;
}

// Finds the rows of `count` ids from `first` on and asks memory for them: all the row pointers of a window are on their
// way before the first row is added. An id that is not in the table, or whose row pointers make no sense, gives an
// empty row and a fault.
template <typename Value, typename Column>
inline void find_rows(
    Row* rows, const Feature& feature, const Bags& bags, int64_t first, int64_t count, Fault& fault) {
  for (int64_t k = 0; k < count; ++k) {
    Row& row = rows[k];
    row = {};
    const int64_t id = bags.ids[first + k];
    if (__builtin_expect(id < 0 || id >= feature.num_embeddings, 0)) {
      if (!bags.zero_unknown) fault.note(Fault::UNKNOWN_ID, first + k);
      continue;
    }
    const Shard& shard = feature.shard_of(id);
    const bool makes_sense = find_values<Value, Column>(shard, id - shard.first_row, row.values, row.length);
    if (__builtin_expect(!makes_sense, 0)) {
      fault.note(Fault::ROW_POINTERS, first + k);
      continue;
    }
    row.weight = bags.weights != nullptr ? bags.weights[first + k] : 1.0f;
    const uint8_t* begin = row.values - SCALE_BYTES<Value>;
    __builtin_prefetch(begin);
    // another cache line if the row is long or straddles two; a number, because no byte need be there
    const uintptr_t end = reinterpret_cast<uintptr_t>(row.values) + row.length * (sizeof(Value) + sizeof(Column));
    __builtin_prefetch(reinterpret_cast<const void*>(end - 1));
  }
  for (int64_t k = first + count; k < first + count + WINDOW && k < bags.num_ids; ++k) feature.prefetch(bags.ids[k]);
}

template <typename Value, typename Column>
Fault pool_typed(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  const uint32_t embedding_dim = static_cast<uint32_t>(feature.embedding_dim);
  const int64_t first_offset = feature.key * bags.batch_size;
  const int64_t last_id = bags.offsets[first_offset + last_bag];
  Row rows[WINDOW];
  int64_t window_begin = 0, window_end = 0;
  Fault fault;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    float* out = bags.out + bag * bags.width + feature.first_column;
    for (uint32_t d = 0; d < embedding_dim; ++d) out[d] = 0.0f;
    const int64_t begin = bags.offsets[first_offset + bag], end = bags.offsets[first_offset + bag + 1];
    if (__builtin_expect(begin < 0 || begin > end || end > last_id || last_id > bags.num_ids, 0)) {
      fault.note(Fault::OFFSETS, first_offset + bag);
      continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (i >= window_end || i < window_begin) {
        window_begin = i;
        window_end = i + WINDOW < last_id ? i + WINDOW : last_id;
        find_rows<Value, Column>(rows, feature, bags, window_begin, window_end - window_begin, fault);
      }
      const Row& row = rows[i - window_begin];
      const bool inside = i == begin ? add_row<true, Value, Column>(out, row, embedding_dim)
                                     : add_row<false, Value, Column>(out, row, embedding_dim);
      if (__builtin_expect(!inside, 0)) fault.note(Fault::COLUMNS, i);
    }
    if (feature.is_mean && end - begin > 1) {
      const float length = static_cast<float>(end - begin);
      for (uint32_t d = 0; d < embedding_dim; ++d) out[d] /= length;
    }
  }
  return fault;
}

template <typename Value>
inline Fault pool_valued(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  return feature.has_wide_columns ? pool_typed<Value, uint16_t>(feature, bags, first_bag, last_bag)
                                         : pool_typed<Value, uint8_t>(feature, bags, first_bag, last_bag);
}

// Pools bags [first_bag, last_bag) of one feature.
Fault pool(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  switch (feature.kind) {
    case ValueKind::HALF:
      return pool_valued<Half>(feature, bags, first_bag, last_bag);
    case ValueKind::INT8:
      return pool_valued<int8_t>(feature, bags, first_bag, last_bag);
    default:
      return pool_valued<float>(feature, bags, first_bag, last_bag);
  }
}
