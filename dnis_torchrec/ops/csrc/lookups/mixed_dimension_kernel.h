// The lookup itself: finds the row of every id, and adds it to the columns that its block retains.
// mixed_dimension_bag.cpp includes this file in its namespace, behind what it needs of the standard library.
//
// Portable code and AVX-512 give the same bits: one multiplication and one addition per value, in the order of the ids,
// never fused. Whatever ids and offsets hold, nothing outside the buffers is read or written.

constexpr int64_t LANES = 16;               // columns of one mask
constexpr int64_t LINE = 16;                // floats of a cache line
constexpr int64_t COUNTED_BLOCKS = 32;      // up to so many blocks are counted, not searched

struct Block {
  const float* rows;      // of its table, or null where nothing is stored
  const uint16_t* masks;  // (ceil(D / 16),): bit k of mask j stands for column 16 j + k
  int64_t begin;          // position of its first row
  int64_t width;          // of a row of its table, R or more
  int64_t dim;            // R
};

struct Table {
  const Block* blocks;        // (S,)
  const int64_t* ends;        // (S,): one past the position of each block's last row
  const int32_t* positions;   // (N,) or more: where each row stands once rows are ordered by block; null: as they are
  int64_t num_embeddings;
  int64_t num_blocks;

  // Which block holds a position; S for none. Counting them all is faster than a search, whose every branch is a guess.
  int64_t block_of(int64_t position) const {
    if (num_blocks > COUNTED_BLOCKS) return std::upper_bound(ends, ends + num_blocks, position) - ends;
    int64_t before = 0;
    for (int64_t s = 0; s < num_blocks; ++s) before += position >= ends[s];
    return before;
  }
};

struct Feature {
  const Table* table;
  int64_t key;           // its place among the keys of the batch
  int64_t first_column;  // of the output
  int64_t embedding_dim;
  bool is_mean;
};

struct Row {
  const float* values;  // null where nothing is stored
  const Block* block;
};

// The first thing found wrong: what, and at which id (OFFSETS: which offset).
struct Fault {
  enum Kind { NONE, UNKNOWN_ID, OFFSETS, POSITIONS };
  Kind kind = NONE;
  int64_t position = 0;

  void note(Kind found, int64_t where) {
    if (kind == NONE) *this = {found, where};
  }
};

// The values of a row times `factor`: the row itself, or `buffer`.
inline const float* values_of(const float* row, int64_t dim, float factor, float* buffer) {
  if (factor == 1.0f) return row;
  for (int64_t k = 0; k < dim; ++k) buffer[k] = row[k] * factor;
  return buffer;
}

// out[column] += value, or = on the whole row where it is the first, so that nothing has to be zeroed before.
struct Portable {
  template <bool first>
  static inline void add(float* out, const float* values, const uint16_t* masks, int64_t embedding_dim) {
    if constexpr (first) {
      for (int64_t d = 0; d < embedding_dim; ++d) out[d] = 0.0f;
    }
    for (int64_t column = 0; column < embedding_dim; column += LANES, ++masks) {
      for (uint32_t mask = *masks; mask != 0; mask &= mask - 1) {
        float& sum = out[column + __builtin_ctz(mask)];
        sum = first ? *values : sum + *values;
        ++values;
      }
    }
  }
};

#ifdef DNIS_X86
struct Avx512 {
  template <bool first>
  __attribute__((target("avx512f"))) static inline void add(
      float* out, const float* values, const uint16_t* masks, int64_t embedding_dim) {
    for (int64_t column = 0; column < embedding_dim; column += LANES, ++masks) {
      const int64_t left = embedding_dim - column;
      const __mmask16 inside = left >= LANES ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
      __m512 sum = _mm512_maskz_expandloadu_ps(*masks, values);
      if constexpr (!first) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(inside, out + column), sum);
      _mm512_mask_storeu_ps(out + column, inside, sum);
      values += __builtin_popcount(*masks);
    }
  }
};
#endif

// Finds the rows of `count` ids from `first` on and asks memory for them.
inline void find_rows(Row* rows, const Table& table, const Bags& bags, int64_t first, int64_t count, Fault& fault) {
  for (int64_t k = 0; k < count; ++k) {
    rows[k] = {nullptr, nullptr};
    const int64_t id = bags.ids[first + k];
    if (__builtin_expect(id < 0 || id >= table.num_embeddings, 0)) {
      if (!bags.zero_unknown) fault.note(Fault::UNKNOWN_ID, first + k);
      continue;
    }
    const int64_t position = table.positions == nullptr ? id : table.positions[id];
    if (__builtin_expect(position < 0, 0)) {
      fault.note(Fault::POSITIONS, first + k);
      continue;
    }
    const int64_t s = table.block_of(position);
    const Block* block = table.blocks + s;
    if (s == table.num_blocks || block->rows == nullptr) continue;  // a row that retains nothing
    rows[k] = {block->rows + (position - block->begin) * block->width, block};
    for (int64_t d = 0; d < block->dim; d += LINE) __builtin_prefetch(rows[k].values + d);
  }
  if (table.positions == nullptr) return;
  for (int64_t k = first + count; k < first + count + WINDOW && k < bags.num_ids; ++k) {
    const int64_t id = bags.ids[k];
    if (id >= 0 && id < table.num_embeddings) __builtin_prefetch(table.positions + id);
  }
}

template <typename Level>
__attribute__((always_inline)) inline Fault pool(
    const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  const int64_t first_offset = feature.key * bags.batch_size;
  const int64_t last_id = bags.offsets[first_offset + last_bag], dim = feature.embedding_dim;
  std::vector<float> buffer(bags.max_dim);
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
        window_end = std::min(i + WINDOW, last_id);
        find_rows(rows, *feature.table, bags, window_begin, window_end - window_begin, fault);
      }
      const Row& row = rows[i - window_begin];
      if (row.values == nullptr) continue;
      const float factor = bags.weights != nullptr ? bags.weights[i] : 1.0f;
      const float* values = values_of(row.values, row.block->dim, factor, buffer.data());
      if (is_first) {
        Level::template add<true>(out, values, row.block->masks, dim);
      } else {
        Level::template add<false>(out, values, row.block->masks, dim);
      }
      is_first = false;
    }
    if (is_first) std::fill(out, out + dim, 0.0f);
    if (feature.is_mean && rising && end - begin > 1) {
      const float length = static_cast<float>(end - begin);
      for (int64_t d = 0; d < dim; ++d) out[d] /= length;
    }
  }
  return fault;
}

using Pool = Fault (*)(const Feature&, const Bags&, int64_t, int64_t);

Fault pool_portable(const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  return pool<Portable>(feature, bags, first_bag, last_bag);
}

#ifdef DNIS_X86
__attribute__((target("avx512f,avx512bw,avx512vl"))) Fault pool_avx512(
    const Feature& feature, const Bags& bags, int64_t first_bag, int64_t last_bag) {
  return pool<Avx512>(feature, bags, first_bag, last_bag);
}
#endif

Pool pool_of_machine() {
#ifdef DNIS_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return pool_avx512;
  }
#endif
  return pool_portable;
}
