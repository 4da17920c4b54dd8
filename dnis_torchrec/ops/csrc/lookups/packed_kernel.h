// The lookup itself, compiled once per instruction set: packed_rows.cpp includes this file in a namespace and a target
// region of its own, with DNIS_LEVEL 0 (what the compiler may assume anyway), 1 (AVX2) or 2 (AVX-512 with VBMI).
// Nothing of the standard library here: a shared inline function compiled for one instruction set could be called on a
// machine without it.
//
// Every level gives the same bits: value = number * scale + bias, times the weight, added in the order of the ids, never
// fused. Whatever ids, offsets, directories and layouts hold, nothing outside the buffers is read or written.

// Where a row stands, or false if the directory makes no sense: which of the table's blocks, and which row of that.
inline bool locate(const Table& table, int64_t row, int64_t& block, int64_t& position) {
  block = 0;
  position = row;
  if (table.kind == Directory::NONE) return true;
  if (table.kind == Directory::SORTED) {
    for (int64_t left = table.num_blocks; left > 1;) {  // the last of the blocks that begin at the row or before
      const int64_t half = left / 2;
      if (read<int64_t>(table.directory, block + half) <= row) block += half;
      left -= half;
    }
    position = row - static_cast<int64_t>(read<uint64_t>(table.directory, block));
    return true;
  }
  const uint8_t* record = table.record_of(row);
  const uint8_t* planes = record + COUNT_BYTES * table.num_blocks;
  const int64_t plane_bytes = table.rows_per_record() / 8, place = row & (table.rows_per_record() - 1);
  const int64_t word = place / 64 * 8, bit = place % 64;
  uint64_t same = ~uint64_t{0};
  for (int64_t p = 0; p < table.num_planes; ++p) {
    const uint64_t own = read<uint64_t>(planes + p * plane_bytes + word, 0), value = own >> bit & 1;
    block |= static_cast<int64_t>(value) << p;
    same &= own ^ (value - 1);
  }
  if (__builtin_expect(block >= table.num_blocks, 0)) return false;
  uint64_t before = __builtin_popcountll(same & ((uint64_t{1} << bit) - 1));
  for (int64_t earlier = 0; earlier < word; earlier += 8) {
    same = ~uint64_t{0};
    for (int64_t p = 0; p < table.num_planes; ++p) {
      same &= read<uint64_t>(planes + p * plane_bytes + earlier, 0) ^ ((static_cast<uint64_t>(block) >> p & 1) - 1);
    }
    before += __builtin_popcountll(same);
  }
  const uint64_t start = read<uint64_t>(table.directory, row / ROWS_PER_START * table.num_blocks + block);
  position = static_cast<int64_t>(start + read<uint16_t>(record, block) + before);
  return true;
}

#if DNIS_LEVEL == 2
// Bytes of a window that lie in the row, from its beginning; what is masked out is not read.
inline __mmask64 inside_row(int64_t left) { return left >= WINDOW_BYTES ? ~__mmask64{0} : (__mmask64{1} << left) - 1; }

// All 16 columns of a group: their bytes are taken out of a window of 64.
template <bool first>
inline void add_group(
    float* out, const uint8_t* window, int64_t left, const uint8_t*, const Group& group, float factor, int64_t columns) {
  const __mmask16 lanes = static_cast<__mmask16>(columns >= LANES ? 0xffff : (1 << columns) - 1);
  const __m512i bytes = _mm512_maskz_loadu_epi8(inside_row(left), window);
  const __m512i field = _mm512_permutexvar_epi8(_mm512_loadu_si512(group.wide), bytes);
  const __m512i mask = _mm512_loadu_si512(group.masks);
  const __m512 number = _mm512_cvtepi32_ps(_mm512_and_si512(field, mask));
  __m512 value = _mm512_add_ps(_mm512_mul_ps(number, _mm512_loadu_ps(group.scales)), _mm512_loadu_ps(group.biases));
  if (group.kind == Group::WITH_FLOATS) {
    const __mmask16 is_float = _mm512_cmpeq_epi32_mask(mask, _mm512_set1_epi32(-1));
    value = _mm512_mask_mov_ps(value, is_float, _mm512_castsi512_ps(field));
  }
  value = _mm512_mul_ps(value, _mm512_set1_ps(factor));
  if constexpr (!first) value = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out), value);
  _mm512_mask_storeu_ps(out, lanes, value);
}
#else
// A window that may be read beyond its end: itself, or where the table ends there a copy.
inline const uint8_t* readable(const uint8_t* window, int64_t left, const uint8_t* end, uint8_t* copy) {
  if (__builtin_expect(end - window >= READABLE_BYTES, 1)) return window;
  __builtin_memset(copy, 0, READABLE_BYTES);
  __builtin_memcpy(copy, window, left < WINDOW_BYTES ? left : WINDOW_BYTES);
  return copy;
}

template <bool first>
inline void add_group(
    float* out, const uint8_t* window, int64_t left, const uint8_t* end, const Group& group, float factor,
    int64_t columns) {
  uint8_t copy[READABLE_BYTES];
  const uint8_t* bytes = readable(window, left, end, copy);
#if DNIS_LEVEL == 1
  // Eight columns at a time, four in each half: their bytes are taken out of a window of 16.
  for (int64_t column = 0; column < LANES && column < columns; column += 8) {
    const uint8_t* quads[2] = {bytes + group.quads[column / 4], bytes + group.quads[column / 4 + 1]};
    const __m256i halves = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quads[0]))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(quads[1])), 1);
    const __m256i shuffle = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.narrow + column));
    const __m256i mask = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.masks + column));
    const __m256i field = _mm256_shuffle_epi8(halves, shuffle);
    const __m256 number = _mm256_cvtepi32_ps(_mm256_and_si256(field, mask));
    const __m256 scales = _mm256_loadu_ps(group.scales + column), biases = _mm256_loadu_ps(group.biases + column);
    __m256 value = _mm256_add_ps(_mm256_mul_ps(number, scales), biases);
    if (group.kind == Group::WITH_FLOATS) {
      const __m256i is_float = _mm256_cmpeq_epi32(mask, _mm256_set1_epi32(-1));
      value = _mm256_blendv_ps(value, _mm256_castsi256_ps(field), _mm256_castsi256_ps(is_float));
    }
    value = _mm256_mul_ps(value, _mm256_set1_ps(factor));
    if (columns - column >= 8) {
      if constexpr (!first) value = _mm256_add_ps(_mm256_loadu_ps(out + column), value);
      _mm256_storeu_ps(out + column, value);
    } else {
      const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
      const __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(columns - column)), lane);
      if constexpr (!first) value = _mm256_add_ps(_mm256_maskload_ps(out + column, lanes), value);
      _mm256_maskstore_ps(out + column, lanes, value);
    }
  }
#else
  for (int64_t column = 0; column < LANES && column < columns; ++column) {
    const uint8_t* start = bytes + group.quads[column / 4] + (group.narrow[column] & (QUAD_BYTES - 1));
    const uint32_t field = read<uint32_t>(start, 0), mask = static_cast<uint32_t>(group.masks[column]);
    float value = static_cast<float>(static_cast<int32_t>(field & mask)) * group.scales[column] + group.biases[column];
    if (group.kind == Group::WITH_FLOATS && mask == ~uint32_t{0}) value = float_of_bits(field);
    value *= factor;
    out[column] = first ? value : out[column] + value;
  }
#endif
}
#endif

// out += factor * row, or = on the whole row where it is the first, so that nothing has to be zeroed before. False if the
// layout has fields beyond the row; then some of it was added.
template <bool first>
inline bool add_row(float* out, const Row& row, const uint8_t* end, int64_t embedding_dim) {
  const Group* group = row.block->groups;
  const int64_t stride = row.block->stride;
  for (int64_t column = 0; column < embedding_dim; column += LANES, ++group) {
    const int64_t columns = embedding_dim - column, left = stride - group->window;
    if (group->kind == Group::EMPTY) {
      if constexpr (first) __builtin_memset(out + column, 0, sizeof(float) * (columns < LANES ? columns : LANES));
      continue;
    }
    if (__builtin_expect(!group->is_within(stride), 0)) return false;
    add_group<first>(out + column, row.bytes + group->window, left, end, *group, row.weight, columns);
  }
  return true;
}

// Finds the rows of `count` ids from `first` on and asks memory for them, and for where the rows of later ids stand.
inline void find_rows(Row* rows, const Table& table, const Bags& bags, int64_t first, int64_t count, Fault& fault) {
  for (int64_t k = 0; k < count; ++k) {
    Row& row = rows[k];
    row = {};
    const int64_t id = bags.ids[first + k];
    if (__builtin_expect(id < 0 || id >= table.num_embeddings, 0)) {
      if (!bags.zero_unknown) fault.note(Fault::UNKNOWN_ID, first + k);
      continue;
    }
    int64_t index, position;
    const bool makes_sense = locate(table, id, index, position);
    const Block* block = makes_sense ? table.blocks + index : nullptr;
    if (makes_sense && block->groups == nullptr) continue;  // a row that retains nothing
    if (__builtin_expect(!makes_sense || position < 0 || position >= block->num_rows, 0)) {
      fault.note(Fault::DIRECTORY, first + k);
      continue;
    }
    row = {block->rows + position * block->stride, block, bags.weights != nullptr ? bags.weights[first + k] : 1.0f};
    for (int64_t byte = 0; byte < block->stride; byte += LINE) __builtin_prefetch(row.bytes + byte);
    __builtin_prefetch(row.bytes + block->stride - 1);  // another cache line if the row straddles two
  }
  if (table.kind != Directory::RANKS) return;
  for (int64_t k = first + count; k < first + count + WINDOW && k < bags.num_ids; ++k) {
    const int64_t id = bags.ids[k];
    if (id >= 0 && id < table.num_embeddings) table.prefetch(id);
  }
}

// Pools bags [first_bag, last_bag) of one feature.
Fault pool(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  const int64_t first_offset = feature.key * bags.batch_size, dim = feature.embedding_dim;
  const int64_t last_id = bags.offsets[first_offset + last_bag];
  const Table& table = *feature.table;
  Row rows[WINDOW];
  int64_t window_begin = 0, window_end = 0;
  Fault fault;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    float* out = bags.out + bag * bags.width + feature.first_column;
    const int64_t begin = bags.offsets[first_offset + bag], end = bags.offsets[first_offset + bag + 1];
    const bool rising = begin >= 0 && begin <= end && end <= last_id && last_id <= bags.num_ids;
    if (__builtin_expect(!rising, 0)) fault.note(Fault::OFFSETS, first_offset + bag);
    bool is_first = true;
    for (int64_t i = begin; rising && i < end; ++i) {
      if (i >= window_end || i < window_begin) {
        window_begin = i;
        window_end = i + WINDOW < last_id ? i + WINDOW : last_id;
        find_rows(rows, table, bags, window_begin, window_end - window_begin, fault);
      }
      const Row& row = rows[i - window_begin];
      if (row.bytes == nullptr) continue;
      const bool is_within =
          is_first ? add_row<true>(out, row, table.end, dim) : add_row<false>(out, row, table.end, dim);
      if (__builtin_expect(!is_within, 0)) fault.note(Fault::FIELDS, i);
      is_first = false;
    }
    if (is_first) __builtin_memset(out, 0, sizeof(float) * dim);
    if (feature.is_mean && rising && end - begin > 1) {
      const float length = static_cast<float>(end - begin);
      for (int64_t d = 0; d < dim; ++d) out[d] /= length;
    }
  }
  return fault;
}
