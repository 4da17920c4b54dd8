// dnis_torchrec::mixed_dimension_bag: bags of all features of a collection, pooled from a table per block of rows.
//
// The tables are TorchRec's own, read where they lie: float32 (rows, R or more). One pass finds the block of every id
// and its row, and adds the row to the columns that its block retains; no bag is split, and nothing is pooled that is
// empty.
//
// Shapes: B batch, F features, N rows of a table, S blocks, R retained dims of a block, D embedding_dim, I ids of a batch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(DNIS_PORTABLE)
#define DNIS_X86 1
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* OPERATOR = "mixed_dimension_bag";
#include "fused_bags.h"
#include "mixed_dimension_kernel.h"

// Rows of an int64 table of so many columns, on the CPU.
const int64_t* int64_rows(const Tensor& tensor, const char* argument, int64_t columns) {
  const bool fits = tensor.dim() == 2 && tensor.size(1) == columns && tensor.scalar_type() == ScalarType::Long &&
                    tensor.is_contiguous() && tensor.is_cpu();
  check(fits, argument, "contiguous int64 on the CPU, with the columns that the operator's docstring names");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

// Fields of a block: end, table (-1: none), R, its first mask, masks (ceil(D / 16)).
std::vector<Block> make_blocks(
    const Tensor& layout, const std::vector<Tensor>& tables, const Tensor& masks, int64_t& max_dim) {
  const int64_t* fields = int64_rows(layout, "blocks", 5);
  check(masks.scalar_type() == ScalarType::Short && masks.is_contiguous() && masks.is_cpu(), "masks", "int16");
  const uint16_t* all_masks = static_cast<const uint16_t*>(masks.const_data_ptr());
  std::vector<Block> blocks(layout.size(0));
  for (Block& block : blocks) {
    const int64_t table = fields[1], first_mask = fields[3], num_masks = fields[4];
    block = {nullptr, nullptr, 0, 0, fields[2]};
    fields += 5;
    if (table < 0) continue;
    check(table < static_cast<int64_t>(tables.size()), "blocks", "tables that exist");
    const bool inside = first_mask >= 0 && num_masks >= 0 && first_mask <= masks.numel() - num_masks;
    check(inside, "blocks", "masks that exist");
    const Tensor& rows = tables[table];
    check(rows.dim() == 2 && rows.is_contiguous() && rows.is_cpu(), "tables", "contiguous rows on the CPU");
    check(rows.scalar_type() == ScalarType::Float, "tables", "float32");
    block.rows = static_cast<const float*>(rows.const_data_ptr());
    block.width = rows.size(1);
    check(reinterpret_cast<uintptr_t>(block.rows) % alignof(float) == 0, "tables", "rows aligned as float32 is");
    check(block.dim >= 0 && block.dim <= block.width, "tables", "R values in every row");
    block.masks = all_masks + first_mask;
    int64_t num_columns = 0;
    for (int64_t j = 0; j < num_masks; ++j) num_columns += __builtin_popcount(block.masks[j]);
    check(num_columns == block.dim, "masks", "a column for each of the R values");
    max_dim = std::max(max_dim, block.dim);
  }
  return blocks;
}

// Fields of a table: N, its first block, S, its positions (-1: none).
std::vector<Table> make_tables(
    const Tensor& layout, const Tensor& block_layout, std::vector<Block>& blocks, std::vector<int64_t>& ends,
    const std::vector<Tensor>& tables, const std::vector<Tensor>& positions) {
  const int64_t* fields = int64_rows(layout, "table_layout", 4);
  const int64_t* block_fields = int64_rows(block_layout, "blocks", 5);
  std::vector<Table> made(layout.size(0));
  int64_t next_block = 0;
  for (Table& table : made) {
    const int64_t first = fields[1], num_blocks = fields[2], index = fields[3];
    const int64_t all_blocks = static_cast<int64_t>(blocks.size());
    const bool is_own = first == next_block && num_blocks >= 0 && num_blocks <= all_blocks - first;
    check(is_own, "table_layout", "blocks that exist, those of one table behind those of another");
    check(fields[0] >= 0, "table_layout", "no fewer than 0 rows");
    next_block += num_blocks;
    table = {blocks.data() + first, ends.data() + first, nullptr, fields[0], num_blocks};
    fields += 4;
    int64_t begin = 0;
    for (int64_t s = first; s < first + num_blocks; ++s) {
      const int64_t end = block_fields[5 * s], stored = block_fields[5 * s + 1];
      check(end >= begin, "blocks", "rising ends");
      check(stored < 0 || tables[stored].size(0) >= end - begin, "tables", "all rows of the block");
      blocks[s].begin = begin;
      ends[s] = begin = end;
    }
    if (index < 0) continue;
    check(index < static_cast<int64_t>(positions.size()), "table_layout", "positions that exist");
    const Tensor& map = positions[index];
    const bool fits = map.scalar_type() == ScalarType::Int && map.dim() == 1 && map.is_contiguous() && map.is_cpu() &&
                      map.numel() >= table.num_embeddings;
    check(fits, "positions", "an int32 for each row");
    table.positions = static_cast<const int32_t*>(map.const_data_ptr());
  }
  return made;
}

// Fields of a feature: its table, its first output column, D, 1 for MEAN.
std::vector<Feature> make_features(
    const Tensor& layout, const Tensor& block_layout, const Tensor& table_layout, const std::vector<Table>& tables,
    const std::optional<std::vector<int64_t>>& keys, int64_t num_keys, int64_t width) {
  const int64_t* fields = int64_rows(layout, "feature_layout", 4);
  const int64_t* block_fields = int64_rows(block_layout, "blocks", 5);
  const int64_t* table_fields = int64_rows(table_layout, "table_layout", 4);
  check(!keys || static_cast<int64_t>(keys->size()) == layout.size(0), "keys", "one for each feature");
  check(keys || layout.size(0) == num_keys, "offsets", "bags for each feature and for no other");
  std::vector<Feature> features(layout.size(0));
  Columns columns{width};
  for (size_t f = 0; f < features.size(); ++f, fields += 4) {
    const int64_t table = fields[0], first_column = fields[1], embedding_dim = fields[2];
    const int64_t key = keys ? (*keys)[f] : static_cast<int64_t>(f);
    check(table >= 0 && table < static_cast<int64_t>(tables.size()), "feature_layout", "tables that exist");
    columns.take(first_column, embedding_dim, "feature_layout");
    check(key >= 0 && key < num_keys, "offsets", "bags for each feature");
    const int64_t first = table_fields[4 * table + 1];
    for (int64_t s = 0; s < tables[table].num_blocks; ++s) {
      const Block& block = tables[table].blocks[s];
      if (block.rows == nullptr) continue;
      const int64_t num_masks = block_fields[5 * (first + s) + 4];
      const int64_t outside = num_masks * LANES - embedding_dim;  // columns of the last mask beyond D
      const bool fits = num_masks == (embedding_dim + LANES - 1) / LANES &&
                        (outside == 0 || block.masks[num_masks - 1] >> (LANES - outside) == 0);
      check(fits, "masks", "columns below embedding_dim");
    }
    features[f] = {&tables[table], key, first_column, embedding_dim, fields[3] != 0};
  }
  columns.check_all_taken("feature_layout");
  return features;
}

std::string describe(const Fault& fault, size_t feature, const Feature& fields, const Bags& bags) {
  const std::string place = "mixed_dimension_bag: feature " + std::to_string(feature) + ": expected ";
  switch (fault.kind) {
    case Fault::UNKNOWN_ID:
      return place + "ids in 0.." + std::to_string(fields.table->num_embeddings - 1) + ", got " +
             std::to_string(bags.ids[fault.position]);
    case Fault::OFFSETS:
      return std::string(OPERATOR) + ": offsets: expected " + RISING;
    default:
      return place + "positions from 0 on, got others for row " + std::to_string(bags.ids[fault.position]);
  }
}

Tensor mixed_dimension_bag(
    const Tensor& ids, const Tensor& offsets, const std::optional<Tensor>& per_sample_weights,
    const std::vector<Tensor>& tables, const std::vector<Tensor>& positions, const Tensor& feature_layout,
    const Tensor& table_layout, const Tensor& block_layout, const Tensor& masks,
    const std::optional<std::vector<int64_t>>& keys, int64_t batch_size, int64_t width, bool zero_unknown) {
  Bags bags = read_bags(ids, offsets, per_sample_weights, batch_size, width, zero_unknown);
  if (batch_size == 0 || width == 0) return empty_output(batch_size, width);
  std::vector<Block> blocks = make_blocks(block_layout, tables, masks, bags.max_dim);
  std::vector<int64_t> ends(blocks.size());
  const std::vector<Table> made = make_tables(table_layout, block_layout, blocks, ends, tables, positions);
  const std::vector<Feature> features =
      make_features(feature_layout, block_layout, table_layout, made, keys, bags.num_keys, width);
  Tensor out = empty_output(batch_size, width);
  bags.out = static_cast<float*>(out.mutable_data_ptr());
  pool_all(features, bags, pool_of_machine(), [](int64_t) {}, describe);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def(
      "mixed_dimension_bag(Tensor ids, Tensor offsets, Tensor? per_sample_weights, Tensor[] tables, "
      "Tensor[] positions, Tensor feature_layout, Tensor table_layout, Tensor block_layout, Tensor masks, "
      "int[]? keys, SymInt batch_size, int width, bool zero_unknown) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) {
  library.impl("mixed_dimension_bag", TORCH_BOX(&mixed_dimension_bag));
}
