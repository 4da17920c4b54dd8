// The lookup itself, compiled once per instruction set, see levels.h. Nothing of the standard
// library here: a shared inline function compiled for one instruction set could be called on a
// machine without it.
//
// Every level gives the same bits: value = number * scale + bias, times the weight if there is one,
// added to zero in the order of the ids, never fused. Whatever ids, offsets, directories and
// layouts hold, nothing outside the buffers is read or written.

#if DNIS_LEVEL == 2
inline __m128i load_16(const void* bytes) {
  return _mm_loadu_si128(static_cast<const __m128i*>(bytes));
}

// All bits set where a block's number lacks bit p, so that xor with plane p leaves the rows alike.
#define DNIS_OTHERS(block, p) {(block >> p & 1) - 1, (block >> p & 1) - 1}
#define DNIS_OTHERS_OF(block) \
  {DNIS_OTHERS(block, 0), DNIS_OTHERS(block, 1), DNIS_OTHERS(block, 2)}
constexpr int64_t OTHERS[8][3][2] = {DNIS_OTHERS_OF(0), DNIS_OTHERS_OF(1), DNIS_OTHERS_OF(2),
    DNIS_OTHERS_OF(3), DNIS_OTHERS_OF(4), DNIS_OTHERS_OF(5), DNIS_OTHERS_OF(6), DNIS_OTHERS_OF(7)};
#endif

// Which block a row of a record has, and how many rows of that block stand before it there. All
// words of the planes are counted, because where to end would be a guess.
template <int64_t num_planes>
inline int64_t rank_in_record(const uint8_t* planes, int64_t place, int64_t& block) {
  constexpr int64_t plane_bytes = rows_per_record(num_planes) / 8, words = plane_bytes / 8;
#if DNIS_LEVEL == 2
  if constexpr (words == 2) {  // then all planes lie in one register
    constexpr uint64_t first_bits = 0x100010001 & ((uint64_t{1} << 16 * num_planes) - 1);
    const __m512i record = _mm512_maskz_loadu_epi64((1 << words * num_planes) - 1, planes);
    const uint64_t bits = _cvtmask64_u64(
        _mm512_bitshuffle_epi64_mask(record, _mm512_set1_epi8(static_cast<char>(place & 63))));
    block = static_cast<int64_t>(_pext_u64(bits >> (place / 64 * 8), first_bits));
    const __m128i one = _mm_set1_epi64x(1),
                  left = _mm_subs_epu16(_mm_set1_epi64x(place), _mm_set_epi64x(64, 0));
    __m128i same = _mm_sub_epi64(_mm_sllv_epi64(one, left), one);
    for (int64_t p = 0; p < num_planes; ++p) {
      const __m128i plane = load_16(planes + 16 * p), others = load_16(OTHERS[block][p]);
      same = _mm_ternarylogic_epi64(same, plane, others, 0x60);  // same and (plane xor others)
    }
    const __m128i counts = _mm_popcnt_epi64(same);
    return _mm_cvtsi128_si64(counts) + _mm_extract_epi64(counts, 1);
  }
#endif
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
    for (int64_t p = 0; p < num_planes; ++p)
      same &= read<uint64_t>(planes + p * plane_bytes, word) ^ others[p];
    before += __builtin_popcountll(same);
  }
  return before;
}

// How many stored rows stand before a row, by a sparse directory; -1 if it is not stored itself, or
// else the directory makes no sense.
inline int64_t rank_of_stored(const Table& table, int64_t row, bool& is_sound) {
  const uint8_t* record = table.sets + row / ROWS_PER_SET * SET_BYTES;
  const int64_t group = row / 8 % 128, word = group / 64;
  const uint64_t bits = read<uint64_t>(record + 8, word), bit = uint64_t{1} << group % 64;
  if ((bits & bit) == 0) return -1;
  int64_t before = __builtin_popcountll(bits & (bit - 1));
  if (word > 0) before += __builtin_popcountll(read<uint64_t>(record + 8, 0));
  const int64_t first = read<uint32_t>(record, 1);
  is_sound = first + before < table.num_groups;
  if (!is_sound) return -1;
  const uint8_t* groups = table.groups + first;
  const uint64_t byte = groups[before], row_bit = uint64_t{1} << row % 8;
  if ((byte & row_bit) == 0) return -1;
  int64_t rank = read<uint32_t>(record, 0) + __builtin_popcountll(byte & (row_bit - 1));
  for (; before >= 8; before -= 8, groups += 8)
    rank += __builtin_popcountll(read<uint64_t>(groups, 0));
  rank += __builtin_popcountll(read<uint64_t>(groups, 0) & ((uint64_t{1} << 8 * before) - 1));
  is_sound = rank < table.num_ranked;
  return is_sound ? rank : -1;
}

// Where a row stands, or false if the directory makes no sense: which of the table's blocks, and
// which row of that.
template <Directory kind, int64_t num_planes>
inline bool locate(const Table& table, int64_t row, int64_t& block, int64_t& position) {
  block = 0;
  position = row;
  if constexpr (kind == Directory::SORTED) {
    for (int64_t left = table.num_blocks;
        left > 1;) {  // the last of the blocks that begin at the row or before
      const int64_t half = left / 2;
      if (read<int64_t>(table.directory, block + half) <= row) block += half;
      left -= half;
    }
    position =
        static_cast<int64_t>(static_cast<uint64_t>(row) - read<uint64_t>(table.directory, block));
  }
  if constexpr (kind == Directory::SPARSE) {
    bool is_sound = true;
    position = rank_of_stored(table, row, is_sound);
    if (position < 0) block = table.num_blocks - 1;  // that of rows of which nothing is stored
    if (position < 0) return is_sound;
    row = position;
  }
  if constexpr (num_planes > 0) {
    const uint8_t* record =
        table.records + (row >> log_rows_per_record(num_planes)) * table.record_bytes;
    const uint8_t* planes = record + COUNT_BYTES * table.ranked_blocks;
    const int64_t place = row & (rows_per_record(num_planes) - 1);
    const int64_t before = rank_in_record<num_planes>(planes, place, block);
    if (__builtin_expect(block >= table.ranked_blocks, 0)) return false;
    const uint64_t start =
        read<uint64_t>(table.directory, (row >> 16) * table.ranked_blocks + block);
    position =
        static_cast<int64_t>(start + read<uint16_t>(record, block) + static_cast<uint64_t>(before));
  }
  return true;
}

#if DNIS_LEVEL == 2
constexpr int64_t PLAIN_BYTES = FEW_BYTES;  // that reading a plain window may touch
using Sums = __m512;  // of the 16 columns of a group

inline Sums no_sums() { return _mm512_setzero_ps(); }

inline __mmask16 lanes_of(int64_t columns) {
  return static_cast<__mmask16>(columns >= LANES ? 0xffff : (1 << columns) - 1);
}

inline Sums load_sums(const float* out, int64_t columns) {
  return _mm512_maskz_loadu_ps(lanes_of(columns), out);
}

inline void store_sums(float* out, int64_t columns, Sums sums) {
  if (columns >= LANES) return _mm512_storeu_ps(out, sums);
  _mm512_mask_storeu_ps(out, lanes_of(columns), sums);
}

inline bool is_within(const Group& group, int64_t stride) {
  return static_cast<uint64_t>(group.window) <=
         static_cast<uint64_t>(stride);  // a number below 0 is a large one
}

// The bytes of a window that lie in the row; what is masked out is not read. Half a window where
// that is all there is: reading the other half waits for a cache line that nobody asked for, masked
// out or not.
inline __m512i bytes_of_window(const uint8_t* window, int64_t left) {
  if (left <= WINDOW_BYTES / 2) {
    const __mmask32 inside = static_cast<__mmask32>((uint64_t{1} << left) - 1);
    return _mm512_zextsi256_si512(_mm256_maskz_loadu_epi8(inside, window));
  }
  const __mmask64 inside = left >= WINDOW_BYTES ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
  return _mm512_maskz_loadu_epi8(inside, window);
}

// All 16 columns of a group: their bytes are taken out of a window of 64, or if it is plain of 16.
template <bool is_weighted, bool is_plain>
inline void add_group(Sums& sums, const uint8_t* window, int64_t left, const uint8_t* end,
    const Group& group, float weight) {
  __m512i bytes;
  if (is_plain || (group.span <= FEW_BYTES && end - window >= FEW_BYTES)) {
    bytes = _mm512_zextsi128_si512(load_16(window));
  } else {
    bytes = bytes_of_window(window, left);
  }
  const __m512i field = _mm512_permutexvar_epi8(_mm512_loadu_si512(group.wide), bytes);
  const __m512i mask = _mm512_loadu_si512(group.masks);
  const __m512 number = _mm512_cvtepi32_ps(_mm512_and_si512(field, mask));
  __m512 value = _mm512_add_ps(
      _mm512_mul_ps(number, _mm512_loadu_ps(group.scales)), _mm512_loadu_ps(group.biases));
  if (!is_plain && group.kind == Group::WITH_FLOATS) {
    const __mmask16 is_float = _mm512_cmpeq_epi32_mask(mask, _mm512_set1_epi32(-1));
    value = _mm512_mask_mov_ps(value, is_float, _mm512_castsi512_ps(field));
  }
  if constexpr (is_weighted) value = _mm512_mul_ps(value, _mm512_set1_ps(weight));
  sums = _mm512_add_ps(sums, value);
}
#else
constexpr int64_t PLAIN_BYTES = READABLE_BYTES;

inline bool is_within(const Group& group, int64_t stride) {
  uint32_t furthest = 0;
  for (const int32_t quad : group.quads) furthest |= static_cast<uint32_t>(quad);
  return group.window >= 0 && group.window <= stride && furthest < WINDOW_BYTES;
}

// A window that may be read beyond its end: itself, or where the table ends there a copy.
inline const uint8_t* readable(
    const uint8_t* window, int64_t left, const uint8_t* end, uint8_t* copy) {
  if (__builtin_expect(end - window >= READABLE_BYTES, 1)) return window;
  __builtin_memset(copy, 0, READABLE_BYTES);
  __builtin_memcpy(copy, window, left < WINDOW_BYTES ? left : WINDOW_BYTES);
  return copy;
}

#if DNIS_LEVEL == 1
struct Sums {  // of the 16 columns of a group
  __m256 halves[2];
};

inline Sums no_sums() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }

inline __m256i lanes_of(int64_t columns) {
  const int32_t count = columns >= 8 ? 8 : columns < 0 ? 0 : static_cast<int32_t>(columns);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Sums load_sums(const float* out, int64_t columns) {
  return {{_mm256_maskload_ps(out, lanes_of(columns)),
      _mm256_maskload_ps(out + 8, lanes_of(columns - 8))}};
}

inline void store_sums(float* out, int64_t columns, const Sums& sums) {
  for (int64_t half = 0; half < 2; ++half, out += 8, columns -= 8) {
    if (columns >= 8) {
      _mm256_storeu_ps(out, sums.halves[half]);
    } else if (columns > 0) {
      _mm256_maskstore_ps(out, lanes_of(columns), sums.halves[half]);
    }
  }
}

// Eight columns at a time, four in each half of a register: their bytes are taken out of a window
// of 16.
template <bool is_weighted, bool is_plain>
inline void add_group(Sums& sums, const uint8_t* window, int64_t left, const uint8_t* end,
    const Group& group, float weight) {
  uint8_t copy[READABLE_BYTES];
  const uint8_t* bytes = is_plain ? window : readable(window, left, end, copy);
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t column = 8 * half;
    const uint8_t* quads[2] = {bytes + group.quads[2 * half], bytes + group.quads[2 * half + 1]};
    const __m256i both = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quads[0]))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(quads[1])), 1);
    const __m256i shuffle =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.narrow + column));
    const __m256i mask = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.masks + column));
    const __m256i field = _mm256_shuffle_epi8(both, shuffle);
    const __m256 number = _mm256_cvtepi32_ps(_mm256_and_si256(field, mask));
    const __m256 scales = _mm256_loadu_ps(group.scales + column),
                 biases = _mm256_loadu_ps(group.biases + column);
    __m256 value = _mm256_add_ps(_mm256_mul_ps(number, scales), biases);
    if (!is_plain && group.kind == Group::WITH_FLOATS) {
      const __m256i is_float = _mm256_cmpeq_epi32(mask, _mm256_set1_epi32(-1));
      value = _mm256_blendv_ps(value, _mm256_castsi256_ps(field), _mm256_castsi256_ps(is_float));
    }
    if constexpr (is_weighted) value = _mm256_mul_ps(value, _mm256_set1_ps(weight));
    sums.halves[half] = _mm256_add_ps(sums.halves[half], value);
  }
}
#else
struct Sums {  // of the 16 columns of a group
  float columns[LANES];
};

inline Sums no_sums() { return {}; }

inline Sums load_sums(const float* out, int64_t columns) {
  Sums sums{};
  __builtin_memcpy(sums.columns, out, sizeof(float) * (columns < LANES ? columns : LANES));
  return sums;
}

inline void store_sums(float* out, int64_t columns, const Sums& sums) {
  __builtin_memcpy(out, sums.columns, sizeof(float) * (columns < LANES ? columns : LANES));
}

template <bool is_weighted, bool is_plain>
inline void add_group(Sums& sums, const uint8_t* window, int64_t left, const uint8_t* end,
    const Group& group, float weight) {
  uint8_t copy[READABLE_BYTES];
  const uint8_t* bytes = is_plain ? window : readable(window, left, end, copy);
  for (int64_t column = 0; column < LANES; ++column) {
    const uint8_t* start =
        bytes + group.quads[column / 4] + (group.narrow[column] & (QUAD_BYTES - 1));
    const uint32_t field = read<uint32_t>(start, 0),
                   mask = static_cast<uint32_t>(group.masks[column]);
    float value = static_cast<float>(static_cast<int32_t>(field & mask)) * group.scales[column] +
                  group.biases[column];
    if (!is_plain && group.kind == Group::WITH_FLOATS && mask == ~uint32_t{0})
      value = float_of_bits(field);
    sums.columns[column] += is_weighted ? value * weight : value;
  }
}
#endif
#endif

// Whether fields of all groups lie within the row, in few bytes, and none is a float32.
inline bool are_plain(const Block& block, int64_t num_groups) {
  for (int64_t g = 0; g < num_groups; ++g) {
    const Group& group = block.groups[g];
    if (!is_within(group, block.stride) || group.span > FEW_BYTES ||
        group.kind == Group::WITH_FLOATS)
      return false;
  }
  return true;
}

// What is known of the groups of a table's first blocks.
struct Looks {
  enum Look : uint8_t { NONE, PLAIN, OTHER };
  static constexpr int64_t MOST = 256;
  uint8_t of_block[MOST] = {};
  int64_t num_groups;

  bool is_plain(const Block& block, int64_t index) {
    if (index >= MOST) return false;
    if (__builtin_expect(of_block[index] == NONE, 0))
      of_block[index] = are_plain(block, num_groups) ? PLAIN : OTHER;
    return of_block[index] == PLAIN;
  }
};

#if DNIS_LEVEL == 2
// The blocks of a table that has eight at most, one a lane; others are blocks of no row.
struct LanesOfBlocks {
  static constexpr int64_t NUM_LANES = 8;
  __m512i rows, groups, num_rows, strides;
  __m512i lasts;   // of the rows whose groups are plain, and whose windows the table holds
  __mmask8 empty;  // blocks of which nothing is stored
  int64_t widest = -1;

  void set(const Table& table, int64_t num_groups) {
    alignas(64) int64_t fields[5][NUM_LANES] = {};
    empty = 0, widest = 0;
    for (int64_t s = 0; s < table.num_blocks; ++s) {
      const Block& block = table.blocks[s];
      fields[0][s] = reinterpret_cast<int64_t>(block.rows);
      fields[1][s] = reinterpret_cast<int64_t>(block.groups);
      fields[2][s] = block.num_rows;
      fields[3][s] = block.stride;
      if (block.groups == nullptr) {
        empty |= static_cast<__mmask8>(1 << s);
        continue;
      }
      if (are_plain(block, num_groups))
        fields[4][s] = reinterpret_cast<int64_t>(table.end) - block.stride - PLAIN_BYTES;
      if (block.stride > widest) widest = block.stride;
    }
    rows = _mm512_load_si512(fields[0]);
    groups = _mm512_load_si512(fields[1]);
    num_rows = _mm512_load_si512(fields[2]);
    strides = _mm512_load_si512(fields[3]);
    lasts = _mm512_load_si512(fields[4]);
  }
};

// The first eight lanes, or as many as are left.
inline __mmask8 lanes_left(int64_t left) {
  return static_cast<__mmask8>(left >= 8 ? 0xff : (1 << left) - 1);
}

// Where the records of rows lie.
template <int64_t num_planes>
inline __m512i record_of(const Table& table, __m512i row) {
  const __m512i first = _mm512_set1_epi64(reinterpret_cast<int64_t>(table.records)),
                number = _mm512_srli_epi64(row, log_rows_per_record(num_planes));
  return _mm512_add_epi64(
      first, _mm512_mullo_epi64(number, _mm512_set1_epi64(table.record_bytes)));
}

// Eight ids from number `at` on; 0 behind `last`.
inline __m512i load_ids(const Integers& ids, int64_t at, int64_t last) {
  const __mmask8 lanes = lanes_left(last - at);
  if (ids.is_wide)
    return _mm512_maskz_loadu_epi64(lanes, static_cast<const int64_t*>(ids.data) + at);
  return _mm512_cvtepi32_epi64(
      _mm256_maskz_loadu_epi32(lanes, static_cast<const int32_t*>(ids.data) + at));
}
#endif

// Asks memory for the other cache line of a row or a window that straddles two; a number, because
// no byte need be there.
inline void ask_for_end(const uint8_t* bytes, int64_t stride) {
  const uintptr_t last = (stride < FEW_BYTES ? FEW_BYTES : stride) - 1;
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(bytes) + last));
}

// Rows of ids that are added next. All of them are found, and asked of memory, before the first is
// added: a loop that does nothing else waits for many at once. Where the ids behind them stand was
// asked of memory by then.
struct RowsAhead {
  const uint8_t* bytes[WINDOW];  // null where nothing is stored
  const Group* groups[WINDOW];
  int64_t strides[WINDOW];
  uint64_t plain = 0;  // a bit a row: its groups are, and the table holds their windows
  int64_t first = 0, last = 0;  // the ids
  Looks looks;
#if DNIS_LEVEL == 2
  LanesOfBlocks lanes;
#endif

  bool has(int64_t at) const { return at >= first && at < last; }

  void find(int64_t begin, int64_t last_id, const Table& table, const Bags& bags, Fault& fault) {
    first = begin;
    last = last_id - begin < WINDOW ? last_id : begin + WINDOW;
    if (table.kind == Directory::NONE)
      return find_by<Directory::NONE, 0>(last_id, table, bags, fault);
    if (table.kind == Directory::SORTED)
      return find_by<Directory::SORTED, 0>(last_id, table, bags, fault);
    if (table.kind == Directory::RANKS)
      return find_by_planes<Directory::RANKS>(last_id, table, bags, fault);
    find_by_planes<Directory::SPARSE>(last_id, table, bags, fault);
  }

  template <Directory kind, int64_t num_planes = 8>
  void find_by_planes(int64_t last_id, const Table& table, const Bags& bags, Fault& fault) {
    if constexpr (num_planes > 0) {
      if (table.num_planes < num_planes)
        return find_by_planes<kind, num_planes - 1>(last_id, table, bags, fault);
    }
    find_by<kind, num_planes>(last_id, table, bags, fault);
  }

  template <Directory kind, int64_t num_planes>
  void find_by(int64_t last_id, const Table& table, const Bags& bags, Fault& fault) {
#if DNIS_LEVEL == 2
    if constexpr (kind == Directory::RANKS && num_planes > 0 && num_planes <= 3) {
      const bool fills_lanes = last - first >= LanesOfBlocks::NUM_LANES;
      if (fills_lanes && find_in_lanes<num_planes>(last_id, table, bags)) return;
    }
#endif
    plain = 0;
    for (int64_t at = first; at < last; ++at) {
      if (kind >= Directory::RANKS && at + WINDOW < last_id) table.prefetch(bags.ids[at + WINDOW]);
      find_row<kind, num_planes>(table, bags, at, fault);
    }
  }

  // Finds the row of id number `at`, and asks memory for it.
  template <Directory kind, int64_t num_planes>
  void find_row(const Table& table, const Bags& bags, int64_t at, Fault& fault) {
    const int64_t i = at - first;
    bytes[i] = nullptr;
    const int64_t id = bags.ids[at];
    if (__builtin_expect(id < 0 || id >= table.num_embeddings, 0)) {
      if (!bags.zero_unknown) fault.note(Fault::UNKNOWN_ID, at);
      return;
    }
    int64_t index, position;
    const bool is_found = locate<kind, num_planes>(table, id, index, position);
    if (__builtin_expect(!is_found, 0)) return fault.note(Fault::DIRECTORY, at);
    const Block& block = table.blocks[index];
    if (block.groups == nullptr) return;  // a row that retains nothing
    if (__builtin_expect(position < 0 || position >= block.num_rows, 0))
      return fault.note(Fault::DIRECTORY, at);
    bytes[i] = block.rows + position * block.stride;
    groups[i] = block.groups;
    strides[i] = block.stride;
    const bool is_plain =
        table.end - bytes[i] >= block.stride + PLAIN_BYTES && looks.is_plain(block, index);
    plain |= static_cast<uint64_t>(is_plain) << i;
    for (int64_t byte = 0; byte < block.stride; byte += LINE) __builtin_prefetch(bytes[i] + byte);
    ask_for_end(bytes[i], block.stride);
  }

#if DNIS_LEVEL == 2
  // The same for all ids, eight at a time where they do not wait for memory. False if one of them
  // has no row: then nothing is found, and the way above tells which.
  template <int64_t num_planes>
  bool find_in_lanes(int64_t last_id, const Table& table, const Bags& bags) {
    constexpr int64_t step = LanesOfBlocks::NUM_LANES;
    const int64_t num_ids = last - first,
                  num_ahead = last_id - last < WINDOW ? last_id - last : WINDOW;
    alignas(64) int64_t records[WINDOW], ids[WINDOW], positions[WINDOW], blocks[WINDOW];
    const __m512i num_embeddings = _mm512_set1_epi64(table.num_embeddings);
    __mmask8 bad = 0;
    for (int64_t i = 0; i < num_ids; i += step) {
      const __m512i id = load_ids(bags.ids, first + i, last);
      bad |= _mm512_cmpge_epu64_mask(id, num_embeddings);
      _mm512_store_si512(ids + i, id);
      _mm512_store_si512(records + i, record_of<num_planes>(table, id));
    }
    if (__builtin_expect(bad != 0, 0)) return false;
    if (lanes.widest < 0) lanes.set(table, looks.num_groups);
    for (int64_t i = 0; i < num_ids; ++i) {
      const uint8_t* record = reinterpret_cast<const uint8_t*>(records[i]);
      int64_t block = 0;
      const int64_t rank = rank_in_record<num_planes>(record + COUNT_BYTES * table.ranked_blocks,
          ids[i] & (rows_per_record(num_planes) - 1), block);
      // of a block that does not exist something else is read here, and refused below
      const uint64_t start =
          read<uint64_t>(table.directory, (ids[i] >> 16) * table.ranked_blocks + block);
      positions[i] = static_cast<int64_t>(
          start + read<uint16_t>(record, block) + static_cast<uint64_t>(rank));
      blocks[i] = block;
    }
    plain = 0;
    for (int64_t i = 0; i < num_ids; i += step) {
      const __m512i block = _mm512_load_si512(blocks + i),
                    position = _mm512_load_si512(positions + i);
      const __m512i stride = _mm512_permutexvar_epi64(block, lanes.strides);
      const __m512i row = _mm512_add_epi64(
          _mm512_permutexvar_epi64(block, lanes.rows), _mm512_mullo_epi64(position, stride));
      const __mmask8 is_empty = _mm512_test_epi64_mask(
          _mm512_sllv_epi64(_mm512_set1_epi64(1), block), _mm512_set1_epi64(lanes.empty));
      bad |= lanes_left(num_ids - i) & ~is_empty &
             _mm512_cmpge_epu64_mask(position, _mm512_permutexvar_epi64(block, lanes.num_rows));
      const __mmask8 is_plain =
          _mm512_cmple_epu64_mask(row, _mm512_permutexvar_epi64(block, lanes.lasts));
      plain |= static_cast<uint64_t>(is_plain) << i;
      _mm512_storeu_si512(bytes + i, _mm512_maskz_mov_epi64(static_cast<__mmask8>(~is_empty), row));
      _mm512_storeu_si512(groups + i, _mm512_permutexvar_epi64(block, lanes.groups));
      _mm512_storeu_si512(strides + i, stride);
    }
    if (__builtin_expect(bad != 0, 0)) return false;
    for (int64_t i = 0; i < num_ids; ++i) {
      for (int64_t byte = 0; byte < lanes.widest; byte += LINE) __builtin_prefetch(bytes[i] + byte);
      ask_for_end(bytes[i], strides[i]);
    }
    for (int64_t i = 0; i < num_ahead; i += step) {
      const __m512i id = load_ids(bags.ids, last + i, last + num_ahead);
      const __mmask8 is_row = _mm512_cmplt_epu64_mask(id, num_embeddings);
      const __m512i record = record_of<num_planes>(table, id);
      _mm512_store_si512(records + i, _mm512_maskz_mov_epi64(is_row, record));
    }
    for (int64_t i = 0; i < num_ahead; ++i)
      __builtin_prefetch(reinterpret_cast<const void*>(records[i]));
    return true;
  }
#endif
};

// Adds the rows of ids [first, last) to some groups of columns of the output, which stay in
// registers meanwhile. Groups without a column add zeros: asking whether there is one costs more,
// as rows differ in that.
template <bool is_weighted, int64_t num_groups>
inline void add_rows(float* out, int64_t columns, int64_t first_group, bool is_begun,
    const RowsAhead& rows, int64_t first, int64_t last, const float* weights, const uint8_t* end,
    Fault& fault) {
  Sums sums[num_groups];
#pragma GCC unroll 4
  for (int64_t g = 0; g < num_groups; ++g) {
    sums[g] = is_begun ? load_sums(out + LANES * g, columns - LANES * g) : no_sums();
  }
  for (int64_t i = first; i < last; ++i) {
    const int64_t at = i - rows.first;
    const uint8_t* bytes = rows.bytes[at];
    if (bytes == nullptr) continue;
    const Group* groups = rows.groups[at] + first_group;
    const float weight = is_weighted ? weights[i] : 1.0f;
    if (rows.plain >> at & 1) {
#pragma GCC unroll 4
      for (int64_t g = 0; g < num_groups; ++g)
        add_group<is_weighted, true>(
            sums[g], bytes + groups[g].window, 0, end, groups[g], weight);
      continue;
    }
#pragma GCC unroll 4
    for (int64_t g = 0; g < num_groups; ++g) {
      if (__builtin_expect(!is_within(groups[g], rows.strides[at]), 0)) {
        fault.note(Fault::FIELDS, i);
        continue;
      }
      const int64_t window = groups[g].window;
      add_group<is_weighted, false>(
          sums[g], bytes + window, rows.strides[at] - window, end, groups[g], weight);
    }
  }
#pragma GCC unroll 4
  for (int64_t g = 0; g < num_groups; ++g)
    store_sums(out + LANES * g, columns - LANES * g, sums[g]);
}

template <bool is_weighted, int64_t num_groups>
Fault pool_bags(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  const int64_t first_offset = feature.key * bags.batch_size, dim = feature.embedding_dim;
  const int64_t last_id = bags.offsets[first_offset + last_bag];
  const Table& table = *feature.table;
  RowsAhead rows;
  rows.looks.num_groups = (dim + LANES - 1) / LANES;
  Fault fault;
  int64_t end = bags.offsets[first_offset + first_bag];
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    float* out = bags.out + bag * bags.width + feature.first_column;
    const int64_t begin = end;
    end = bags.offsets[first_offset + bag + 1];
    const bool rising = begin >= 0 && begin <= end && end <= last_id && last_id <= bags.num_ids;
    if (__builtin_expect(!rising, 0)) fault.note(Fault::OFFSETS, first_offset + bag);
    if (bag + BAGS_AHEAD <
        last_bag) {  // bags of one feature lie pages apart, and stores wait in line for their pages
      for (int64_t d = 0; d < dim; d += LANES)
        __builtin_prefetch(out + BAGS_AHEAD * bags.width + d, 1);
    }
    if (!rising || begin == end) __builtin_memset(out, 0, sizeof(float) * dim);
    for (int64_t first = begin, last; rising && first < end; first = last) {
      if (!rows.has(first)) rows.find(first, last_id, table, bags, fault);
      last = end < rows.last ? end : rows.last;
      for (int64_t d = 0; d < dim; d += LANES * num_groups) {
        add_rows<is_weighted, num_groups>(
            out + d, dim - d, d / LANES, first > begin, rows, first, last, bags.weights,
            table.end, fault);
      }
    }
    if (feature.is_mean && rising && end - begin > 1) {
      const float length = static_cast<float>(end - begin);
      for (int64_t d = 0; d < dim; ++d) out[d] /= length;
    }
  }
  return fault;
}

template <int64_t num_groups>
Fault pool_groups(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  return bags.weights != nullptr ? pool_bags<true, num_groups>(feature, bags, first_bag, last_bag)
                                 : pool_bags<false, num_groups>(feature, bags, first_bag, last_bag);
}

// Pools bags [first_bag, last_bag) of one feature, as many groups at a time as registers hold and
// divide them all.
Fault pool(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  const int64_t num_groups = (feature.embedding_dim + LANES - 1) / LANES;
  if (num_groups % 4 == 0) return pool_groups<4>(feature, bags, first_bag, last_bag);
  if (num_groups % 3 == 0) return pool_groups<3>(feature, bags, first_bag, last_bag);
  if (num_groups % 2 == 0) return pool_groups<2>(feature, bags, first_bag, last_bag);
  return pool_groups<1>(feature, bags, first_bag, last_bag);
}

#include "encode_kernel.h"
