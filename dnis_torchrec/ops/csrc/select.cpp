// What training adds to a step, on the CPU: soft selection forward and backward; bags split by
// block, with a place for every block, or for those alone that occur; rows rounded to the values
// that they are served as. ops/select.py says what each operator means.
//
// Built against torch's stable ABI: it compiles in seconds, and one build serves every torch
// from 2.11 on. The innermost loops, over a row of D numbers, are those of row_loops.h. Shapes: B
// batch, F features, K pieces, P <= I pieces that occur, R rows of a bag's pieces, S blocks, I ids
// of a batch, N rows of a shard.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "row_loops.h"

namespace {

using namespace dnis_torchrec;

constexpr int64_t LINES_AHEAD =
    8;  // cache lines between what is written and what is asked of memory

// One piece of the pooled embeddings, and what it adds to.
struct Piece {
  int64_t in_column, out_column, dim, alpha_offset, output, first_row, num_rows;
  bool is_first, is_last;  // of its output
};

std::vector<Piece> make_pieces(const Tensor& layout, int64_t in_width, int64_t out_width) {
  const bool fits = layout.dim() == 2 && layout.size(1) == 7 &&
                    layout.scalar_type() == ScalarType::Long && layout.is_contiguous() &&
                    layout.is_cpu();
  check(fits, "layout", "int64 of shape (K, 7)");
  const int64_t* fields = static_cast<const int64_t*>(layout.const_data_ptr());
  std::vector<Piece> pieces(layout.size(0));
  for (size_t k = 0; k < pieces.size(); ++k, fields += 7) {
    pieces[k] = {
        fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], true, true};
    const Piece& piece = pieces[k];
    check(lies_within(piece.in_column, piece.dim, in_width), "layout", "pieces inside");
    check(lies_within(piece.out_column, piece.dim, out_width), "layout", "outputs inside");
    if (k > 0 && pieces[k - 1].output == piece.output)
      pieces[k].is_first = pieces[k - 1].is_last = false;
  }
  return pieces;
}

// What all three operators of soft selection read.
template <typename Number>
struct Selection {
  std::vector<Piece> pieces;
  const int32_t* rows;     // (B, K), -1 for an empty bag
  const Number* divisors;  // (B, outputs), or null
  int64_t num_outputs;
  int64_t batch_size;

  Selection(const Tensor& rows_, const std::optional<Tensor>& divisors_, const Tensor& layout,
      int64_t batch_size_, int64_t in_width, int64_t out_width, ScalarType dtype)
      : pieces(make_pieces(layout, in_width, out_width)),
        divisors(nullptr),
        num_outputs(0),
        batch_size(batch_size_) {
    rows = numbers<int32_t>(rows_, ScalarType::Int, "rows");
    const int64_t num_pieces = static_cast<int64_t>(pieces.size());
    check(rows_.dim() == 2 && rows_.size(0) == batch_size && rows_.size(1) == num_pieces, "rows",
        "shape (B, K)");
    if (!divisors_) return;
    divisors = numbers<Number>(*divisors_, dtype, "divisors");
    check(divisors_->dim() == 2 && divisors_->size(0) == batch_size, "divisors",
        "shape (B, outputs)");
    num_outputs = divisors_->size(1);
    for (const Piece& piece : pieces)
      check(lies_within(piece.output, 1, num_outputs), "divisors", "one for each output");
  }

  int32_t row(int64_t sample, size_t piece) const {
    return rows[sample * static_cast<int64_t>(pieces.size()) + piece];
  }
  Number divisor(int64_t sample, const Piece& piece) const {
    return divisors == nullptr ? Number(1) : divisors[sample * num_outputs + piece.output];
  }
};

void check_rows(
    const int32_t* rows, int64_t batch_size, const std::vector<Piece>& pieces, int64_t alpha_size) {
  for (const Piece& piece : pieces) {
    check(piece.alpha_offset >= 0 && piece.alpha_offset <= alpha_size, "layout", "alphas inside");
    const int64_t num_rows = piece.dim == 0 ? MOST : (alpha_size - piece.alpha_offset) / piece.dim;
    check(lies_within(piece.first_row, piece.num_rows, num_rows), "layout", "rows of alpha");
  }
  bool fits = true;
  for (int64_t b = 0; b < batch_size; ++b)
    for (const Piece& piece : pieces) {
      const int64_t row = *rows++;
      fits &= (row < 0) | ((row >= piece.first_row) & (row < piece.first_row + piece.num_rows));
    }
  check(fits, "rows", "rows of alpha");
}

// out = pooled * alpha[row], summed over the pieces of an output, divided by its divisor. `out` may
// be `pooled`.
template <typename Number>
void select(const Selection<Number>& selection, const Number* pooled, int64_t in_width,
    const Number* alpha, Number* out, int64_t out_width) {
  const RowLoops<Number>& loops = row_loops<Number>();
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (size_t k = 0; k < selection.pieces.size(); ++k) {
        const Piece& piece = selection.pieces[k];
        const int32_t row = selection.row(b, k);
        const Number* from = pooled + b * in_width + piece.in_column;
        Number* to = out + b * out_width + piece.out_column;
        const Number* factor = alpha + piece.alpha_offset + static_cast<int64_t>(row) * piece.dim;
        if (row < 0) {
          if (piece.is_first) std::fill(to, to + piece.dim, Number(0));
        } else if (piece.is_first) {
          loops.multiply(from, factor, to, piece.dim);
        } else {
          loops.add_product(from, factor, to, piece.dim);
        }
        const Number divisor = piece.is_last ? selection.divisor(b, piece) : Number(1);
        if (divisor != Number(1))
          for (int64_t d = 0; d < piece.dim; ++d) to[d] /= divisor;
      }
    }
  };
  torch::stable::parallel_for(0, selection.batch_size, SAMPLES_PER_THREAD, range);
}

// Asks for memory that is about to be written: stores wait for their lines, and do not run ahead as
// loads do.
template <typename Number>
void prefetch_ahead(const Number* to, int64_t count) {
  constexpr int64_t per_line = 64 / sizeof(Number);
  for (int64_t d = 0; d < count; d += per_line)
    __builtin_prefetch(to + LINES_AHEAD * per_line + d, 1);
}

// grad_pooled = grad * alpha[row] / divisor; pieces of empty bags get zero, or stay as they are.
// Returns whether every number of `grad` is finite, on the way.
template <typename Number>
bool spread(const Selection<Number>& selection, const Number* grad, int64_t out_width,
    const Number* alpha, Number* grad_pooled, int64_t in_width, bool keep_empty) {
  const RowLoops<Number>& loops = row_loops<Number>();
  std::atomic<bool> all_finite{true};
  const auto range = [&](int64_t begin, int64_t end) {
    bool is_finite = true;
    for (int64_t b = begin; b < end; ++b) {
      for (size_t k = 0; k < selection.pieces.size(); ++k) {
        const Piece& piece = selection.pieces[k];
        const int32_t row = selection.row(b, k);
        const Number* from = grad + b * out_width + piece.out_column;
        Number* to = grad_pooled + b * in_width + piece.in_column;
        if (row < 0) {
          is_finite &= loops.are_finite(from, piece.dim);
          if (!keep_empty) std::fill(to, to + piece.dim, Number(0));
          continue;
        }
        const Number* factor = alpha + piece.alpha_offset + static_cast<int64_t>(row) * piece.dim;
        prefetch_ahead(to, piece.dim);
        is_finite &= loops.multiply_finite(from, factor, to, piece.dim);
        const Number divisor = selection.divisor(b, piece);
        if (divisor != Number(1))
          for (int64_t d = 0; d < piece.dim; ++d) to[d] /= divisor;
      }
    }
    if (!is_finite) all_finite = false;
  };
  torch::stable::parallel_for(0, selection.batch_size, SAMPLES_PER_THREAD, range);
  return all_finite;
}

// grad_alpha[row] += grad * pooled / divisor.
template <typename Number>
void gather_alpha(const Selection<Number>& selection, const Number* grad, int64_t out_width,
    const Number* pooled, int64_t in_width, Number* grad_alpha, int64_t alpha_size) {
  const RowLoops<Number>& loops = row_loops<Number>();
  sum_over_samples(selection.batch_size, grad_alpha, alpha_size, [&](int64_t b, Number* sum) {
    for (size_t k = 0; k < selection.pieces.size(); ++k) {
      const Piece& piece = selection.pieces[k];
      const int32_t row = selection.row(b, k);
      if (row < 0) continue;
      const Number* left = grad + b * out_width + piece.out_column;
      const Number* right = pooled + b * in_width + piece.in_column;
      Number* to = sum + piece.alpha_offset + static_cast<int64_t>(row) * piece.dim;
      const Number divisor = selection.divisor(b, piece);
      if (divisor == Number(1)) {
        loops.add_product(left, right, to, piece.dim);
      } else {
        for (int64_t d = 0; d < piece.dim; ++d) to[d] += left[d] * right[d] / divisor;
      }
    }
  });
}

enum class Task { SELECT, SPREAD, GATHER_ALPHA };

// `wide` holds the pieces, `narrow` the outputs; which of them, or of `alpha`, is written depends
// on the task.
template <typename Number>
bool run_typed(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& rows,
    const std::optional<Tensor>& divisors, const Tensor& layout, const Tensor& narrow,
    bool keep_empty) {
  const ScalarType dtype = wide.scalar_type();
  check(wide.dim() == 2 && narrow.dim() == 2 && wide.size(0) == narrow.size(0), "tensors",
      "two of batch B");
  const int64_t batch_size = wide.size(0), in_width = wide.size(1), out_width = narrow.size(1);
  const Selection<Number> selection(rows, divisors, layout, batch_size, in_width, out_width, dtype);
  check_rows(selection.rows, batch_size, selection.pieces, alpha.numel());
  check_apart(task == Task::SELECT ? narrow : task == Task::SPREAD ? wide : alpha, rows, "rows");
  if (task == Task::SELECT) {
    select(selection, numbers<Number>(wide, dtype, "pooled"), in_width,
        numbers<Number>(alpha, dtype, "alpha"), mutable_numbers<Number>(narrow, dtype, "out"),
        out_width);
  } else if (task == Task::SPREAD) {
    return spread(selection, numbers<Number>(narrow, dtype, "grad"), out_width,
        numbers<Number>(alpha, dtype, "alpha"), mutable_numbers<Number>(wide, dtype, "grad_pooled"),
        in_width, keep_empty);
  } else {
    gather_alpha(selection, numbers<Number>(narrow, dtype, "grad"), out_width,
        numbers<Number>(wide, dtype, "pooled"), in_width,
        mutable_numbers<Number>(alpha, dtype, "grad_alpha"), alpha.numel());
  }
  return true;
}

bool run(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& rows,
    const std::optional<Tensor>& divisors, const Tensor& layout, const Tensor& narrow,
    bool keep_empty) {
  if (wide.scalar_type() == ScalarType::Float) {
    return run_typed<float>(task, wide, alpha, rows, divisors, layout, narrow, keep_empty);
  }
  check(wide.scalar_type() == ScalarType::Double, "pooled", "float32 or float64");
  return run_typed<double>(task, wide, alpha, rows, divisors, layout, narrow, keep_empty);
}

void select_pooled(Tensor pooled, Tensor alpha, Tensor rows, std::optional<Tensor> divisors,
    Tensor layout, Tensor out) {
  run(Task::SELECT, pooled, alpha, rows, divisors, layout, out, false);
}

bool spread_gradient(Tensor grad, Tensor alpha, Tensor rows, std::optional<Tensor> divisors,
    Tensor layout, bool keep_empty, Tensor grad_pooled) {
  return run(Task::SPREAD, grad_pooled, alpha, rows, divisors, layout, grad, keep_empty);
}

void sum_alpha_gradient(Tensor grad, Tensor pooled, Tensor rows, std::optional<Tensor> divisors,
    Tensor layout, Tensor grad_alpha) {
  run(Task::GATHER_ALPHA, pooled, grad_alpha, rows, divisors, layout, grad, false);
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
      check(lies_within(end, length, num_ids), "lengths", "as many ids as they say");
      end += length;
    }
    begins[key + 1] = end;
  }
  check(begins.back() == num_ids, "lengths", "as many ids as they say");
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
  with_integers(ids, "ids", [&](const auto* id) {
    with_integers(lengths, "lengths", [&](const auto* length) {
      const int64_t num_keys = lengths.numel() / batch_size;
      fill_rows_typed(
          id, length, ids.numel(), num_keys, batch_size, routes, places, to, num_pieces);
    });
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
  with_integers(ids, "ids", [&](const auto* id) {
    with_integers(lengths, "lengths", [&](const auto* length) {
      int64_t left = num_ids;
      for (int64_t key = 0; key < num_keys && are_good; ++key) {
        const int64_t longest_of_key =
            std::min(most[key], num_ids);  // so that good lengths do not overflow their sum
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
  });
  return are_good;
}

// The arguments of split_bags, checked.
struct Split {
  const void *ids, *lengths, *weights;
  void *split_ids, *split_lengths, *split_weights;
  std::vector<Routing> routings;  // F
  const int64_t* pieces;  // of every (feature, block), one past the last for what is dropped
  const std::vector<int64_t>& first_of;  // F + 1: where a feature's blocks begin in `pieces`
  int64_t num_ids, num_pieces, batch_size;
  size_t weight_bytes;
};

template <typename Id, typename Length>
void split_typed(const Split& split) {
  const Id* id = static_cast<const Id*>(split.ids);
  const Length* length = static_cast<const Length*>(split.lengths);
  Length* counts = static_cast<Length*>(split.split_lengths);
  const int64_t num_features = static_cast<int64_t>(split.routings.size());
  std::vector<int32_t> bag_of_id(
      static_cast<size_t>(split.num_ids));  // split bag, -1 for what is dropped
  std::fill(counts, counts + split.num_pieces * split.batch_size, Length(0));
  int64_t i = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t num_blocks = split.first_of[f + 1] - split.first_of[f];
    for (int64_t b = 0; b < split.batch_size; ++b) {
      const int64_t length_of_bag = static_cast<int64_t>(length[f * split.batch_size + b]);
      check(lies_within(i, length_of_bag, split.num_ids), "lengths", "as many ids as they say");
      for (const int64_t end = i + length_of_bag; i < end; ++i) {
        const int64_t block = split.routings[f].block(static_cast<int64_t>(id[i]));
        check(block < num_blocks, "routings", "blocks of their table");
        const int64_t piece = split.pieces[split.first_of[f] + block];
        bag_of_id[i] = -1;
        if (piece < 0 || piece >= split.num_pieces) continue;
        const int64_t bag = piece * split.batch_size + b;
        bag_of_id[i] = static_cast<int32_t>(bag);
        ++counts[bag];
      }
    }
  }
  check(i == split.num_ids, "lengths", "as many ids as they say");
  std::vector<int64_t> next(static_cast<size_t>(split.num_pieces * split.batch_size));
  int64_t total = 0;
  for (size_t bag = 0; bag < next.size(); ++bag) {
    next[bag] = total;
    total += static_cast<int64_t>(counts[bag]);
  }
  for (i = 0; i < split.num_ids; ++i) {
    if (bag_of_id[i] < 0) continue;
    const int64_t position = next[bag_of_id[i]]++;
    static_cast<Id*>(split.split_ids)[position] = id[i];
    if (split.weights == nullptr) continue;
    std::memcpy(static_cast<char*>(split.split_weights) + position * split.weight_bytes,
        static_cast<const char*>(split.weights) + i * split.weight_bytes, split.weight_bytes);
  }
}

// Splits the bags of all features by block, ids of a bag in their order. split_ids and
// split_weights are filled from the front; what is dropped leaves room at their end.
void split_bags(Tensor ids, Tensor lengths, std::optional<Tensor> weights,
    std::vector<Tensor> routings, Tensor pieces, std::vector<int64_t> first_of, int64_t batch_size,
    Tensor split_ids, Tensor split_lengths, std::optional<Tensor> split_weights) {
  for (const Tensor& tensor : {pieces, split_ids, split_lengths}) check_plain(tensor, "tensors");
  const bool wide_ids = is_wide(ids, "ids"), wide_lengths = is_wide(lengths, "lengths");
  check(split_ids.scalar_type() == ids.scalar_type() && split_ids.numel() == ids.numel(),
      "split_ids", "room for ids");
  check(split_lengths.scalar_type() == lengths.scalar_type(), "split_lengths",
      "the dtype of lengths");
  check(pieces.scalar_type() == ScalarType::Long, "pieces", "int64");
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
  Split split{ids.const_data_ptr(), lengths.const_data_ptr(), nullptr, split_ids.mutable_data_ptr(),
      split_lengths.mutable_data_ptr(), nullptr,
      std::vector<Routing>(routings.begin(), routings.end()),
      static_cast<const int64_t*>(pieces.const_data_ptr()), first_of, ids.numel(),
      batch_size == 0 ? 0 : num_bags / batch_size, batch_size, 0};
  check(weights.has_value() == split_weights.has_value(), "split_weights",
      "room for weights, or neither");
  if (weights) {
    for (const Tensor& tensor : {*weights, *split_weights}) {
      check_plain(tensor, "weights");
      const bool fits =
          tensor.numel() == ids.numel() && tensor.scalar_type() == weights->scalar_type();
      check(fits, "weights", "one for each id");
    }
    split.weights = weights->const_data_ptr();
    split.split_weights = split_weights->mutable_data_ptr();
    split.weight_bytes = weights->element_size();
  }
  if (wide_ids) {
    wide_lengths ? split_typed<int64_t, int64_t>(split) : split_typed<int64_t, int32_t>(split);
  } else {
    wide_lengths ? split_typed<int32_t, int64_t>(split) : split_typed<int32_t, int32_t>(split);
  }
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
      check(lies_within(i, length, num_ids), "lengths", "as many ids as they say");
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
  check(i == num_ids, "lengths", "as many ids as they say");
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
  with_integers(ids, "ids", [&](const auto* id) {
    with_integers(lengths, "lengths", [&](const auto* length) {
      find_typed(id, length, ids.numel(), batch_size, routes, features, pieces);
    });
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

struct Gather {
  const int32_t* piece_of_id;
  const char* weights;
  char* weights_out;
  size_t weight_bytes;
};

template <typename Id>
void gather_typed(
    const Id* ids, Id* ids_out, int64_t num_ids, std::vector<int64_t>& next, const Gather& gather) {
  const int64_t num_pieces = static_cast<int64_t>(next.size());
  for (int64_t i = 0; i < num_ids; ++i) {
    const int32_t piece = gather.piece_of_id[i];
    if (piece < 0) continue;
    check(piece < num_pieces && next[piece] < num_ids, "piece_of_id", "pieces that there are");
    const int64_t position = next[piece]++;
    ids_out[position] = ids[i];
    if (gather.weights == nullptr) continue;
    std::memcpy(gather.weights_out + position * gather.weight_bytes,
        gather.weights + i * gather.weight_bytes, gather.weight_bytes);
  }
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
  Gather gather{numbers<int32_t>(piece_of_id, ScalarType::Int, "piece_of_id"), nullptr, nullptr, 0};
  check(weights.has_value() == weights_out.has_value(), "weights_out",
      "room for weights, or neither");
  if (weights) {
    for (const Tensor& tensor : {*weights, *weights_out}) {
      check_plain(tensor, "weights");
      check(tensor.numel() == num_ids && tensor.scalar_type() == weights->scalar_type(), "weights",
          "one for each id");
    }
    gather.weights = static_cast<const char*>(weights->const_data_ptr());
    gather.weights_out = static_cast<char*>(weights_out->mutable_data_ptr());
    gather.weight_bytes = weights->element_size();
  }
  std::vector<int64_t> next;
  with_integers(lengths_out, "lengths_out", [&](const auto* length) {
    using Length = std::remove_cv_t<std::remove_pointer_t<decltype(length)>>;
    next = place_pieces(numbers<int64_t>(starts, ScalarType::Long, "starts"),
        numbers<int32_t>(sizes, ScalarType::Int, "sizes"), sizes.numel(), starts.size(1) - 1,
        num_keys, num_rows, num_ids, static_cast<Length*>(lengths_out.mutable_data_ptr()));
  });
  with_integers(ids, "ids", [&](const auto* id) {
    using Id = std::remove_cv_t<std::remove_pointer_t<decltype(id)>>;
    gather_typed(id, static_cast<Id*>(ids_out.mutable_data_ptr()), num_ids, next, gather);
  });
}

// One feature of soft selection.
struct Feature {
  int64_t in_column, out_column, dim, num_keys, alpha_offset, alpha_stride;
};

// What all three operators of soft selection read.
struct Sparse {
  std::vector<Feature> features;
  const int64_t* starts;
  const int32_t* rows;
  int64_t batch_size, num_rows, in_width, out_width;

  Sparse(const Tensor& starts_, const Tensor& rows_, const Tensor& layout, const Tensor& pooled,
      const Tensor& out, int64_t alpha_size)
      : batch_size(out.size(0)),
        num_rows(pooled.size(0)),
        in_width(pooled.size(1)),
        out_width(out.size(1)) {
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

  // Calls visit(columns from `begin` of the piece in its gather row, first alpha) for the pieces of
  // a bag.
  template <typename Visit>
  void walk(int64_t f, int64_t sample, const Visit& visit) const {
    const Feature& feature = features[f];
    const int64_t* start = starts + f * (batch_size + 1);
    const int64_t first = start[sample] - start[0];
    int64_t row = first / feature.num_keys, key = first % feature.num_keys;
    for (int64_t p = start[sample]; p < start[sample + 1]; ++p) {
      visit(row * in_width + feature.in_column + key * feature.dim,
          feature.alpha_offset + rows[p] * feature.alpha_stride);
      if (++key == feature.num_keys) ++row, key = 0;
    }
  }
};

// out = sum over the pieces of a bag of pooled * alpha[row].
template <typename Number>
void select(const Sparse& sparse, const Number* pooled, const Number* alpha, Number* out) {
  const RowLoops<Number>& loops = row_loops<Number>();
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (size_t f = 0; f < sparse.features.size(); ++f) {
        const int64_t dim = sparse.features[f].dim;
        Number* to = out + b * sparse.out_width + sparse.features[f].out_column;
        bool is_first = true;
        sparse.walk(f, b, [&](int64_t at, int64_t alpha_at) {
          const Number *from = pooled + at, *factor = alpha + alpha_at;
          if (is_first) {
            loops.multiply(from, factor, to, dim);
          } else {
            loops.add_product(from, factor, to, dim);
          }
          is_first = false;
        });
        if (is_first) std::fill(to, to + dim, Number(0));
      }
    }
  };
  torch::stable::parallel_for(0, sparse.batch_size, SAMPLES_PER_THREAD, range);
}

// grad_pooled = grad * alpha[row]; what no piece takes stays as it is.
template <typename Number>
void spread(const Sparse& sparse, const Number* grad, const Number* alpha, Number* grad_pooled) {
  const RowLoops<Number>& loops = row_loops<Number>();
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (size_t f = 0; f < sparse.features.size(); ++f) {
        const int64_t dim = sparse.features[f].dim;
        const Number* from = grad + b * sparse.out_width + sparse.features[f].out_column;
        sparse.walk(f, b, [&](int64_t at, int64_t alpha_at) {
          loops.multiply(from, alpha + alpha_at, grad_pooled + at, dim);
        });
      }
    }
  };
  torch::stable::parallel_for(0, sparse.batch_size, SAMPLES_PER_THREAD, range);
}

// grad_alpha[row] += grad * pooled.
template <typename Number>
void gather_alpha(const Sparse& sparse, const Number* grad, const Number* pooled,
    Number* grad_alpha, int64_t alpha_size) {
  const RowLoops<Number>& loops = row_loops<Number>();
  sum_over_samples(sparse.batch_size, grad_alpha, alpha_size, [&](int64_t b, Number* sum) {
    for (size_t f = 0; f < sparse.features.size(); ++f) {
      const int64_t dim = sparse.features[f].dim;
      const Number* left = grad + b * sparse.out_width + sparse.features[f].out_column;
      sparse.walk(f, b, [&](int64_t at, int64_t alpha_at) {
        loops.add_product(left, pooled + at, sum + alpha_at, dim);
      });
    }
  });
}

// `wide` holds the pieces, `narrow` the outputs; which of them, or of `alpha`, is written depends
// on the task.
template <typename Number>
void run_typed(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& starts,
    const Tensor& rows, const Tensor& layout, const Tensor& narrow) {
  const ScalarType dtype = wide.scalar_type();
  check(wide.dim() == 2 && narrow.dim() == 2, "tensors", "matrices");
  const Sparse sparse(starts, rows, layout, wide, narrow, alpha.numel());
  const Tensor& written = task == Task::SELECT ? narrow : task == Task::SPREAD ? wide : alpha;
  check_apart(written, starts, "starts");
  check_apart(written, rows, "rows");
  if (task == Task::SELECT) {
    select(sparse, numbers<Number>(wide, dtype, "pooled"), numbers<Number>(alpha, dtype, "alpha"),
        mutable_numbers<Number>(narrow, dtype, "out"));
  } else if (task == Task::SPREAD) {
    spread(sparse, numbers<Number>(narrow, dtype, "grad"), numbers<Number>(alpha, dtype, "alpha"),
        mutable_numbers<Number>(wide, dtype, "grad_pooled"));
  } else {
    gather_alpha(sparse, numbers<Number>(narrow, dtype, "grad"),
        numbers<Number>(wide, dtype, "pooled"), mutable_numbers<Number>(alpha, dtype, "grad_alpha"),
        alpha.numel());
  }
}

void run(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& starts,
    const Tensor& rows, const Tensor& layout, const Tensor& narrow) {
  if (wide.scalar_type() == ScalarType::Float) {
    run_typed<float>(task, wide, alpha, starts, rows, layout, narrow);
    return;
  }
  check(wide.scalar_type() == ScalarType::Double, "pooled", "float32 or float64");
  run_typed<double>(task, wide, alpha, starts, rows, layout, narrow);
}

void select_sparse(
    Tensor pooled, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, Tensor out) {
  run(Task::SELECT, pooled, alpha, starts, rows, layout, out);
}

void spread_sparse_gradient(
    Tensor grad, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, Tensor grad_pooled) {
  run(Task::SPREAD, grad_pooled, alpha, starts, rows, layout, grad);
}

void sum_sparse_alpha_gradient(
    Tensor grad, Tensor pooled, Tensor starts, Tensor rows, Tensor layout, Tensor grad_alpha) {
  run(Task::GATHER_ALPHA, pooled, grad_alpha, starts, rows, layout, grad);
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
  const RoundRow round = row_rounding();
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

// Which instruction set the innermost loops run on, and, with a limit, from now on up to that one.
extern "C" const char* dnis_block_instruction_set(const char* limit) {
  constexpr const char* NAMES[] = {"baseline", "avx2", "avx512"};
  for (size_t i = 0; limit != nullptr && i < std::size(NAMES); ++i)
    if (std::strcmp(limit, NAMES[i]) == 0)
      instruction_set = widest_instruction_set(static_cast<InstructionSet>(i));
  return NAMES[static_cast<size_t>(instruction_set.load())];
}

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def(
      "select_pooled(Tensor pooled, Tensor alpha, Tensor rows, Tensor? divisors, Tensor layout, "
      "Tensor(a!) out) -> ()");
  library.def(
      "spread_gradient(Tensor grad, Tensor alpha, Tensor rows, Tensor? divisors, Tensor layout, "
      "bool keep_empty, "
      "Tensor(a!) grad_pooled) -> bool");
  library.def(
      "sum_alpha_gradient(Tensor grad, Tensor pooled, Tensor rows, Tensor? divisors, Tensor "
      "layout, "
      "Tensor(a!) grad_alpha) -> ()");
  library.def(
      "fill_rows(Tensor ids, Tensor lengths, Tensor[] routings, int[] places, Tensor(a!) rows) -> "
      "()");
  library.def("are_good_bags(Tensor ids, Tensor lengths, Tensor bounds, Tensor longest) -> bool");
  library.def(
      "split_bags(Tensor ids, Tensor lengths, Tensor? weights, Tensor[] routings, Tensor pieces, "
      "int[] first_of, "
      "int batch_size, Tensor(a!) split_ids, Tensor(b!) split_lengths, Tensor(c!)? split_weights) "
      "-> ()");
  library.def(
      "find_pieces(Tensor ids, Tensor lengths, Tensor[] routings, int[] features, Tensor(a!) "
      "starts, Tensor(b!) rows, "
      "Tensor(c!) sizes, Tensor(d!) piece_of_id) -> ()");
  library.def(
      "gather_ids(Tensor ids, Tensor? weights, Tensor starts, Tensor sizes, Tensor piece_of_id, "
      "int[] num_keys, "
      "Tensor(a!) ids_out, Tensor(b!) lengths_out, Tensor(c!)? weights_out) -> ()");
  library.def(
      "select_sparse(Tensor pooled, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, "
      "Tensor(a!) out) -> ()");
  library.def(
      "spread_sparse_gradient(Tensor grad, Tensor alpha, Tensor starts, Tensor rows, Tensor "
      "layout, "
      "Tensor(a!) grad_pooled) -> ()");
  library.def(
      "sum_sparse_alpha_gradient(Tensor grad, Tensor pooled, Tensor starts, Tensor rows, Tensor "
      "layout, "
      "Tensor(a!) grad_alpha) -> ()");
  library.def(
      "round_rows(Tensor codes, Tensor routing, Tensor? rows, int first_row, Tensor(a!) weight, "
      "Tensor(b!) residual) "
      "-> ()");
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
