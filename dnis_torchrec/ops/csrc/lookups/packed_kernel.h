// The lookup itself, compiled once per instruction set: packed_rows.cpp includes this file in a namespace and a target
// region of its own, with DNIS_LEVEL 0 (what the compiler may assume anyway), 1 (AVX2) or 2 (AVX-512 with VBMI).
// Nothing of the standard library here: a shared inline function compiled for one instruction set could be called on a
// machine without it.
//
// Every level gives the same bits: value = number * scale + bias, times the weight, added in the order of the ids and
// never fused. Whatever ids, offsets, directories and layouts hold, nothing outside the buffers is read or written.

// Which block a row of a record has, and how many rows of that block stand before it there. All words of the planes are
// counted, because where to end would be a guess.
template <int64_t num_planes>
inline int64_t rank_in_record(const uint8_t* planes, int64_t place, int64_t& block) {
  constexpr int64_t plane_bytes = rows_per_record(num_planes) / 8, words = plane_bytes / 8;
  uint64_t others[num_planes];
  for (int64_t p = 0; p < num_planes; ++p) {
    const uint64_t bit = planes[p * plane_bytes + place / 8] >> place % 8 & 1;
    block |= static_cast<int64_t>(bit << p);
    others[p] = bit - 1;
  }
  int64_t before = 0;
  for (int64_t word = 0; word < words; ++word) {
    const int64_t left = place - 64 * word;
    uint64_t same = left >= 64 ? ~uint64_t{0} : (uint64_t{1} << (left & 63)) - 1;
    same &= -static_cast<uint64_t>(left > 0);
    for (int64_t p = 0; p < num_planes; ++p) same &= read<uint64_t>(planes + p * plane_bytes, word) ^ others[p];
    before += __builtin_popcountll(same);
  }
  return before;
}

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
    position = static_cast<int64_t>(static_cast<uint64_t>(row) - read<uint64_t>(table.directory, block));
    return true;
  }
  const uint8_t* record = table.record_of(row);
  const uint8_t* planes = record + COUNT_BYTES * table.num_blocks;
  const int64_t place = row & (rows_per_record(table.num_planes) - 1);
  int64_t before;
  switch (table.num_planes) {
    case 1: before = rank_in_record<1>(planes, place, block); break;
    case 2: before = rank_in_record<2>(planes, place, block); break;
    case 3: before = rank_in_record<3>(planes, place, block); break;
    case 4: before = rank_in_record<4>(planes, place, block); break;
    case 5: before = rank_in_record<5>(planes, place, block); break;
    case 6: before = rank_in_record<6>(planes, place, block); break;
    case 7: before = rank_in_record<7>(planes, place, block); break;
    default: before = rank_in_record<8>(planes, place, block);
  }
  if (__builtin_expect(block >= table.num_blocks, 0)) return false;
  const uint64_t start = read<uint64_t>(table.directory, row / ROWS_PER_START * table.num_blocks + block);
  position = static_cast<int64_t>(start + read<uint16_t>(record, block) + static_cast<uint64_t>(before));
  return true;
}

#if DNIS_LEVEL == 2
// The bytes of a window that lie in the row; what is masked out is not read. Half a window where that is all there is:
// reading the other half waits for a cache line that nobody asked for, masked out or not.
inline __m512i bytes_of_window(const uint8_t* window, int64_t left) {
  if (left <= WINDOW_BYTES / 2) {
    const __mmask32 inside = static_cast<__mmask32>((uint64_t{1} << left) - 1);
    return _mm512_zextsi256_si512(_mm256_maskz_loadu_epi8(inside, window));
  }
  const __mmask64 inside = left >= WINDOW_BYTES ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
  return _mm512_maskz_loadu_epi8(inside, window);
}

// All 16 columns of a group: their bytes are taken out of a window of 64.
template <bool first>
inline void add_group(
    float* out, const uint8_t* window, int64_t left, const uint8_t*, const Group& group, float factor,
    int64_t columns) {
  const __m512i field = _mm512_permutexvar_epi8(_mm512_loadu_si512(group.wide), bytes_of_window(window, left));
  const __m512i mask = _mm512_loadu_si512(group.masks);
  const __m512 number = _mm512_cvtepi32_ps(_mm512_and_si512(field, mask));
  __m512 value = _mm512_add_ps(_mm512_mul_ps(number, _mm512_loadu_ps(group.scales)), _mm512_loadu_ps(group.biases));
  if (group.kind == Group::WITH_FLOATS) {
    const __mmask16 is_float = _mm512_cmpeq_epi32_mask(mask, _mm512_set1_epi32(-1));
    value = _mm512_mask_mov_ps(value, is_float, _mm512_castsi512_ps(field));
  }
  value = _mm512_mul_ps(value, _mm512_set1_ps(factor));
  if (columns >= LANES) {
    if constexpr (!first) value = _mm512_add_ps(_mm512_loadu_ps(out), value);
    _mm512_storeu_ps(out, value);
  } else {
    const __mmask16 lanes = static_cast<__mmask16>((1 << columns) - 1);
    if constexpr (!first) value = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out), value);
    _mm512_mask_storeu_ps(out, lanes, value);
  }
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

// out += weight * row, or = on the whole row where it is the first, so that nothing has to be zeroed before. False if
// the layout has fields beyond the row; then some of it was added.
template <bool first>
inline bool add_row(float* out, const Row& row, const uint8_t* end, int64_t embedding_dim) {
  const Group* group = row.block->groups;
  const int64_t stride = row.block->stride;
  for (int64_t column = 0; column < embedding_dim; column += LANES, ++group) {
    const int64_t columns = embedding_dim - column, left = stride - group->window;
    if (group->kind == Group::EMPTY) {
      if constexpr (first) {
        for (int64_t k = 0; k < LANES && k < columns; ++k) out[column + k] = 0.0f;
      }
      continue;
    }
    if (__builtin_expect(!group->is_within(stride), 0)) return false;
    add_group<first>(out + column, row.bytes + group->window, left, end, *group, row.weight, columns);
  }
  return true;
}

// Finds the row of id number `at`, and asks memory for it.
inline void find_row(Row& row, const Table& table, const Bags& bags, int64_t at, Fault& fault) {
  row = {};
  const int64_t id = bags.ids[at];
  if (__builtin_expect(id < 0 || id >= table.num_embeddings, 0)) {
    if (!bags.zero_unknown) fault.note(Fault::UNKNOWN_ID, at);
    return;
  }
  int64_t index, position;
  if (__builtin_expect(!locate(table, id, index, position), 0)) return fault.note(Fault::DIRECTORY, at);
  const Block& block = table.blocks[index];
  if (block.groups == nullptr) return;  // a row that retains nothing
  if (__builtin_expect(position < 0 || position >= block.num_rows, 0)) return fault.note(Fault::DIRECTORY, at);
  row = {block.rows + position * block.stride, &block, bags.weights != nullptr ? bags.weights[at] : 1.0f};
  for (int64_t byte = 0; byte < block.stride; byte += LINE) __builtin_prefetch(row.bytes + byte);
  // another cache line if the row straddles two, or half a window does; a number, because no byte need be there
  const uintptr_t end = reinterpret_cast<uintptr_t>(row.bytes) + block.stride + WINDOW_BYTES / 2;
  __builtin_prefetch(reinterpret_cast<const void*>(end - 1));
}

// Rows of ids ahead of the one that is added: each is found, and asked of memory, while earlier ones are added, and
// where it stands was asked of memory before.
struct RowsAhead {
  Row rows[WINDOW];
  int64_t next = 0;   // the id that is added next
  int64_t found = 0;  // one past the last id whose row was found

  const Row& row_of(int64_t at, int64_t last_id, const Table& table, const Bags& bags, Fault& fault) {
    if (__builtin_expect(at != next, 0)) found = at;
    next = at + 1;
    for (const int64_t end = at + WINDOW < last_id ? at + WINDOW : last_id; found < end; ++found) {
      if (table.kind == Directory::RANKS && found + WINDOW < bags.num_ids) {
        const int64_t id = bags.ids[found + WINDOW];
        if (id >= 0 && id < table.num_embeddings) table.prefetch(id);
      }
      find_row(rows[found % WINDOW], table, bags, found, fault);
    }
    return rows[at % WINDOW];
  }
};

// Pools bags [first_bag, last_bag) of one feature.
Fault pool(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  const int64_t first_offset = feature.key * bags.batch_size, dim = feature.embedding_dim;
  const int64_t last_id = bags.offsets[first_offset + last_bag];
  const Table& table = *feature.table;
  RowsAhead ahead;
  Fault fault;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    float* out = bags.out + bag * bags.width + feature.first_column;
    const int64_t begin = bags.offsets[first_offset + bag], end = bags.offsets[first_offset + bag + 1];
    const bool rising = begin >= 0 && begin <= end && end <= last_id && last_id <= bags.num_ids;
    if (__builtin_expect(!rising, 0)) fault.note(Fault::OFFSETS, first_offset + bag);
    if (bag + BAGS_AHEAD < last_bag) {  // bags of one feature lie pages apart, and stores wait in line for their pages
      for (int64_t d = 0; d < dim; d += LANES) __builtin_prefetch(out + BAGS_AHEAD * bags.width + d, 1);
    }
    bool is_first = true;
    for (int64_t i = begin; rising && i < end; ++i) {
      const Row& row = ahead.row_of(i, last_id, table, bags, fault);
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
