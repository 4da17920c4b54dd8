// dnis_torchrec::packed_embedding_bag: bags of all features of a collection, pooled from rows of
// bit fields.
//
// A table is the rows of its blocks, one block after another, each row of a fixed number of bytes,
// and a directory that says where every row stands (blocks/routing.py). A row's values are
// codes of mixed width at bit offsets that are the same for all rows of a block;
// ops/packed.py tells how the layout describes them.
//
// Shapes: B batch, F features, T tables, N rows of a table, K blocks of a table, D embedding_dim, I
// ids of a batch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* OPERATOR = "packed_embedding_bag";
constexpr int64_t WINDOW = 64;              // ids whose rows are asked of memory ahead of their use
constexpr int64_t ROWS_PER_THREAD = 4'096;  // rows and bags that outweigh waking a thread
constexpr int64_t VALUES_PER_THREAD = 1 << 14;  // of rows that are encoded
constexpr int64_t MOST_BLOCKS = 65'535, MOST_COLUMNS = 1 << 20;  // so that nothing overflows
constexpr size_t NUM_LAYOUTS = 4;  // tensors behind those of tables
constexpr int64_t MOST_WIDTH = std::numeric_limits<int32_t>::max();  // likewise

// int32 or int64, as they come.
struct Integers {
  const void* data = nullptr;
  bool is_wide = false;

  int64_t operator[](int64_t index) const {
    return is_wide ? static_cast<const int64_t*>(data)[index]
                   : static_cast<const int32_t*>(data)[index];
  }
};

struct Bags {
  Integers ids;          // (I,)
  Integers offsets;      // (keys * B + 1,)
  const float* weights;  // (I,) or null
  float* out;            // (B, width)
  int64_t num_ids;
  int64_t num_keys;
  int64_t batch_size;
  int64_t width;
  bool zero_unknown;
};

void check(bool condition, const char* argument, const char* requirement) {
  if (!condition) {
    throw std::invalid_argument(
        std::string(OPERATOR) + ": " + argument + ": expected " + requirement);
  }
}

Integers integers(const Tensor& tensor, const char* argument) {
  const ScalarType dtype = tensor.scalar_type();
  check(dtype == ScalarType::Long || dtype == ScalarType::Int, argument, "int32 or int64");
  check(tensor.dim() == 1 && tensor.is_contiguous(), argument, "one contiguous dimension");
  return {tensor.const_data_ptr(), dtype == ScalarType::Long};
}

constexpr const char* RISING = "them to rise from 0 to the number of ids";
constexpr int64_t LINE = 64;          // bytes of a cache line
constexpr int64_t BAGS_AHEAD = 16;    // whose outputs are asked of memory
constexpr int64_t LANES = 16;         // columns of a group
constexpr int64_t FEW_BYTES = 16;     // of a window, which most groups of codes do with
constexpr int64_t WINDOW_BYTES = 64;  // that hold the fields of a group: 16 of at most 32 bits
constexpr int64_t QUAD_BYTES = 16;    // that hold the fields of four columns
constexpr int64_t READABLE_BYTES =
    WINDOW_BYTES + QUAD_BYTES + 4;  // that reading some window may touch

// Rank and sparse directories, see blocks/routing.py.
constexpr int64_t ROWS_PER_START = 1 << 16, START_BYTES = 8, COUNT_BYTES = 2;
constexpr int64_t ROWS_PER_SET = 1 << 10, SET_BYTES = 24, HEAD_BYTES = 8;

constexpr int64_t log_rows_per_record(int64_t num_planes) {
  return num_planes < 3 ? 7 : num_planes > 6 ? 10 : 4 + num_planes;
}

constexpr int64_t rows_per_record(int64_t num_planes) {
  return int64_t{1} << log_rows_per_record(num_planes);
}

constexpr int64_t FEATURE_FIELDS = 4, TABLE_FIELDS = 5, BLOCK_FIELDS = 4;

// Number k of an array that may begin at any byte.
template <typename Number>
inline Number read(const uint8_t* numbers, int64_t k) {
  Number number;
  __builtin_memcpy(&number, numbers + k * sizeof(Number), sizeof(Number));
  return number;
}

inline float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Sixteen columns of a block. Which bytes a field has is said twice, four to a column: within the
// group's window for machines that pick from 64 bytes at once, within the window of its four
// columns for others.
struct Group {
  enum Kind : int32_t { EMPTY = 0, CODES = 1, WITH_FLOATS = 2 };

  int32_t wide[LANES];
  int32_t masks[LANES];  // of a field, where it stands in its bytes; 0: not retained; all bits: a
                         // float32
  float scales[LANES];   // of the masked number
  float biases[LANES];
  int32_t narrow[LANES];
  int32_t window;    // its first byte, from the row's
  int32_t quads[4];  // first byte of the window of four columns, from the group's
  int32_t kind;
  int32_t span;  // bytes of the window up to the last that a field has
  int32_t unused[9];
};
constexpr int64_t GROUP_FIELDS = sizeof(Group) / sizeof(int32_t);
static_assert(GROUP_FIELDS == 96);

struct Block {
  const uint8_t* rows;
  const Group* groups;  // (ceil(D / 16),), or null where nothing is stored
  int64_t num_rows;
  int64_t stride;  // bytes of a row
};

enum class Directory { NONE, SORTED, RANKS, SPARSE };

struct Table {
  const Block* blocks;  // (K,)
  const uint8_t* end;   // of the rows of all blocks
  const uint8_t* directory;
  Directory kind;
  int64_t num_blocks;
  int64_t num_embeddings;
  const uint8_t* sets;     // of a sparse directory: a record for each ROWS_PER_SET rows
  const uint8_t* groups;   // and a byte of each group of eight rows that has a stored one
  int64_t num_groups;
  int64_t num_ranked;      // rows that have ranks: those of the table, or those that are stored
  int64_t ranked_blocks;
  const uint8_t* records;
  int64_t record_bytes;
  int64_t num_planes;

  // Asks memory for the first record that finds a row, if that is one and has one.
  void prefetch(int64_t row) const {
    if (row < 0 || row >= num_embeddings) return;
    if (kind == Directory::SPARSE) __builtin_prefetch(sets + row / ROWS_PER_SET * SET_BYTES);
    if (kind != Directory::RANKS) return;
    const uint8_t* record = records + (row >> log_rows_per_record(num_planes)) * record_bytes;
    for (int64_t byte = 0; byte < record_bytes; byte += LINE) __builtin_prefetch(record + byte);
  }
};

struct Feature {
  const Table* table;
  int64_t key;           // its place among the keys of the batch
  int64_t first_column;  // of the output
  int64_t embedding_dim;
  bool is_mean;
};

// The first thing found wrong: what, and at which id (OFFSETS: which offset).
struct Fault {
  enum Kind { NONE, UNKNOWN_ID, OFFSETS, DIRECTORY, FIELDS };
  Kind kind = NONE;
  int64_t position = 0;

  void note(Kind found, int64_t where) {
    if (kind == NONE) *this = {found, where};
  }
};

// How a block's rows become bit fields: (D,) of each, but for the last two.
struct BlockCodes {
  const int64_t* bits;   // copied, lest the output lies over them
  const int64_t* order;  // of the columns in rounding, narrow ones first
  const float* scales;
  const int16_t* shifts;
  const float* gains;     // or null
  const float* feedback;  // (D, D), in the order of rounding, or null
  int64_t stride;         // bytes of a row
};

constexpr int64_t FLOAT_BITS = 32;

#define DNIS_LOOPS "packed_kernel.h"
#include "levels.h"

// Checks the offsets of keys that no feature reads; kernels check the others, bag by bag, as they
// come to them. Each begins where the one before it ends: if all rise, what one bag holds is part
// of no other.
void check_unread(const std::vector<Feature>& features, const Bags& bags) {
  bool is_each_read = static_cast<int64_t>(features.size()) == bags.num_keys;
  for (size_t f = 0; is_each_read && f < features.size(); ++f)
    is_each_read = features[f].key == static_cast<int64_t>(f);
  if (is_each_read) return;  // the usual case, without taking memory
  std::vector<bool> is_read(static_cast<size_t>(bags.num_keys));
  for (const Feature& feature : features) is_read[feature.key] = true;
  for (int64_t key = 0; key < bags.num_keys; ++key) {
    if (is_read[key]) continue;
    bool rises = true;
    for (int64_t bag = key * bags.batch_size; bag < (key + 1) * bags.batch_size; ++bag)
      rises &= bags.offsets[bag] <= bags.offsets[bag + 1];
    check(rises, "offsets", RISING);
  }
}

// What the bags of a batch hold; `out` is for the caller to set.
Bags read_bags(const Tensor& ids, const Tensor& offsets,
    const std::optional<Tensor>& per_sample_weights, int64_t batch_size, int64_t width,
    bool zero_unknown) {
  check(batch_size >= 0 && width >= 0, "batch_size and width", "none below 0");
  Bags bags{};
  bags.ids = integers(ids, "ids");
  bags.num_ids = ids.numel();
  bags.offsets = integers(offsets, "offsets");
  const int64_t num_bags = offsets.numel() - 1;
  check(num_bags >= 0 && bags.offsets[0] == 0 && bags.offsets[num_bags] == bags.num_ids, "offsets",
      RISING);
  bags.num_keys = batch_size == 0 ? 0 : num_bags / batch_size;
  check(bags.num_keys * batch_size == num_bags, "offsets", "batch_size bags of every key");
  bags.batch_size = batch_size;
  bags.width = width;
  bags.zero_unknown = zero_unknown;
  if (per_sample_weights) {
    const bool fits = per_sample_weights->scalar_type() == ScalarType::Float &&
                      per_sample_weights->is_contiguous() &&
                      per_sample_weights->numel() == bags.num_ids;
    check(fits, "per_sample_weights", "one contiguous float32 for each id");
    bags.weights = static_cast<const float*>(per_sample_weights->const_data_ptr());
  }
  return bags;
}

// Asks memory for what tells where the first rows of a feature stand.
void prefetch_first(const Feature& feature, const Bags& bags) {
  const int64_t first_bag = feature.key * bags.batch_size, begin = bags.offsets[first_bag];
  const int64_t end = std::min(bags.offsets[first_bag + bags.batch_size], bags.num_ids);
  if (begin < 0 || begin >= end) return;
  for (int64_t at = begin; at < begin + std::min(WINDOW, end - begin); ++at)
    feature.table->prefetch(bags.ids[at]);
}

Tensor empty(int64_t num_rows, int64_t width, int32_t dtype, int64_t num_dims = 2) {
  const int64_t sizes[] = {num_rows, width}, strides[] = {width, 1};
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      num_dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// Rows of an integer table of so many columns, on the CPU.
template <typename Integer>
const Integer* table_rows(const Tensor& tensor, const char* argument, int64_t columns) {
  const ScalarType dtype = sizeof(Integer) == 8 ? ScalarType::Long : ScalarType::Int;
  const bool fits = tensor.dim() == 2 && tensor.size(1) == columns &&
                    tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.is_cpu();
  const void* data = tensor.const_data_ptr();
  check(fits && reinterpret_cast<uintptr_t>(data) % alignof(Integer) == 0, argument,
      "contiguous integers on the CPU, with the columns that the operator's docstring names");
  return static_cast<const Integer*>(data);
}

const Tensor& tensor_at(const std::vector<Tensor>& tensors, size_t num_tables, int64_t index) {
  check(index < static_cast<int64_t>(num_tables), "table_layout", "tensors that exist");
  const Tensor& tensor = tensors[index];
  const bool fits = tensor.dim() == 1 && tensor.is_contiguous() && tensor.is_cpu();
  check(fits, "tables", "one contiguous dimension on the CPU");
  return tensor;
}

// Takes the ranks of some rows; returns the bytes that they have to fill.
int64_t set_ranks(Table& table, const uint8_t* ranks, int64_t num_rows, int64_t num_blocks) {
  table.directory = ranks;
  table.num_ranked = num_rows;
  table.ranked_blocks = num_blocks;
  while (int64_t{1} << table.num_planes < num_blocks) ++table.num_planes;
  const int64_t per_record = rows_per_record(table.num_planes);
  table.record_bytes = COUNT_BYTES * num_blocks + table.num_planes * per_record / 8;
  const int64_t num_starts = (num_rows + ROWS_PER_START - 1) / ROWS_PER_START;
  const int64_t num_records = (num_rows + per_record - 1) / per_record;
  const int64_t start_bytes = START_BYTES * num_blocks * num_starts;
  table.records = ranks + start_bytes;
  return start_bytes + num_records * table.record_bytes;
}

void set_directory(Table& table, const Tensor& directory) {
  const uint8_t* bytes = static_cast<const uint8_t*>(directory.const_data_ptr());
  const ScalarType dtype = directory.scalar_type();
  if (dtype == ScalarType::Long) {
    check(directory.numel() == table.num_blocks, "tables",
        "a boundary for each block and the rows of none");
    table.directory = bytes;
    table.kind = Directory::SORTED;
    return;
  }
  check(dtype == ScalarType::Byte || dtype == ScalarType::Int, "tables",
      "directories of int64, uint8 or int32");
  check(table.num_blocks >= 2 && table.num_blocks <= 256, "table_layout",
      "2 to 256 blocks beside a directory");
  const int64_t limit = std::numeric_limits<int64_t>::max() / 4096;  // so that nothing overflows
  check(table.num_embeddings <= limit, "table_layout", "fewer rows");
  int64_t num_bytes;
  if (dtype == ScalarType::Byte) {
    table.kind = Directory::RANKS;
    num_bytes = set_ranks(table, bytes, table.num_embeddings, table.num_blocks);
  } else {
    table.kind = Directory::SPARSE;
    const bool has_head = directory.numel() > 1;
    const int64_t num_rows = has_head ? read<int32_t>(bytes, 0) : -1;
    table.num_groups = has_head ? read<int32_t>(bytes, 1) : -1;
    check(num_rows >= 0 && table.num_groups >= 0, "tables", "counts ahead of a sparse directory");
    table.sets = bytes + HEAD_BYTES;
    const int64_t num_sets = (table.num_embeddings + ROWS_PER_SET - 1) / ROWS_PER_SET;
    const int64_t first_group = HEAD_BYTES + num_sets * SET_BYTES;
    table.groups = bytes + first_group;
    num_bytes = first_group + 8 * ((table.num_groups + 7) / 8 + 1);
    const int64_t of_ranks = set_ranks(table, bytes + num_bytes, num_rows, table.num_blocks - 1);
    num_bytes += table.num_planes > 0 ? (of_ranks + 3) / 4 * 4 : 0;
  }
  const bool fits = directory.numel() * directory.element_size() == num_bytes;
  check(fits, "tables", "a record of the directory for all rows");
}

// Fields of a table: N, its first block, K, its rows and its directory among the tensors (-1:
// none). Fields of a block: its first byte, its rows, the bytes of a row, its first group (-1:
// nothing is stored).
std::vector<Table> make_tables(const Tensor& table_layout, const Tensor& block_layout,
    const Tensor& groups, const std::vector<Tensor>& tensors, size_t num_tables,
    std::vector<Block>& blocks) {
  const int64_t* fields = table_rows<int64_t>(table_layout, "table_layout", TABLE_FIELDS);
  const int64_t* block_fields = table_rows<int64_t>(block_layout, "block_layout", BLOCK_FIELDS);
  const Group* all_groups =
      reinterpret_cast<const Group*>(table_rows<int32_t>(groups, "groups", GROUP_FIELDS));
  blocks.resize(block_layout.size(0));
  std::vector<Table> made(table_layout.size(0));
  int64_t next_block = 0;
  for (Table& table : made) {
    const int64_t first = fields[1], num_blocks = fields[2],
                  left = static_cast<int64_t>(blocks.size()) - next_block;
    const bool is_own = first == next_block && num_blocks > 0 && num_blocks <= left;
    check(is_own, "table_layout", "blocks that exist, those of one table behind those of another");
    check(fields[0] >= 0, "table_layout", "no fewer than 0 rows");
    next_block += num_blocks;
    table = {};
    table.blocks = blocks.data() + first;
    table.num_blocks = num_blocks;
    table.num_embeddings = fields[0];
    const uint8_t* rows = nullptr;
    int64_t num_bytes = 0;
    if (fields[3] >= 0) {
      const Tensor& tensor = tensor_at(tensors, num_tables, fields[3]);
      check(tensor.scalar_type() == ScalarType::Byte, "tables", "rows of uint8");
      rows = static_cast<const uint8_t*>(tensor.const_data_ptr());
      num_bytes = tensor.numel();
    }
    table.end = rows + num_bytes;
    if (fields[4] >= 0) set_directory(table, tensor_at(tensors, num_tables, fields[4]));
    check(table.kind != Directory::NONE || num_blocks == 1, "table_layout",
        "one block where there is no directory");
    for (int64_t s = first; s < first + num_blocks; ++s) {
      const int64_t *field = block_fields + BLOCK_FIELDS * s, first_group = field[3];
      if (first_group < 0) continue;
      const int64_t begin = field[0], num_rows = field[1], stride = field[2];
      int64_t size;  // a product, for division takes long
      const bool fits = begin >= 0 && begin <= num_bytes && num_rows >= 0 && stride > 0 &&
                        !__builtin_mul_overflow(num_rows, stride, &size) &&
                        size <= num_bytes - begin;
      check(fits, "block_layout", "rows within those of the table");
      check(first_group < groups.size(0), "block_layout", "groups that exist");
      blocks[s] = {rows + begin, all_groups + first_group, num_rows, stride};
    }
    fields += TABLE_FIELDS;
  }
  return made;
}

// Fields of a feature: its table, its first output column, D, 1 for MEAN. Feature f reads key f.
std::vector<Feature> make_features(const Tensor& layout, const Tensor& block_layout,
    const Tensor& table_layout, const Tensor& groups, const std::vector<Table>& tables) {
  const int64_t* fields = table_rows<int64_t>(layout, "feature_layout", FEATURE_FIELDS);
  const int64_t* table_fields = static_cast<const int64_t*>(table_layout.const_data_ptr());
  const int64_t* block_fields = static_cast<const int64_t*>(block_layout.const_data_ptr());
  std::vector<Feature> features(layout.size(0));
  int64_t next_column = 0;  // features take them in turn: each is written, and by one alone
  for (size_t f = 0; f < features.size(); ++f, fields += FEATURE_FIELDS) {
    const int64_t table = fields[0], first_column = fields[1], embedding_dim = fields[2];
    check(table >= 0 && table < static_cast<int64_t>(tables.size()), "feature_layout",
        "tables that exist");
    check(first_column == next_column && embedding_dim >= 0 &&
              embedding_dim <= MOST_WIDTH - next_column,
        "feature_layout", "columns of one feature behind those of another");
    next_column += embedding_dim;
    const int64_t num_groups = (embedding_dim + LANES - 1) / LANES,
                  first = table_fields[TABLE_FIELDS * table + 1];
    for (int64_t s = first; s < first + tables[table].num_blocks; ++s) {
      const int64_t first_group = block_fields[BLOCK_FIELDS * s + 3];
      check(first_group <= groups.size(0) - num_groups, "block_layout", "groups for all columns");
    }
    features[f] = {
        &tables[table], static_cast<int64_t>(f), first_column, embedding_dim, fields[3] != 0};
  }
  return features;
}

// The memory of a tensor.
struct Memory {
  const void* data;
  int64_t num_elements;
  ScalarType dtype;

  static Memory of(const Tensor& tensor) {
    return {tensor.const_data_ptr(), tensor.numel(), tensor.scalar_type()};
  }
  bool operator==(const Memory&) const = default;
};

// A collection whose layouts have been read and checked. Whatever its tensors hold later, kernels
// stay within these bounds, as long as the tensors keep their memory.
struct Collection {
  std::vector<Tensor> tensors;  // of tables, then layouts of features, tables, blocks, and groups
  std::vector<Memory> memories;
  std::vector<std::vector<int64_t>> numbers;  // that the layouts had
  std::vector<Block> blocks;
  std::vector<Table> tables;
  std::vector<Feature> features;
  int64_t width = 0;

  explicit Collection(std::vector<Tensor> all) : tensors(std::move(all)) {
    const size_t num_tables = tensors.size() - NUM_LAYOUTS;
    const Tensor *layouts = &tensors[num_tables], &groups = tensors.back();
    tables = make_tables(layouts[1], layouts[2], groups, tensors, num_tables, blocks);
    features = make_features(layouts[0], layouts[2], layouts[1], groups, tables);
    for (const Feature& feature : features) width += feature.embedding_dim;
  }
  Collection(const Collection&) = delete;  // tables and features point into it

  // The same, to be asked later whether it is current.
  static std::shared_ptr<const Collection> opened(std::vector<Tensor> all) {
    auto collection = std::make_shared<Collection>(std::move(all));
    collection->remember();
    return collection;
  }

  void remember() {
    for (const Tensor& tensor : tensors) memories.push_back(Memory::of(tensor));
    for (size_t i = tensors.size() - NUM_LAYOUTS; i + 1 < tensors.size(); ++i) {
      const auto* data = static_cast<const int64_t*>(memories[i].data);
      numbers.emplace_back(data, data + memories[i].num_elements);
    }
  }

  // Whether the tensors still have the memory, and the layouts the numbers, that were read: a
  // module that goes to another process is moved, and a checkpoint may be written into layouts.
  bool is_current() const {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (!(Memory::of(tensors[i]) == memories[i])) return false;
    const size_t num_tables = tensors.size() - NUM_LAYOUTS;
    for (size_t i = 0; i < numbers.size(); ++i)
      if (!std::equal(numbers[i].begin(), numbers[i].end(),
              static_cast<const int64_t*>(memories[num_tables + i].data)))
        return false;
    return true;
  }
};

// Features that read the keys of a batch which is not in their order.
std::vector<Feature> with_keys(
    std::vector<Feature> features, const std::vector<int64_t>& keys, int64_t num_keys) {
  check(keys.size() == features.size(), "keys", "one for each feature");
  for (size_t f = 0; f < features.size(); ++f) {
    check(keys[f] >= 0 && keys[f] < num_keys, "offsets", "bags for each feature");
    features[f].key = keys[f];
  }
  return features;
}

std::string describe(const Fault& fault, size_t feature, const Feature& fields, const Bags& bags) {
  const std::string place =
      std::string(OPERATOR) + ": feature " + std::to_string(feature) + ": expected ";
  switch (fault.kind) {
    case Fault::UNKNOWN_ID:
      return place + "ids in 0.." + std::to_string(fields.table->num_embeddings - 1) + ", got " +
             std::to_string(bags.ids[fault.position]);
    case Fault::OFFSETS:
      return std::string(OPERATOR) + ": offsets: expected " + RISING;
    default:
      return place +
             (fault.kind == Fault::DIRECTORY ? "a directory of rows that exist"
                                             : "fields within their rows") +
             ", got others for row " + std::to_string(bags.ids[fault.position]);
  }
}

// Pools every bag of every feature. Bags are spread over torch's threads where there is enough to
// do; each writes its own part of the output, so the result does not depend on how many threads
// there are. Of several faults the one that comes first is described and thrown.
void pool_all(const std::vector<Feature>& features, const Bags& bags) {
  check_unread(features, bags);
  const auto pool = DNIS_WIDEST(pool);
  const int64_t num_bags = static_cast<int64_t>(features.size()) * bags.batch_size;
  std::mutex mutex;
  Fault fault;
  size_t faulty = features.size();
  const auto pool_range = [&](int64_t begin, int64_t end) {
    for (int64_t next = begin; next < end;) {
      const int64_t f = next / bags.batch_size, first_bag = next - f * bags.batch_size;
      const int64_t last_bag = std::min(bags.batch_size, first_bag + end - next);
      const size_t feature = static_cast<size_t>(f);
      if (feature + 1 < features.size()) prefetch_first(features[feature + 1], bags);
      const Fault found = pool(features[f], bags, first_bag, last_bag);
      if (found.kind != Fault::NONE) {
        const std::lock_guard<std::mutex> guard(mutex);
        if (feature < faulty || (feature == faulty && found.position < fault.position)) {
          fault = found;
          faulty = feature;
        }
      }
      next += last_bag - first_bag;
    }
  };
  if (num_bags + bags.num_ids < 2 * ROWS_PER_THREAD) {
    pool_range(0, num_bags);
  } else {
    const int64_t rows_per_bag = 1 + bags.num_ids / num_bags;
    torch::stable::parallel_for(
        0, num_bags, std::max<int64_t>(1, ROWS_PER_THREAD / rows_per_bag), pool_range);
  }
  if (fault.kind != Fault::NONE)
    throw std::invalid_argument(describe(fault, faulty, features[faulty], bags));
}

Tensor pool_batch(const Collection& collection, const Tensor& ids, const Tensor& offsets,
    const std::optional<Tensor>& per_sample_weights,
    const std::optional<std::vector<int64_t>>& keys, int64_t batch_size, bool zero_unknown) {
  const int64_t width = collection.width;
  Bags bags = read_bags(ids, offsets, per_sample_weights, batch_size, width, zero_unknown);
  Tensor out = empty(batch_size, width, aoti_torch_dtype_float32());
  if (batch_size == 0 || width == 0) return out;
  const auto num_features = static_cast<int64_t>(collection.features.size());
  check(keys || num_features == bags.num_keys, "offsets", "bags for each feature and for no other");
  bags.out = static_cast<float*>(out.mutable_data_ptr());
  if (keys) pool_all(with_keys(collection.features, *keys, bags.num_keys), bags);
  else pool_all(collection.features, bags);
  return out;
}

std::vector<Tensor> with_layouts(std::vector<Tensor> tables, const Tensor& feature_layout,
    const Tensor& table_layout, const Tensor& block_layout, const Tensor& groups) {
  tables.insert(tables.end(), {feature_layout, table_layout, block_layout, groups});
  return tables;
}

Tensor packed_embedding_bag(const Tensor& ids, const Tensor& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::vector<Tensor>& tables,
    const Tensor& feature_layout, const Tensor& table_layout, const Tensor& block_layout,
    const Tensor& groups, const std::optional<std::vector<int64_t>>& keys, int64_t batch_size,
    int64_t width, bool zero_unknown) {
  const Collection collection(
      with_layouts(tables, feature_layout, table_layout, block_layout, groups));
  check(collection.width == width, "feature_layout", "columns for the whole output");
  return pool_batch(
      collection, ids, offsets, per_sample_weights, keys, batch_size, zero_unknown);
}

// dnis_torchrec::open_collection, pool_opened and close_collection: the same for a process that
// looks up many times, whose layouts are read once. A number stands for a collection, because a
// pointer from outside could point anywhere.

using Opened = std::shared_ptr<const Collection>;

struct OpenedCollections {
  std::shared_mutex mutex;
  std::unordered_map<int64_t, Opened> by_number;
  // Behind a number by chance: one that was written down elsewhere names nothing here.
  int64_t next = static_cast<int64_t>(std::random_device{}()) << 24;
};

OpenedCollections& opened_collections() {
  static auto* all = new OpenedCollections;  // never destroyed: threads may look up at exit
  return *all;
}

int64_t open_collection(const std::vector<Tensor>& tables, const Tensor& feature_layout,
    const Tensor& table_layout, const Tensor& block_layout, const Tensor& groups) {
  auto collection = Collection::opened(
      with_layouts(tables, feature_layout, table_layout, block_layout, groups));
  OpenedCollections& all = opened_collections();
  const std::lock_guard<std::shared_mutex> guard(all.mutex);
  all.by_number[all.next] = std::move(collection);
  return all.next++;
}

void close_collection(int64_t number) {
  Opened collection;  // freed once the lock is
  OpenedCollections& all = opened_collections();
  const std::lock_guard<std::shared_mutex> guard(all.mutex);
  const auto found = all.by_number.find(number);
  if (found == all.by_number.end()) return;
  collection = std::move(found->second);
  all.by_number.erase(found);
}

Tensor pool_opened(int64_t number, const Tensor& ids, const Tensor& offsets,
    const std::optional<Tensor>& per_sample_weights,
    const std::optional<std::vector<int64_t>>& keys, int64_t batch_size, bool zero_unknown) {
  OpenedCollections& all = opened_collections();
  Opened collection;
  {
    const std::shared_lock<std::shared_mutex> guard(all.mutex);
    const auto entry = all.by_number.find(number);
    check(entry != all.by_number.end(), "collection", "one that is open");
    collection = entry->second;
  }
  if (__builtin_expect(!collection->is_current(), 0)) {
    collection = Collection::opened(collection->tensors);
    const std::lock_guard<std::shared_mutex> guard(all.mutex);
    const auto entry = all.by_number.find(number);
    if (entry != all.by_number.end()) entry->second = collection;
  }
  return pool_batch(
      *collection, ids, offsets, per_sample_weights, keys, batch_size, zero_unknown);
}

// dnis_torchrec::bag_offsets: where bags begin, from their lengths, which are checked on the way.

// Feature `index` of names that line breaks separate.
std::string one_of(const std::string& names, int64_t index) {
  size_t begin = 0;
  for (; index > 0; --index) begin = names.find('\n', begin) + 1;
  return "feature '" + names.substr(begin, names.find('\n', begin) - begin) + "'";
}

std::string all_of(const std::string& names) {
  std::string place = "features '";
  for (const char letter : names)
    place += letter == '\n' ? std::string("', '") : std::string(1, letter);
  return place + "'";
}

[[noreturn]] void refuse(
    const std::string& place, const std::string& requirement, const std::string& received) {
  throw std::invalid_argument(place + ": expected " + requirement + ", got " + received);
}

template <typename Length>
void add_up(const Length* lengths, int64_t num_bags, int64_t num_ids, int64_t batch_size,
    const std::string& names, int64_t* offsets) {
  int64_t total = 0;
  offsets[0] = 0;
  for (int64_t bag = 0; bag < num_bags; ++bag) {
    const int64_t length = static_cast<int64_t>(lengths[bag]);
    if (__builtin_expect(length < 0 || length > num_ids - total, 0)) {
      const std::string place = one_of(names, bag / batch_size),
                        sample = " in sample " + std::to_string(bag % batch_size);
      if (length < 0) refuse(place, "lengths of at least 0", std::to_string(length) + sample);
      const std::string left = std::to_string(num_ids - total);
      refuse(place, "no more ids than there are",
          "a bag of " + std::to_string(length) + sample + ", with " + left + " left");
    }
    total += length;
    offsets[bag + 1] = total;
  }
  if (total != num_ids) {
    refuse(all_of(names), "as many ids as their lengths add up to, " + std::to_string(total),
        std::to_string(num_ids));
  }
}

// The F names, UTF-8, separated by line breaks. A tensor, because torch's stable ABI loses the
// memory of every string.
std::string text_of(const Tensor& names) {
  if (names.scalar_type() != ScalarType::Byte || !names.is_contiguous() || !names.is_cpu()) {
    refuse("bag_offsets: features", "contiguous uint8 on the CPU", "others");
  }
  return {static_cast<const char*>(names.const_data_ptr()), static_cast<size_t>(names.numel())};
}

// `lengths`: (F, B) int32 or int64.
Tensor bag_offsets(Tensor lengths, Tensor ids, Tensor names) {
  const std::string features = text_of(names);
  const ScalarType dtype = lengths.scalar_type();
  const bool is_wide = dtype == ScalarType::Long;
  if (!is_wide && dtype != ScalarType::Int)
    refuse(all_of(features), "int32 or int64 lengths", "others");
  int64_t num_features = 1;
  for (const char letter : features) num_features += letter == '\n';
  const bool fits = lengths.dim() == 2 && lengths.size(0) == num_features &&
                    lengths.is_contiguous() && lengths.is_cpu();
  if (!fits) refuse(all_of(features), "contiguous lengths of shape (F, B) on the CPU", "others");
  Tensor offsets = empty(lengths.numel() + 1, 1, aoti_torch_dtype_int64(), 1);
  const auto add_up_of = [&](const auto* data) {
    add_up(data, lengths.numel(), ids.numel(), lengths.size(1), features,
        static_cast<int64_t*>(offsets.mutable_data_ptr()));
  };
  const void* data = lengths.const_data_ptr();
  if (is_wide) add_up_of(static_cast<const int64_t*>(data));
  else add_up_of(static_cast<const int32_t*>(data));
  return offsets;
}

// dnis_torchrec::encode_rows: rows as bit fields, or as the values that those stand for.

template <typename Number>
Number* numbers_of(const Tensor& tensor, ScalarType dtype, int64_t count, const char* argument) {
  const bool fits = tensor.scalar_type() == dtype && tensor.numel() == count;
  if (!fits || !tensor.is_contiguous() || !tensor.is_cpu())
    refuse(std::string("encode_rows: ") + argument, "contiguous numbers on the CPU", "others");
  if constexpr (std::is_const_v<Number>) return static_cast<Number*>(tensor.const_data_ptr());
  else return static_cast<Number*>(tensor.mutable_data_ptr());
}

// The codes of every block, and those of rows of none: of no bytes. Integers hold bits and orders.
std::vector<BlockCodes> codes_of_blocks(const Tensor& bits, const Tensor& scale,
    const Tensor& shift, const std::optional<Tensor>& gain, const std::optional<Tensor>& feedback,
    std::vector<int64_t>& integers) {
  const int64_t num_blocks = bits.size(0), dim = bits.size(1), size = num_blocks * dim;
  const auto* widths = numbers_of<const uint8_t>(bits, ScalarType::Byte, size, "bits");
  const auto* scales = numbers_of<const float>(scale, ScalarType::Float, size, "scale");
  const auto* shifts = numbers_of<const int16_t>(shift, ScalarType::Short, size, "shift");
  const float *gains = nullptr, *shares = nullptr;
  if (gain) gains = numbers_of<const float>(*gain, ScalarType::Float, size, "gain");
  if (feedback)
    shares = numbers_of<const float>(*feedback, ScalarType::Float, size * dim, "feedback");
  integers.resize(static_cast<size_t>(2 * size));
  std::vector<BlockCodes> blocks(static_cast<size_t>(num_blocks + 1));
  for (int64_t s = 0; s < num_blocks; ++s) {
    int64_t *of_block = integers.data() + 2 * s * dim, *order = of_block + dim, num_bits = 0;
    const float* own = shares == nullptr ? nullptr : shares + s * dim * dim;
    const bool moves = own != nullptr && std::any_of(own, own + dim * dim, [](float share) {
      return share != 0.f;
    });
    for (int64_t c = 0; c < dim; ++c) {
      const int64_t width = of_block[c] = widths[s * dim + c];
      if (width > FLOAT_BITS) refuse("encode_rows: bits", "at most 32", std::to_string(width));
      num_bits = (width == FLOAT_BITS ? (num_bits + 7) / 8 * 8 : num_bits) + width;
      order[c] = c;
    }
    std::stable_sort(
        order, order + dim, [&](int64_t c, int64_t d) { return of_block[c] < of_block[d]; });
    blocks[static_cast<size_t>(s)] = {of_block, order, scales + s * dim, shifts + s * dim,
        gains == nullptr ? nullptr : gains + s * dim, moves ? own : nullptr, (num_bits + 7) / 8};
  }
  return blocks;
}

// Up to sixteen rows of a block, and where their bit fields begin.
struct Tile {
  const BlockCodes* codes;
  int64_t first, count, byte;
};

// Writes uint8, the fields of one block behind those of another, or float32, where rows of no block
// stay as they are; false where a value is NaN or infinite. Threads write rows of their own.
bool encode_rows(Tensor values, Tensor blocks, Tensor bits, Tensor scale, Tensor shift,
    std::optional<Tensor> gain, std::optional<Tensor> feedback, Tensor out) {
  if (bits.dim() != 2 || bits.size(0) > MOST_BLOCKS || bits.size(1) > MOST_COLUMNS)
    refuse("encode_rows: bits", "shape (S, D)", "another");
  std::vector<int64_t> integers;
  const auto codes = codes_of_blocks(bits, scale, shift, gain, feedback, integers);
  const int64_t dim = bits.size(1), num_rows = blocks.numel(), num_values = num_rows * dim;
  const auto* block_of = numbers_of<const int64_t>(blocks, ScalarType::Long, num_rows, "blocks");
  const auto* from = numbers_of<const float>(values, ScalarType::Float, num_values, "values");
  std::vector<int64_t> ends(codes.size() + 1), rows(static_cast<size_t>(num_rows));
  for (int64_t i = 0; i < num_rows; ++i) {
    if (block_of[i] < 0 || block_of[i] >= static_cast<int64_t>(codes.size()))
      refuse("encode_rows: blocks", "numbers of blocks", std::to_string(block_of[i]));
    ++ends[static_cast<size_t>(block_of[i]) + 1];
  }
  std::vector<Tile> tiles;
  int64_t num_bytes = 0;
  for (size_t s = 0; s < codes.size(); ++s) {
    const int64_t stride = codes[s].stride, last = ends[s + 1] += ends[s];
    for (int64_t first = ends[s]; first < last; first += LANES) {
      tiles.push_back({&codes[s], first, std::min(LANES, last - first), num_bytes});
      num_bytes += tiles.back().count * stride;
    }
  }
  for (int64_t i = 0; i < num_rows; ++i)  // ends[s] is where block s begins, and becomes its end
    rows[static_cast<size_t>(ends[static_cast<size_t>(block_of[i])]++)] = i;
  const bool is_packed = out.scalar_type() == ScalarType::Byte;
  uint8_t* fields = nullptr;
  float* numbers = nullptr;
  if (is_packed) fields = numbers_of<uint8_t>(out, ScalarType::Byte, num_bytes, "out");
  else numbers = numbers_of<float>(out, ScalarType::Float, num_values, "out");
  const auto encode = DNIS_WIDEST(encode);
  std::atomic<bool> are_finite{true};
  const auto encode_tiles = [&](int64_t begin, int64_t end) {
    std::vector<float> columns(static_cast<size_t>(dim * LANES));
    for (int64_t t = begin; t < end; ++t) {
      const Tile& tile = tiles[static_cast<size_t>(t)];
      if (!encode(*tile.codes, dim, from, rows.data() + tile.first, tile.count,
              columns.data(), is_packed ? fields + tile.byte : nullptr, numbers))
        are_finite = false;
    }
  };
  torch::stable::parallel_for(0, static_cast<int64_t>(tiles.size()),
      VALUES_PER_THREAD / (dim * LANES + 1) + 1, encode_tiles);
  return are_finite;
}

}  // namespace

extern "C" const char* dnis_instruction_set(const char* limit) { return limit_level(limit); }

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def(
      "packed_embedding_bag(Tensor ids, Tensor offsets, Tensor? per_sample_weights, Tensor[] "
      "tables, Tensor feature_layout, Tensor table_layout, Tensor block_layout, Tensor groups, "
      "int[]? keys, SymInt batch_size, int width, bool zero_unknown) -> Tensor");
  library.def(
      "open_collection(Tensor[] tables, Tensor feature_layout, Tensor table_layout, Tensor "
      "block_layout, Tensor groups) -> int");
  library.def(
      "pool_opened(int collection, Tensor ids, Tensor offsets, Tensor? per_sample_weights, "
      "int[]? keys, int batch_size, bool zero_unknown) -> Tensor");
  library.def("close_collection(int collection) -> ()");
  library.def("bag_offsets(Tensor lengths, Tensor ids, Tensor features) -> Tensor");
  library.def(
      "encode_rows(Tensor values, Tensor blocks, Tensor bits, Tensor scale, Tensor shift, "
      "Tensor? gain, Tensor? feedback, Tensor(a!) out) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) {
  library.impl("packed_embedding_bag", TORCH_BOX(&packed_embedding_bag));
  library.impl("open_collection", TORCH_BOX(&open_collection));
  library.impl("pool_opened", TORCH_BOX(&pool_opened));
  library.impl("bag_offsets", TORCH_BOX(&bag_offsets));
  library.impl("encode_rows", TORCH_BOX(&encode_rows));
}

// It takes no tensor, by whose device others are chosen.
STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CompositeExplicitAutograd, library) {
  library.impl("close_collection", TORCH_BOX(&close_collection));
}
