// dnis_torchrec::csr_embedding_bag: bags of all features of a collection, pooled from tables in compressed sparse rows.
//
// Built against torch's stable ABI: it compiles in seconds, and one build serves every torch from 2.11 on.
// Shapes: B batch, F features, N rows of a table, n rows of a shard, V values of a shard, I ids of a batch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(DNIS_PORTABLE)
#define DNIS_X86 1
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* OPERATOR = "csr_embedding_bag";
#include "fused_bags.h"

constexpr int64_t RUN_LENGTH = 8;  // from here on a row is worth a look whether its columns are neighbours

// A record of compact row pointers: where the first of its rows begins, int64, and how many values each row has, uint8.
constexpr int64_t RECORD_BYTES = 64, START_BYTES = 8, ROWS_PER_RECORD = RECORD_BYTES - START_BYTES;

constexpr int64_t LAYOUT_FIELDS = 7;  // of a feature, see make_features

struct Half {
  uint16_t bits;
};

enum class ValueKind { FLOAT, HALF, INT8 };

// Row pointers in records; the last ends with the last row.
struct CompactPointers {
  const uint8_t* data = nullptr;  // null: the shard has plain ones
  int64_t num_bytes = 0;

  const uint8_t* record_of(int64_t row) const { return data + row / ROWS_PER_RECORD * RECORD_BYTES; }
  bool has_all_of(const uint8_t* record) const { return record + RECORD_BYTES <= data + num_bytes; }
  int64_t num_rows() const {
    const int64_t rest = num_bytes % RECORD_BYTES;
    return num_bytes / RECORD_BYTES * ROWS_PER_RECORD + (rest > 0 ? rest - START_BYTES : 0);
  }
};

// Bytes ahead of a row's values: its scale, a bfloat16.
template <typename Value>
constexpr int64_t SCALE_BYTES = std::is_same_v<Value, int8_t> ? 2 : 0;

// Consecutive rows of a table: all of them, or what one file of a large one holds. A row's scale, values and columns
// follow each other without gaps (interleaved_rows.py), so that they arrive from memory together.
struct Shard {
  const uint8_t* rows;
  int64_t num_bytes;      // of all rows
  Integers row_pointers;  // (n + 1,), or
  CompactPointers compact_pointers;
  int64_t first_row;
  int64_t num_rows;
  int64_t table_begin = -1;  // shards of its table, once a feature has read it
  int64_t table_size = 0;
};

struct Feature {
  const Shard* shards;  // of its table, in the order of rows
  int64_t num_shards;
  int64_t num_embeddings;
  int64_t key;           // its place among the keys of the batch
  int64_t first_column;  // of the output
  int64_t embedding_dim;
  bool is_mean;
  ValueKind kind;
  bool has_wide_columns;  // uint16, not uint8

  // The shard that holds a row of the table.
  const Shard& shard_of(int64_t id) const {
    const Shard* shard = shards;
    for (int64_t left = num_shards; left > 1;) {
      const int64_t half = left / 2;
      if (shard[half].first_row <= id) shard += half;
      left -= half;
    }
    return *shard;
  }
  void prefetch(int64_t id) const {
    if (id < 0 || id >= num_embeddings) return;
    const Shard& shard = shard_of(id);
    const int64_t row = id - shard.first_row;
    if (shard.compact_pointers.data != nullptr) {
      const uint8_t* record = shard.compact_pointers.record_of(row);
      __builtin_prefetch(record);
      __builtin_prefetch(record + START_BYTES + row % ROWS_PER_RECORD);  // another cache line if records straddle them
    } else {
      shard.row_pointers.prefetch(row);
    }
  }
};

// A row that was found, but has perhaps not arrived yet.
struct Row {
  const uint8_t* values;  // its columns behind them
  int64_t length;
  float weight;
};

struct Fault {
  enum Kind { NONE, UNKNOWN_ID, OFFSETS, ROW_POINTERS, COLUMNS };
  Kind kind = NONE;
  int64_t position = 0;

  void note(Kind found, int64_t where) {
    if (kind == NONE) *this = {found, where};
  }
};

inline float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

namespace baseline {
#define DNIS_LEVEL 0
#include "csr_kernel.h"
#undef DNIS_LEVEL
}  // namespace baseline

#ifdef DNIS_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#define DNIS_LEVEL 1
#include "csr_kernel.h"
#undef DNIS_LEVEL
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512vl,avx512bw"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512vl,avx512bw")
#endif
namespace avx512 {
#define DNIS_LEVEL 2
#include "csr_kernel.h"
#undef DNIS_LEVEL
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // DNIS_X86

struct InstructionSet {
  const char* name;
  Fault (*pool)(const Feature&, const Bags&, int64_t, int64_t);
};

constexpr InstructionSet BASELINE{"baseline", baseline::pool};
#ifdef DNIS_X86
constexpr InstructionSet AVX2{"avx2", avx2::pool};
constexpr InstructionSet AVX512{"avx512", avx512::pool};
#endif

// The widest instruction set of this machine, or up to `limit` ("baseline", "avx2", "avx512").
const InstructionSet* widest_instruction_set(const std::string& limit) {
#ifdef DNIS_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw");
  if (has_avx512 && limit == "avx512") return &AVX512;
  if (has_avx2 && (limit == "avx512" || limit == "avx2")) return &AVX2;
#endif
  return &BASELINE;
}

std::atomic<const InstructionSet*> instruction_set{widest_instruction_set("avx512")};

// Takes row pointers of either kind, and with them the number of rows.
void set_row_pointers(Shard& shard, const Tensor& pointers) {
  if (pointers.scalar_type() != ScalarType::Byte) {
    shard.row_pointers = integers(pointers, "row_pointers");
    shard.num_rows = pointers.numel() - 1;
    check(shard.num_rows >= 0, "row_pointers", "one more than rows");
    return;
  }
  check(pointers.dim() == 1 && pointers.is_contiguous(), "row_pointers", "one contiguous dimension");
  const int64_t rest = pointers.numel() % RECORD_BYTES;
  check(rest == 0 || rest > START_BYTES, "row_pointers", "whole records of compact ones");
  shard.compact_pointers = {static_cast<const uint8_t*>(pointers.const_data_ptr()), pointers.numel()};
  shard.num_rows = shard.compact_pointers.num_rows();
}

std::vector<Shard> make_shards(const std::vector<Tensor>& tensors) {
  check(tensors.size() % 2 == 0, "tables", "rows and row_pointers of each shard");
  std::vector<Shard> shards(tensors.size() / 2);
  for (size_t index = 0; index < shards.size(); ++index) {
    const Tensor &rows = tensors[2 * index], &row_pointers = tensors[2 * index + 1];
    check(
        rows.scalar_type() == ScalarType::Byte && rows.dim() == 1 && rows.is_contiguous(), "rows",
        "uint8, one contiguous dimension");
    shards[index].rows = static_cast<const uint8_t*>(rows.const_data_ptr());
    shards[index].num_bytes = rows.numel();
    set_row_pointers(shards[index], row_pointers);
  }
  return shards;
}

// Counts the rows of a table's shards through, and returns how many there are. A shard is of one table.
int64_t number_rows(std::vector<Shard>& shards, int64_t begin, int64_t num_shards) {
  int64_t num_rows = 0;
  for (int64_t index = begin; index < begin + num_shards; ++index) {
    Shard& shard = shards[index];
    const bool is_own = shard.table_size == 0 || (shard.table_begin == begin && shard.table_size == num_shards);
    check(is_own, "layout", "shards of one table each");
    shard.table_begin = begin;
    shard.table_size = num_shards;
    shard.first_row = num_rows;
    num_rows += shard.num_rows;
  }
  return num_rows;
}

std::vector<Feature> make_features(
    const Tensor& layout, const std::optional<std::vector<int64_t>>& keys, std::vector<Shard>& shards,
    int64_t num_keys, int64_t width) {
  const bool fits = layout.dim() == 2 && layout.size(1) == LAYOUT_FIELDS && layout.scalar_type() == ScalarType::Long &&
                    layout.is_contiguous() && layout.is_cpu();
  check(fits, "layout", "int64 of shape (F, 7)");
  const int64_t num_features = layout.size(0);
  check(!keys || static_cast<int64_t>(keys->size()) == num_features, "keys", "one for each feature");
  check(keys || num_features == num_keys, "offsets", "bags for each feature and for no other");
  const int64_t* fields = static_cast<const int64_t*>(layout.const_data_ptr());
  std::vector<Feature> features(num_features);
  Columns columns{width};
  for (int64_t f = 0; f < num_features; ++f, fields += LAYOUT_FIELDS) {
    const int64_t first_shard = fields[0], num_shards = fields[1], first_column = fields[2], embedding_dim = fields[3];
    const int64_t value_bytes = fields[5], column_bytes = fields[6];
    const int64_t key = keys ? (*keys)[f] : f;
    const int64_t there = static_cast<int64_t>(shards.size());
    check(
        first_shard >= 0 && num_shards > 0 && first_shard < there && num_shards <= there - first_shard, "layout",
        "tables that exist");
    columns.take(first_column, embedding_dim, "layout");
    check(key >= 0 && key < num_keys, "offsets", "bags for each feature");
    check(value_bytes == 4 || value_bytes == 2 || value_bytes == 1, "layout", "values of 4, 2 or 1 bytes");
    check(column_bytes == 1 || column_bytes == 2, "layout", "columns of 1 or 2 bytes");
    const ValueKind kind = value_bytes == 4   ? ValueKind::FLOAT
                           : value_bytes == 2 ? ValueKind::HALF
                                              : ValueKind::INT8;
    const Shard* own = shards.data() + first_shard;
    const int64_t num_rows = number_rows(shards, first_shard, num_shards);
    const bool is_mean = fields[4] != 0, has_wide_columns = column_bytes == 2;
    features[f] = {own, num_shards, num_rows, key, first_column, embedding_dim, is_mean, kind, has_wide_columns};
  }
  columns.check_all_taken("layout");
  return features;
}

std::string describe(const Fault& fault, size_t feature, const Feature& fields, const Bags& bags) {
  const std::string place = "csr_embedding_bag: feature " + std::to_string(feature) + ": expected ";
  switch (fault.kind) {
    case Fault::UNKNOWN_ID:
      return place + "ids in 0.." + std::to_string(fields.num_embeddings - 1) + ", got " +
             std::to_string(bags.ids[fault.position]);
    case Fault::OFFSETS:
      return std::string(OPERATOR) + ": offsets: expected " + RISING;
    case Fault::ROW_POINTERS:
      return place + "rising row pointers up to the number of values, got others at row " +
             std::to_string(bags.ids[fault.position]);
    default:
      return place + "columns below embedding_dim, got others in row " + std::to_string(bags.ids[fault.position]);
  }
}

Tensor csr_embedding_bag(
    const Tensor& ids, const Tensor& offsets, const std::optional<Tensor>& per_sample_weights,
    const std::vector<Tensor>& tensors, const Tensor& layout, const std::optional<std::vector<int64_t>>& keys,
    int64_t batch_size, int64_t width, bool zero_unknown) {
  Bags bags = read_bags(ids, offsets, per_sample_weights, batch_size, width, zero_unknown);
  if (batch_size == 0 || width == 0) return empty_output(batch_size, width);
  std::vector<Shard> shards = make_shards(tensors);
  const std::vector<Feature> features = make_features(layout, keys, shards, bags.num_keys, width);
  Tensor out = empty_output(batch_size, width);
  bags.out = static_cast<float*>(out.mutable_data_ptr());
  const auto ahead = [&](int64_t f) {
    if (f + 1 < static_cast<int64_t>(features.size())) prefetch_first(features[f + 1], bags);
  };
  pool_all(features, bags, instruction_set.load()->pool, ahead, describe);
  return out;
}

}  // namespace

// Which instruction set the lookups run on, and, with a limit, from now on up to that one.
extern "C" const char* dnis_instruction_set(const char* limit) {
  if (limit != nullptr) instruction_set = widest_instruction_set(limit);
  return instruction_set.load()->name;
}

STABLE_TORCH_LIBRARY(dnis_torchrec, library) {
  library.def(
      "csr_embedding_bag(Tensor ids, Tensor offsets, Tensor? per_sample_weights, Tensor[] tables, Tensor layout, "
      "int[]? keys, SymInt batch_size, int width, bool zero_unknown) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) {
  library.impl("csr_embedding_bag", TORCH_BOX(&csr_embedding_bag));
}
