// What training adds to a step, on the CPU: soft selection forward and backward; bags split by
// block, with a place for every block, or for those alone that occur; rows rounded to the values
// that they are served as. ops/select.py says what each operator means.
//
// Built against torch's stable ABI: it compiles in seconds, and one build serves every torch
// from 2.11 on. The innermost loops, over a row of D numbers, are those of row_kernel.h. Shapes: B
// batch, F features, K pieces, P <= I pieces that occur, R rows of a bag's pieces, S blocks, I ids
// of a batch, N rows of a shard.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "blocks.h"

namespace {

using namespace dnis_torchrec;

// A row of D numbers at a time.
template <typename Number>
struct RowLoops {
  void (*multiply)(const Number* left, const Number* right, Number* to, int64_t count);
  void (*add_product)(const Number* left, const Number* right, Number* to, int64_t count);
  bool (*multiply_finite)(const Number* left, const Number* right, Number* to, int64_t count);
  bool (*are_finite)(const Number* numbers, int64_t count);
};

#define DNIS_LOOPS "row_kernel.h"
#include "levels.h"

constexpr const char* AS_MANY_IDS = "as many ids as they say";
constexpr int64_t LINES_AHEAD = 8;  // between what is written and what is asked of memory

enum class Task { SELECT, SPREAD, GATHER_ALPHA };

// One piece of a bag: where it, its output and its row of alpha begin.
template <typename Number>
struct Piece {
  int64_t in, out, alpha, dim;  // alpha: -1 for an empty bag
  const Number* divisor;        // null for 1
  bool is_first, is_last;       // of its output

  void divide(Number* to) const {
    if (divisor == nullptr || *divisor == Number(1)) return;
    for (int64_t d = 0; d < dim; ++d) to[d] /= *divisor;
  }
};

// A place for every piece of every bag, and a row of alpha for each.
template <typename Number>
struct DensePieces {
  struct Column {
    int64_t in_column, out_column, dim, alpha_offset, output, first_row, num_rows;
    bool is_first, is_last;  // of its output
  };
  std::vector<Column> columns;
  const int32_t* rows;               // (B, K), -1 for an empty bag
  const Number* divisors = nullptr;  // (B, outputs), or null
  int64_t num_outputs = 0;
  int64_t batch_size, in_width, out_width;

  DensePieces(const Tensor& wide, const Tensor& narrow, const Tensor& rows_,
      const std::optional<Tensor>& divisors_, const Tensor& layout, int64_t alpha_size)
      : batch_size(wide.size(0)), in_width(wide.size(1)), out_width(narrow.size(1)) {
    check(narrow.size(0) == batch_size, "tensors", "two of batch B");
    check(layout.dim() == 2 && layout.size(1) == 7, "layout", "shape (K, 7)");
    const int64_t* fields = numbers<int64_t>(layout, ScalarType::Long, "layout");
    columns.resize(layout.size(0));
    for (size_t k = 0; k < columns.size(); ++k, fields += 7) {
      columns[k] = {
          fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], true, true};
      if (k > 0 && columns[k - 1].output == columns[k].output)
        columns[k].is_first = columns[k - 1].is_last = false;
    }
    rows = numbers<int32_t>(rows_, ScalarType::Int, "rows");
    const int64_t num_pieces = static_cast<int64_t>(columns.size());
    check(rows_.dim() == 2 && rows_.size(0) == batch_size && rows_.size(1) == num_pieces, "rows",
        "shape (B, K)");
    if (divisors_) {
      divisors = numbers<Number>(*divisors_, wide.scalar_type(), "divisors");
      check(divisors_->dim() == 2 && divisors_->size(0) == batch_size, "divisors",
          "shape (B, outputs)");
      num_outputs = divisors_->size(1);
    }
    for (const Column& column : columns) check_column(column, alpha_size);
    bool fits = true;
    const int32_t* row = rows;
    for (int64_t b = 0; b < batch_size; ++b)
      for (const Column& column : columns) {
        const int64_t number = *row++ - column.first_row;
        fits &= (row[-1] < 0) | ((number >= 0) & (number < column.num_rows));
      }
    check(fits, "rows", "rows of alpha");
  }

  void check_column(const Column& column, int64_t alpha_size) const {
    check(lies_within(column.in_column, column.dim, in_width), "layout", "pieces inside");
    check(lies_within(column.out_column, column.dim, out_width), "layout", "outputs inside");
    check(divisors == nullptr || lies_within(column.output, 1, num_outputs), "divisors",
        "one for each output");
    check(lies_within(column.alpha_offset, 0, alpha_size), "layout", "alphas inside");
    const int64_t left = alpha_size - column.alpha_offset;
    const int64_t num_rows = column.dim == 0 ? MOST : left / column.dim;
    check(lies_within(column.first_row, column.num_rows, num_rows), "layout", "rows of alpha");
  }

  // Calls visit(piece) for all pieces of a sample.
  template <typename Visit>
  void walk(int64_t sample, const Visit& visit) const {
    const int32_t* row = rows + sample * static_cast<int64_t>(columns.size());
    for (const Column& column : columns) {
      const int64_t alpha = column.alpha_offset + static_cast<int64_t>(*row) * column.dim;
      visit(Piece<Number>{sample * in_width + column.in_column,
          sample * out_width + column.out_column, *row++ < 0 ? -1 : alpha, column.dim,
          divisors == nullptr ? nullptr : divisors + sample * num_outputs + column.output,
          column.is_first, column.is_last});
    }
  }
};

// Pieces that occur, laid out over the keys of their feature, row by row.
template <typename Number>
struct SparsePieces {
  struct Feature {
    int64_t in_column, out_column, dim, num_keys, alpha_offset, alpha_stride;
  };
  std::vector<Feature> features;
  const int64_t* starts;
  const int32_t* rows;
  int64_t batch_size, num_rows, in_width, out_width;

  SparsePieces(const Tensor& wide, const Tensor& narrow, const Tensor& starts_, const Tensor& rows_,
      const Tensor& layout, int64_t alpha_size)
      : batch_size(narrow.size(0)),
        num_rows(wide.size(0)),
        in_width(wide.size(1)),
        out_width(narrow.size(1)) {
    starts = numbers<int64_t>(starts_, ScalarType::Long, "starts");
    rows = numbers<int32_t>(rows_, ScalarType::Int, "rows");
    check(layout.dim() == 2 && layout.size(1) == 6, "layout", "shape (F, 6)");
    const int64_t* fields = numbers<int64_t>(layout, ScalarType::Long, "layout");
    features.resize(layout.size(0));
    const int64_t num_features = static_cast<int64_t>(features.size());
    check(starts_.numel() == num_features * (batch_size + 1), "starts", "shape (F, B + 1)");
    for (int64_t f = 0; f < num_features; ++f, fields += 6) {
      features[f] = {fields[0], fields[1], fields[2], fields[3], fields[4], fields[5]};
      check_feature(features[f], starts + f * (batch_size + 1), rows_.numel(), alpha_size);
    }
  }

  void check_feature(
      const Feature& feature, const int64_t* start, int64_t num_pieces, int64_t alpha_size) const {
    const bool sound = feature.num_keys > 0 && feature.num_keys <= MOST && feature.dim >= 0 &&
                       feature.dim <= MOST;  // so that no product overflows
    check(sound && lies_within(feature.in_column, feature.num_keys * feature.dim, in_width),
        "layout", "keys inside");
    check(lies_within(feature.out_column, feature.dim, out_width), "layout", "outputs inside");
    check(lies_within(feature.alpha_offset, feature.dim, alpha_size), "layout", "alphas inside");
    const int64_t left = alpha_size - feature.alpha_offset - feature.dim;
    const bool has_stride = feature.alpha_stride >= 0 && feature.alpha_stride <= alpha_size;
    check(has_stride, "layout", "alphas inside");
    bool rises = start[0] >= 0;
    for (int64_t b = 0; b < batch_size; ++b) rises &= start[b] <= start[b + 1];
    check(rises && start[batch_size] <= num_pieces, "starts", "rising ones");
    const int64_t count = start[batch_size] - start[0];
    check(
        count == 0 || (count - 1) / feature.num_keys < num_rows, "starts", "pieces that there are");
    bool fits = true;
    for (int64_t p = start[0]; p < start[batch_size]; ++p)
      fits &= rows[p] >= 0 && rows[p] * feature.alpha_stride <= left;
    check(fits, "rows", "rows of alpha");
  }

  // Calls visit(piece) for all pieces of a sample.
  template <typename Visit>
  void walk(int64_t sample, const Visit& visit) const {
    const int64_t* start = starts;
    for (const Feature& feature : features) {
      const int64_t begin = start[sample], end = start[sample + 1], first = begin - start[0];
      const int64_t out = sample * out_width + feature.out_column;
      int64_t row = first / feature.num_keys, key = first % feature.num_keys;
      if (begin == end) visit(Piece<Number>{0, out, -1, feature.dim, nullptr, true, true});
      for (int64_t p = begin; p < end; ++p) {
        visit(Piece<Number>{row * in_width + feature.in_column + key * feature.dim, out,
            feature.alpha_offset + rows[p] * feature.alpha_stride, feature.dim, nullptr,
            p == begin, p + 1 == end});
        if (++key == feature.num_keys) ++row, key = 0;
      }
      start += batch_size + 1;
    }
  }
};

// out = bag_sums * alpha[row], summed over the pieces of an output, divided by its divisor. `out`
// may be `bag_sums`.
template <typename Number, typename Pieces>
void select(const Pieces& pieces, const Number* bag_sums, const Number* alpha, Number* out) {
  const RowLoops<Number>& loops = DNIS_WIDEST(LOOPS<Number>);
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      pieces.walk(b, [&](const Piece<Number>& piece) {
        const Number* from = bag_sums + piece.in;
        Number* to = out + piece.out;
        if (piece.alpha < 0) {
          if (piece.is_first) std::fill(to, to + piece.dim, Number(0));
        } else if (piece.is_first) {
          loops.multiply(from, alpha + piece.alpha, to, piece.dim);
        } else {
          loops.add_product(from, alpha + piece.alpha, to, piece.dim);
        }
        if (piece.is_last) piece.divide(to);
      });
    }
  };
  torch::stable::parallel_for(0, pieces.batch_size, SAMPLES_PER_THREAD, range);
}

// Asks for memory that is about to be written: stores wait for their lines, and do not run ahead as
// loads do.
template <typename Number>
void prefetch_ahead(const Number* to, int64_t count) {
  constexpr int64_t per_line = 64 / sizeof(Number);
  for (int64_t d = 0; d < count; d += per_line)
    __builtin_prefetch(to + LINES_AHEAD * per_line + d, 1);
}

// grad_sums = grad * alpha[row] / divisor; pieces of empty bags get zero, or stay as they are.
// Returns whether every number of `grad` is finite, on the way.
template <typename Number, typename Pieces>
bool spread(const Pieces& pieces, const Number* grad, const Number* alpha, Number* grad_sums,
    bool keep_empty) {
  const RowLoops<Number>& loops = DNIS_WIDEST(LOOPS<Number>);
  std::atomic<bool> all_finite{true};
  const auto range = [&](int64_t begin, int64_t end) {
    bool is_finite = true;
    for (int64_t b = begin; b < end; ++b) {
      pieces.walk(b, [&](const Piece<Number>& piece) {
        const Number* from = grad + piece.out;
        Number* to = grad_sums + piece.in;
        if (piece.alpha < 0) {
          is_finite &= loops.are_finite(from, piece.dim);
          if (!keep_empty) std::fill(to, to + piece.dim, Number(0));
          return;
        }
        prefetch_ahead(to, piece.dim);
        is_finite &= loops.multiply_finite(from, alpha + piece.alpha, to, piece.dim);
        piece.divide(to);
      });
    }
    if (!is_finite) all_finite = false;
  };
  torch::stable::parallel_for(0, pieces.batch_size, SAMPLES_PER_THREAD, range);
  return all_finite;
}

// grad_alpha[row] += grad * bag_sums / divisor.
template <typename Number, typename Pieces>
void gather_alpha(const Pieces& pieces, const Number* grad, const Number* bag_sums,
    Number* grad_alpha, int64_t alpha_size) {
  const RowLoops<Number>& loops = DNIS_WIDEST(LOOPS<Number>);
  sum_over_samples(pieces.batch_size, grad_alpha, alpha_size, [&](int64_t b, Number* sum) {
    pieces.walk(b, [&](const Piece<Number>& piece) {
      if (piece.alpha < 0) return;
      const Number *left = grad + piece.out, *right = bag_sums + piece.in;
      Number* to = sum + piece.alpha;
      const Number divisor = piece.divisor == nullptr ? Number(1) : *piece.divisor;
      if (divisor == Number(1)) return loops.add_product(left, right, to, piece.dim);
      for (int64_t d = 0; d < piece.dim; ++d) to[d] += left[d] * right[d] / divisor;
    });
  });
}

// `wide` holds the pieces, `narrow` the outputs; which of them, or of `alpha`, is written depends
// on the task. `places` tell where the pieces lie.
template <template <typename> typename Pieces, typename Number, typename... Places>
bool run_typed(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& narrow,
    bool keep_empty, const Places&... places) {
  const ScalarType dtype = wide.scalar_type();
  check(wide.dim() == 2 && narrow.dim() == 2, "tensors", "matrices");
  const Pieces<Number> pieces(wide, narrow, places..., alpha.numel());
  if (task == Task::SELECT) {
    select(pieces, numbers<Number>(wide, dtype, "bag_sums"), numbers<Number>(alpha, dtype, "alpha"),
        mutable_numbers<Number>(narrow, dtype, "out"));
  } else if (task == Task::SPREAD) {
    return spread(pieces, numbers<Number>(narrow, dtype, "grad"),
        numbers<Number>(alpha, dtype, "alpha"), mutable_numbers<Number>(wide, dtype, "grad_sums"),
        keep_empty);
  } else {
    gather_alpha(pieces, numbers<Number>(narrow, dtype, "grad"),
        numbers<Number>(wide, dtype, "bag_sums"),
        mutable_numbers<Number>(alpha, dtype, "grad_alpha"), alpha.numel());
  }
  return true;
}

template <template <typename> typename Pieces, typename... Places>
bool run(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& narrow, bool keep_empty,
    const Places&... places) {
  const Tensor& written = task == Task::SELECT ? narrow : task == Task::SPREAD ? wide : alpha;
  const auto check_place = [&](const auto& place) {  // divisors alone are no Tensor, and numbers
    if constexpr (std::is_same_v<decltype(place), const Tensor&>)
      check_apart(written, place, "rows");
  };
  (check_place(places), ...);
  if (wide.scalar_type() == ScalarType::Float)
    return run_typed<Pieces, float>(task, wide, alpha, narrow, keep_empty, places...);
  check(wide.scalar_type() == ScalarType::Double, "bag_sums", "float32 or float64");
  return run_typed<Pieces, double>(task, wide, alpha, narrow, keep_empty, places...);
}

void select_pooled(Tensor bag_sums, Tensor alpha, Tensor rows, std::optional<Tensor> divisors,
    Tensor layout, Tensor out) {
  run<DensePieces>(Task::SELECT, bag_sums, alpha, out, false, rows, divisors, layout);
}

bool spread_gradient(Tensor grad, Tensor alpha, Tensor rows, std::optional<Tensor> divisors,
    Tensor layout, bool keep_empty, Tensor grad_sums) {
  return run<DensePieces>(
      Task::SPREAD, grad_sums, alpha, grad, keep_empty, rows, divisors, layout);
}

void sum_alpha_gradient(Tensor grad, Tensor bag_sums, Tensor rows, std::optional<Tensor> divisors,
    Tensor layout, Tensor grad_alpha) {
  run<DensePieces>(Task::GATHER_ALPHA, bag_sums, grad_alpha, grad, false, rows, divisors, layout);
}

void select_sparse(
    Tensor bag_sums, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, Tensor out) {
  run<SparsePieces>(Task::SELECT, bag_sums, alpha, out, true, starts, rows, layout);
}

void spread_sparse_gradient(
    Tensor grad, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, Tensor grad_sums) {
  run<SparsePieces>(Task::SPREAD, grad_sums, alpha, grad, true, starts, rows, layout);
}

void sum_sparse_alpha_gradient(
    Tensor grad, Tensor bag_sums, Tensor starts, Tensor rows, Tensor layout, Tensor grad_alpha) {
  run<SparsePieces>(Task::GATHER_ALPHA, bag_sums, grad_alpha, grad, true, starts, rows, layout);
}

template <typename Id, typename Length>
void fill_rows_typed(const Id* ids, const Length* lengths, int64_t num_ids, int64_t num_keys,
    int64_t batch_size, const std::vector<Routing>& routings, const std::vector<int64_t>& places,
    int32_t* rows, int64_t num_pieces) {
  std::vector<int64_t> begins(static_cast<size_t>(num_keys + 1), 0);
  for (int64_t key = 0; key < num_keys; ++key) {
    int64_t end = begins[key];
    for (int64_t b = 0; b < batch_size; ++b) {
      const int64_t length = static_cast<int64_t>(lengths[key * batch_size + b]);
      check(lies_within(end, length, num_ids), "lengths", AS_MANY_IDS);
      end += length;
    }
    begins[key + 1] = end;
  }
  check(begins.back() == num_ids, "lengths", AS_MANY_IDS);
  for (size_t f = 0; f < routings.size(); ++f) {
    const int64_t piece = places[3 * f], key = places[3 * f + 1], first_row = places[3 * f + 2];
    check(piece >= 0 && piece < num_pieces && key >= 0 && key < num_keys, "places",
        "pieces and keys that exist");
    check(lies_within(first_row, routings[f].num_blocks(), MOST), "places", "rows of alpha");
    routings[f].with_blocks([&](const auto& block) {
      int64_t next = begins[key];
      for (int64_t b = 0; b < batch_size; ++b) {
        const int64_t length = static_cast<int64_t>(lengths[key * batch_size + b]);
        check(length == 0 || length == 1, "lengths", "bags of at most one id");
        rows[b * num_pieces + piece] =
            length == 0 ? -1
                        : static_cast<int32_t>(first_row + block(static_cast<int64_t>(ids[next])));
        next += length;
      }
    });
  }
}

// Rows of alpha of single-id features. `places` holds three numbers each: piece, key, and the row
// of its block 0.
void fill_rows(Tensor ids, Tensor lengths, std::vector<Tensor> routings,
    std::vector<int64_t> places, Tensor rows) {
  check(rows.dim() == 2 && rows.scalar_type() == ScalarType::Int, "rows", "int32 of shape (B, K)");
  check(places.size() == 3 * routings.size(), "places", "three for each routing");
  const int64_t batch_size = rows.size(0), num_pieces = rows.size(1);
  if (batch_size == 0) return;
  check(lengths.numel() % batch_size == 0, "lengths", "shape (F * B,)");
  const std::vector<Routing> routes(routings.begin(), routings.end());
  int32_t* to = mutable_numbers<int32_t>(rows, ScalarType::Int, "rows");
  check_apart(rows, lengths, "lengths");
  with_bags(ids, lengths, [&](const auto* id, const auto* length) {
    fill_rows_typed(id, length, ids.numel(), lengths.numel() / batch_size, batch_size, routes,
        places, to, num_pieces);
  });
}

// Whether no bag is longer than the longest of its key, and every id lies in 0 .. the bound of its
// key.
bool are_good_bags(Tensor ids, Tensor lengths, Tensor bounds, Tensor longest) {
  const int64_t num_keys = bounds.numel(), num_bags = lengths.numel(), num_ids = ids.numel();
  const int64_t* bound = numbers<int64_t>(bounds, ScalarType::Long, "bounds");
  const int64_t* most = numbers<int64_t>(longest, ScalarType::Long, "longest");
  check(num_keys > 0 && num_bags % num_keys == 0 && longest.numel() == num_keys, "bounds",
      "one for each key");
  bool are_good = true;
  with_bags(ids, lengths, [&](const auto* id, const auto* length) {
    int64_t left = num_ids;
    for (int64_t key = 0; key < num_keys && are_good; ++key) {
      // so that good lengths do not overflow their sum
      const int64_t longest_of_key = std::min(most[key], num_ids);
      uint64_t sum = 0;
      for (int64_t b = 0; b < num_bags / num_keys; ++b, ++length) {
        are_good &= (*length >= 0) & (static_cast<int64_t>(*length) <= longest_of_key);
        sum += static_cast<uint64_t>(*length);
      }
      are_good &= sum <= static_cast<uint64_t>(left);
      if (!are_good) break;
      const int64_t count = static_cast<int64_t>(sum);
      left -= count;
      for (int64_t i = 0; are_good && i < count; ++i, ++id)
        are_good = *id >= 0 && static_cast<int64_t>(*id) < bound[key];
    }
    are_good &= left == 0;
  });
  return are_good;
}

// Weights of ids, if there are any, of whatever dtype, and where they go.
struct Weights {
  const char* from = nullptr;
  char* to = nullptr;
  size_t size = 0;

  Weights(const std::optional<Tensor>& weights, const std::optional<Tensor>& out, int64_t num_ids) {
    check(weights.has_value() == out.has_value(), "weights", "room for them, or neither");
    if (!weights) return;
    for (const Tensor& tensor : {*weights, *out}) {
      check_plain(tensor, "weights");
      check(tensor.numel() == num_ids && tensor.scalar_type() == weights->scalar_type(), "weights",
          "one for each id");
    }
    from = static_cast<const char*>(weights->const_data_ptr());
    to = static_cast<char*>(out->mutable_data_ptr());
    size = weights->element_size();
  }
};

// Puts ids, and their weights, one behind the other where their pieces begin (next); -1: nowhere.
template <typename Id>
void gather(const Id* ids, int64_t num_ids, const int32_t* piece_of_id, std::vector<int64_t>& next,
    const Weights& weights, const Tensor& out) {
  Id* ids_out = static_cast<Id*>(out.mutable_data_ptr());
  const int64_t num_pieces = static_cast<int64_t>(next.size());
  for (int64_t i = 0; i < num_ids; ++i) {
    const int32_t piece = piece_of_id[i];
    if (piece < 0) continue;
    check(piece < num_pieces && next[piece] < num_ids, "piece_of_id", "pieces that there are");
    const int64_t position = next[piece]++;
    ids_out[position] = ids[i];
    if (weights.from == nullptr) continue;
    std::memcpy(
        weights.to + position * weights.size, weights.from + i * weights.size, weights.size);
  }
}

// Counts the ids of every split bag, and returns which one each id goes to, -1 for what is dropped.
template <typename Id, typename Length>
std::vector<int32_t> count_bags(const Id* ids, const Length* lengths, int64_t num_ids,
    int64_t batch_size, const std::vector<Routing>& routings, const int64_t* pieces,
    const std::vector<int64_t>& first_of, int64_t num_pieces, Length* counts) {
  std::vector<int32_t> bag_of_id(static_cast<size_t>(num_ids), -1);
  std::fill(counts, counts + num_pieces * batch_size, Length(0));
  int64_t i = 0;
  for (size_t f = 0; f < routings.size(); ++f) {
    const int64_t num_blocks = first_of[f + 1] - first_of[f];
    for (int64_t b = 0; b < batch_size; ++b) {
      const int64_t length = static_cast<int64_t>(*lengths++);
      check(lies_within(i, length, num_ids), "lengths", AS_MANY_IDS);
      for (const int64_t end = i + length; i < end; ++i) {
        const int64_t block = routings[f].block(static_cast<int64_t>(ids[i]));
        check(block < num_blocks, "routings", "blocks of their table");
        const int64_t piece = pieces[first_of[f] + block];
        if (piece < 0 || piece >= num_pieces) continue;
        const int64_t bag = piece * batch_size + b;
        bag_of_id[i] = static_cast<int32_t>(bag);
        ++counts[bag];
      }
    }
  }
  check(i == num_ids, "lengths", AS_MANY_IDS);
  return bag_of_id;
}

// Splits the bags of all features by block, ids of a bag in their order. `pieces` holds that of
// every (feature, block), one past the last for what is dropped; the blocks of a feature begin at
// first_of. split_ids and split_weights are filled from the front; what is dropped leaves room at
// their end.
void split_bags(Tensor ids, Tensor lengths, std::optional<Tensor> weights,
    std::vector<Tensor> routings, Tensor pieces, std::vector<int64_t> first_of, int64_t batch_size,
    Tensor split_ids, Tensor split_lengths, std::optional<Tensor> split_weights) {
  for (const Tensor& tensor : {split_ids, split_lengths}) check_plain(tensor, "tensors");
  check(split_ids.scalar_type() == ids.scalar_type() && split_ids.numel() == ids.numel(),
      "split_ids", "room for ids");
  check(split_lengths.scalar_type() == lengths.scalar_type(), "split_lengths",
      "the dtype of lengths");
  const int64_t* piece_of_block = numbers<int64_t>(pieces, ScalarType::Long, "pieces");
  const bool rises = first_of.size() == routings.size() + 1 && first_of.front() >= 0 &&
                     std::is_sorted(first_of.begin(), first_of.end()) &&
                     first_of.back() == pieces.numel();
  check(rises, "first_of", "F + 1 rising places");
  check(batch_size >= 0 && batch_size <= lengths.numel(), "batch_size",
      "no more than there are lengths");
  check(lengths.numel() == static_cast<int64_t>(routings.size()) * batch_size, "lengths",
      "shape (F * B,)");
  const int64_t num_bags = split_lengths.numel();
  const bool are_whole = batch_size == 0 ? num_bags == 0 : num_bags % batch_size == 0;
  check(are_whole && num_bags <= std::numeric_limits<int32_t>::max(), "split_lengths",
      "shape (K * B,), below 2^31");
  const Weights moved_weights(weights, split_weights, ids.numel());
  const std::vector<Routing> routes(routings.begin(), routings.end());
  with_bags(ids, lengths, [&](const auto* id, const auto* length) {
    using Length = std::remove_cv_t<std::remove_pointer_t<decltype(length)>>;
    Length* counts = static_cast<Length*>(split_lengths.mutable_data_ptr());
    const auto bag_of_id = count_bags(id, length, ids.numel(), batch_size, routes, piece_of_block,
        first_of, batch_size == 0 ? 0 : num_bags / batch_size, counts);
    std::vector<int64_t> next(static_cast<size_t>(num_bags));
    std::exclusive_scan(counts, counts + num_bags, next.begin(), int64_t{0});
    gather(id, ids.numel(), bag_of_id.data(), next, moved_weights, split_ids);
  });
}

struct Pieces {
  int64_t* starts;       // (F, B + 1): first piece of every bag
  int32_t* rows;         // row of alpha
  int32_t* sizes;        // ids in a piece
  int32_t* piece_of_id;  // -1 for an id of no block
};

template <typename Id, typename Length>
void find_typed(const Id* ids, const Length* lengths, int64_t num_ids, int64_t batch_size,
    const std::vector<Routing>& routings, const std::vector<int64_t>& features,
    const Pieces& pieces) {
  int64_t i = 0;
  int32_t next = 0;
  std::vector<int64_t> last_bag;
  std::vector<int32_t> piece_of_block;
  for (size_t f = 0; f < routings.size(); ++f) {
    const int64_t first_row = features[3 * f], first_alpha_row = features[3 * f + 1],
                  num_blocks = features[3 * f + 2];
    check(
        num_blocks >= 0 && num_blocks <= routings[f].num_blocks(), "features", "numbers of blocks");
    check(lies_within(first_alpha_row, num_blocks, MOST), "features", "rows of alpha");
    check(first_row >= 0, "features", "first rows of at least 0");
    last_bag.assign(static_cast<size_t>(num_blocks), -1);
    piece_of_block.assign(static_cast<size_t>(num_blocks), 0);
    int64_t* starts = pieces.starts + f * (batch_size + 1);
    for (int64_t b = 0; b < batch_size; ++b) {
      starts[b] = next;
      const int64_t length = static_cast<int64_t>(lengths[f * batch_size + b]);
      check(lies_within(i, length, num_ids), "lengths", AS_MANY_IDS);
      for (const int64_t end = i + length; i < end; ++i) {
        const int64_t id = static_cast<int64_t>(ids[i]);
        check(id <= std::numeric_limits<int64_t>::max() - first_row, "ids", "rows of their table");
        const int64_t block = routings[f].block(id + first_row);
        pieces.piece_of_id[i] = -1;
        if (block >= num_blocks) continue;
        if (last_bag[block] != b) {
          last_bag[block] = b;
          piece_of_block[block] = next;
          pieces.rows[next] = static_cast<int32_t>(first_alpha_row + block);
          pieces.sizes[next++] = 0;
        }
        pieces.piece_of_id[i] = piece_of_block[block];
        ++pieces.sizes[piece_of_block[block]];
      }
    }
    starts[batch_size] = next;
  }
  check(i == num_ids, "lengths", AS_MANY_IDS);
}

// Splits every bag by block. `features` holds three numbers each: row of the table that id 0 is,
// row of alpha of block 0, and number of blocks. Pieces are numbered feature by feature, bag by
// bag, and in a bag as its ids come.
void find_pieces(Tensor ids, Tensor lengths, std::vector<Tensor> routings,
    std::vector<int64_t> features, Tensor starts, Tensor rows, Tensor sizes, Tensor piece_of_id) {
  const int64_t num_features = static_cast<int64_t>(routings.size());
  check(features.size() == 3 * routings.size(), "features", "three numbers for each routing");
  check(starts.dim() == 2 && starts.size(0) == num_features && starts.size(1) >= 1, "starts",
      "shape (F, B + 1)");
  const int64_t batch_size = starts.size(1) - 1;
  check(lengths.numel() == num_features * batch_size, "lengths", "shape (F * B,)");
  check(ids.numel() <= std::numeric_limits<int32_t>::max(), "ids", "fewer than 2^31");
  for (const Tensor& tensor : {rows, sizes, piece_of_id})
    check(tensor.numel() == ids.numel(), "pieces", "room for all");
  const Pieces pieces{mutable_numbers<int64_t>(starts, ScalarType::Long, "starts"),
      mutable_numbers<int32_t>(rows, ScalarType::Int, "rows"),
      mutable_numbers<int32_t>(sizes, ScalarType::Int, "sizes"),
      mutable_numbers<int32_t>(piece_of_id, ScalarType::Int, "piece_of_id")};
  const std::vector<Routing> routes(routings.begin(), routings.end());
  with_bags(ids, lengths, [&](const auto* id, const auto* length) {
    find_typed(id, length, ids.numel(), batch_size, routes, features, pieces);
  });
}

// Lays the pieces of every feature out over its keys, row by row: its j-th goes to key j % keys,
// row j / keys. Returns where the ids of every piece begin. What it reads is read once: whatever
// lies over it, nothing is written outside.
template <typename Length>
std::vector<int64_t> place_pieces(const int64_t* starts, const int32_t* sizes, int64_t num_pieces,
    int64_t batch_size, const std::vector<int64_t>& num_keys, int64_t num_rows, int64_t num_ids,
    Length* lengths_out) {
  std::vector<int64_t> begins(static_cast<size_t>(num_pieces));
  int64_t total = 0;
  for (size_t f = 0; f < num_keys.size(); ++f, starts += batch_size + 1) {
    const int64_t first = starts[0], end = starts[batch_size];
    check(first >= 0 && first <= end && end <= num_pieces, "starts", "rising ones");
    check(end - first <= num_keys[f] * num_rows, "lengths_out", "room for all pieces");
    for (int64_t key = 0; key < num_keys[f]; ++key, lengths_out += num_rows) {
      std::fill(lengths_out, lengths_out + num_rows, Length(0));
      Length* length = lengths_out;
      for (int64_t piece = first + key; piece < end; piece += num_keys[f]) {
        const int32_t size = sizes[piece];
        check(lies_within(total, size, num_ids), "sizes", "as many ids as there are");
        *length++ = static_cast<Length>(size);
        begins[piece] = total;
        total += size;
      }
    }
  }
  return begins;
}

// Orders ids by key, gather row and their place in the bag. ids_out and weights_out are
// filled from the front.
void gather_ids(Tensor ids, std::optional<Tensor> weights, Tensor starts, Tensor sizes,
    Tensor piece_of_id, std::vector<int64_t> num_keys, Tensor ids_out, Tensor lengths_out,
    std::optional<Tensor> weights_out) {
  const int64_t num_ids = ids.numel();
  const bool fits = starts.dim() == 2 && starts.size(0) == static_cast<int64_t>(num_keys.size()) &&
                    starts.size(1) >= 1;
  check(fits, "starts", "shape (F, B + 1)");
  int64_t total_keys = 0;
  for (const int64_t count : num_keys) {
    check(count > 0 && count <= lengths_out.numel(), "num_keys",
        "one at least for each feature, and room for all");
    total_keys += count;
  }
  const int64_t num_rows = total_keys == 0 ? 0 : lengths_out.numel() / total_keys;
  check(lengths_out.numel() == num_rows * total_keys, "lengths_out", "shape (K * R,)");
  check(piece_of_id.numel() == num_ids, "piece_of_id", "one for each id");
  check_plain(ids_out, "ids_out");
  check(ids_out.scalar_type() == ids.scalar_type() && ids_out.numel() == num_ids, "ids_out",
      "room for ids");
  const int32_t* places = numbers<int32_t>(piece_of_id, ScalarType::Int, "piece_of_id");
  const Weights moved_weights(weights, weights_out, num_ids);
  std::vector<int64_t> next;
  with_integers(lengths_out, "lengths_out", [&](const auto* length) {
    using Length = std::remove_cv_t<std::remove_pointer_t<decltype(length)>>;
    next = place_pieces(numbers<int64_t>(starts, ScalarType::Long, "starts"),
        numbers<int32_t>(sizes, ScalarType::Int, "sizes"), sizes.numel(), starts.size(1) - 1,
        num_keys, num_rows, num_ids, static_cast<Length*>(lengths_out.mutable_data_ptr()));
  });
  with_integers(ids, "ids", [&](const auto* id) {
    gather(id, num_ids, places, next, moved_weights, ids_out);
  });
}

constexpr int64_t NUMBERS_PER_THREAD = 1 << 14;  // numbers that outweigh waking a thread

void round_rows(Tensor codes, Tensor routing, std::optional<Tensor> rows, int64_t first_row,
    Tensor weight, Tensor residual) {
  float* weights = mutable_numbers<float>(weight, ScalarType::Float, "weight");
  float* residuals = mutable_numbers<float>(residual, ScalarType::Float, "residual");
  check(weight.dim() == 2 && residual.dim() == 2, "weight", "shape (N, D)");
  const int64_t num_rows = weight.size(0), dim = weight.size(1);
  check(residual.size(0) == num_rows && residual.size(1) == dim, "residual",
      "the shape of the weights");
  const float* fields = numbers<float>(codes, ScalarType::Float, "codes");
  check(codes.dim() == 3 && codes.size(1) == 4 && codes.size(2) == dim, "codes",
      "shape (S + 1, 4, D)");
  const int64_t num_codes = codes.size(0);
  const int64_t* ids = rows ? numbers<int64_t>(*rows, ScalarType::Long, "rows") : nullptr;
  const int64_t count = rows ? rows->numel() : num_rows;
  const Routing blocks(routing);
  check(first_row >= 0 && first_row <= MOST << 20, "first_row", "a row of the table");
  const bool is_map = blocks.kind == Routing::BYTES || blocks.kind == Routing::SHORTS;
  check(
      !is_map || lies_within(first_row, num_rows, blocks.size), "routing", "all rows of the shard");
  check_apart(weight, residual, "residual");
  for (const Tensor& written : {weight, residual}) {
    check_apart(written, codes, "codes");
    check_apart(written, routing, "routing");
    if (rows) check_apart(written, *rows, "rows");
  }
  const auto round = DNIS_WIDEST(round_row);
  std::atomic<bool> fits{true};
  blocks.with_blocks([&](const auto& block_of) {
    const auto range = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = ids == nullptr ? i : ids[i];
        const bool is_inside = row >= 0 && row < num_rows;
        const int64_t block = is_inside ? block_of(first_row + row) : num_codes;
        if (block >= num_codes) {
          fits = false;
        } else {
          round(fields + block * 4 * dim, weights + row * dim, residuals + row * dim, dim);
        }
      }
    };
    torch::stable::parallel_for(
        0, count, std::max<int64_t>(1, NUMBERS_PER_THREAD / std::max<int64_t>(1, dim)), range);
  });
  check(fits, "rows", "rows of the shard, in blocks that have codes");
}

}  // namespace

extern "C" const char* dnis_instruction_set(const char* limit) { return limit_level(limit); }

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def(
      "select_pooled(Tensor pooled, Tensor alpha, Tensor rows, Tensor? divisors, Tensor layout, "
      "Tensor(a!) out) -> ()");
  library.def(
      "spread_gradient(Tensor grad, Tensor alpha, Tensor rows, Tensor? divisors, Tensor layout, "
      "bool keep_empty, Tensor(a!) grad_pooled) -> bool");
  library.def(
      "sum_alpha_gradient(Tensor grad, Tensor pooled, Tensor rows, Tensor? divisors, Tensor "
      "layout, Tensor(a!) grad_alpha) -> ()");
  library.def(
      "fill_rows(Tensor ids, Tensor lengths, Tensor[] routings, int[] places, Tensor(a!) rows) "
      "-> ()");
  library.def("are_good_bags(Tensor ids, Tensor lengths, Tensor bounds, Tensor longest) -> bool");
  library.def(
      "split_bags(Tensor ids, Tensor lengths, Tensor? weights, Tensor[] routings, Tensor "
      "pieces, int[] first_of, int batch_size, Tensor(a!) split_ids, Tensor(b!) split_lengths, "
      "Tensor(c!)? split_weights) -> ()");
  library.def(
      "find_pieces(Tensor ids, Tensor lengths, Tensor[] routings, int[] features, Tensor(a!) "
      "starts, Tensor(b!) rows, Tensor(c!) sizes, Tensor(d!) piece_of_id) -> ()");
  library.def(
      "gather_ids(Tensor ids, Tensor? weights, Tensor starts, Tensor sizes, Tensor piece_of_id, "
      "int[] num_keys, Tensor(a!) ids_out, Tensor(b!) lengths_out, Tensor(c!)? weights_out) -> "
      "()");
  library.def(
      "select_sparse(Tensor pooled, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, "
      "Tensor(a!) out) -> ()");
  library.def(
      "spread_sparse_gradient(Tensor grad, Tensor alpha, Tensor starts, Tensor rows, Tensor "
      "layout, Tensor(a!) grad_pooled) -> ()");
  library.def(
      "sum_sparse_alpha_gradient(Tensor grad, Tensor pooled, Tensor starts, Tensor rows, Tensor "
      "layout, Tensor(a!) grad_alpha) -> ()");
  library.def(
      "round_rows(Tensor codes, Tensor routing, Tensor? rows, int first_row, Tensor(a!) weight, "
      "Tensor(b!) residual) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) {
  library.impl("select_pooled", TORCH_BOX(&select_pooled));
  library.impl("spread_gradient", TORCH_BOX(&spread_gradient));
  library.impl("sum_alpha_gradient", TORCH_BOX(&sum_alpha_gradient));
  library.impl("fill_rows", TORCH_BOX(&fill_rows));
  library.impl("are_good_bags", TORCH_BOX(&are_good_bags));
  library.impl("split_bags", TORCH_BOX(&split_bags));
  library.impl("find_pieces", TORCH_BOX(&find_pieces));
  library.impl("gather_ids", TORCH_BOX(&gather_ids));
  library.impl("select_sparse", TORCH_BOX(&select_sparse));
  library.impl("spread_sparse_gradient", TORCH_BOX(&spread_sparse_gradient));
  library.impl("sum_sparse_alpha_gradient", TORCH_BOX(&sum_sparse_alpha_gradient));
  library.impl("round_rows", TORCH_BOX(&round_rows));
}
