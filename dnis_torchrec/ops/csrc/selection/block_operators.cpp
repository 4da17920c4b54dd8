// What the search adds to a training step, on the CPU: bags split by block, and soft selection forward and backward.
//
// Built against torch's stable ABI: it compiles in seconds, and one build serves every torch from 2.11 on. The innermost
// loops, over a row of D numbers, are those of row_loops.h.
// Shapes: B batch, F features, K pieces (see dnis_torchrec/ops/block_operators.py), S blocks, I ids of a batch.

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
#include <vector>

#include "blocks.h"
#include "row_loops.h"

namespace {

using namespace dnis_torchrec;

constexpr int64_t LINES_AHEAD = 8;  // cache lines between what is written and what is asked of memory

// One piece of the pooled embeddings, and what it adds to.
struct Piece {
  int64_t in_column, out_column, dim, alpha_offset, output, first_row, num_rows;
  bool is_first, is_last;  // of its output
};

std::vector<Piece> make_pieces(const Tensor& layout, int64_t in_width, int64_t out_width) {
  const bool fits = layout.dim() == 2 && layout.size(1) == 7 && layout.scalar_type() == ScalarType::Long &&
                    layout.is_contiguous() && layout.is_cpu();
  check(fits, "layout", "int64 of shape (K, 7)");
  const int64_t* fields = static_cast<const int64_t*>(layout.const_data_ptr());
  std::vector<Piece> pieces(layout.size(0));
  for (size_t k = 0; k < pieces.size(); ++k, fields += 7) {
    pieces[k] = {fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], true, true};
    const Piece& piece = pieces[k];
    check(lies_within(piece.in_column, piece.dim, in_width), "layout", "pieces inside");
    check(lies_within(piece.out_column, piece.dim, out_width), "layout", "outputs inside");
    if (k > 0 && pieces[k - 1].output == piece.output) pieces[k].is_first = pieces[k - 1].is_last = false;
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

  Selection(const Tensor& rows_, const std::optional<Tensor>& divisors_, const Tensor& layout, int64_t batch_size_,
            int64_t in_width, int64_t out_width, ScalarType dtype)
      : pieces(make_pieces(layout, in_width, out_width)), divisors(nullptr), num_outputs(0), batch_size(batch_size_) {
    rows = numbers<int32_t>(rows_, ScalarType::Int, "rows");
    const int64_t num_pieces = static_cast<int64_t>(pieces.size());
    check(rows_.dim() == 2 && rows_.size(0) == batch_size && rows_.size(1) == num_pieces, "rows", "shape (B, K)");
    if (!divisors_) return;
    divisors = numbers<Number>(*divisors_, dtype, "divisors");
    check(divisors_->dim() == 2 && divisors_->size(0) == batch_size, "divisors", "shape (B, outputs)");
    num_outputs = divisors_->size(1);
    for (const Piece& piece : pieces) check(lies_within(piece.output, 1, num_outputs), "divisors", "one for each output");
  }

  int32_t row(int64_t sample, size_t piece) const { return rows[sample * static_cast<int64_t>(pieces.size()) + piece]; }
  Number divisor(int64_t sample, const Piece& piece) const {
    return divisors == nullptr ? Number(1) : divisors[sample * num_outputs + piece.output];
  }
};

void check_rows(const int32_t* rows, int64_t batch_size, const std::vector<Piece>& pieces, int64_t alpha_size) {
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

// out = pooled * alpha[row], summed over the pieces of an output, divided by its divisor. `out` may be `pooled`.
template <typename Number>
void select(const Selection<Number>& selection, const Number* pooled, int64_t in_width, const Number* alpha, Number* out,
            int64_t out_width) {
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

// Asks for memory that is about to be written: stores wait for their lines, and do not run ahead as loads do.
template <typename Number>
void prefetch_ahead(const Number* to, int64_t count) {
  constexpr int64_t per_line = 64 / sizeof(Number);
  for (int64_t d = 0; d < count; d += per_line) __builtin_prefetch(to + LINES_AHEAD * per_line + d, 1);
}

// grad_pooled = grad * alpha[row] / divisor; pieces of empty bags get zero, or stay as they are. Returns whether every
// number of `grad` is finite, on the way.
template <typename Number>
bool spread(const Selection<Number>& selection, const Number* grad, int64_t out_width, const Number* alpha,
            Number* grad_pooled, int64_t in_width, bool keep_empty) {
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
void gather_alpha(const Selection<Number>& selection, const Number* grad, int64_t out_width, const Number* pooled,
                  int64_t in_width, Number* grad_alpha, int64_t alpha_size) {
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

// `wide` holds the pieces, `narrow` the outputs; which of them, or of `alpha`, is written depends on the task.
template <typename Number>
bool run_typed(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& rows,
               const std::optional<Tensor>& divisors, const Tensor& layout, const Tensor& narrow, bool keep_empty) {
  const ScalarType dtype = wide.scalar_type();
  check(wide.dim() == 2 && narrow.dim() == 2 && wide.size(0) == narrow.size(0), "tensors", "two of batch B");
  const int64_t batch_size = wide.size(0), in_width = wide.size(1), out_width = narrow.size(1);
  const Selection<Number> selection(rows, divisors, layout, batch_size, in_width, out_width, dtype);
  check_rows(selection.rows, batch_size, selection.pieces, alpha.numel());
  check_apart(task == Task::SELECT ? narrow : task == Task::SPREAD ? wide : alpha, rows, "rows");
  if (task == Task::SELECT) {
    select(selection, numbers<Number>(wide, dtype, "pooled"), in_width, numbers<Number>(alpha, dtype, "alpha"),
           mutable_numbers<Number>(narrow, dtype, "out"), out_width);
  } else if (task == Task::SPREAD) {
    return spread(selection, numbers<Number>(narrow, dtype, "grad"), out_width, numbers<Number>(alpha, dtype, "alpha"),
                  mutable_numbers<Number>(wide, dtype, "grad_pooled"), in_width, keep_empty);
  } else {
    gather_alpha(selection, numbers<Number>(narrow, dtype, "grad"), out_width, numbers<Number>(wide, dtype, "pooled"),
                 in_width, mutable_numbers<Number>(alpha, dtype, "grad_alpha"), alpha.numel());
  }
  return true;
}

bool run(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& rows, const std::optional<Tensor>& divisors,
         const Tensor& layout, const Tensor& narrow, bool keep_empty) {
  if (wide.scalar_type() == ScalarType::Float) {
    return run_typed<float>(task, wide, alpha, rows, divisors, layout, narrow, keep_empty);
  }
  check(wide.scalar_type() == ScalarType::Double, "pooled", "float32 or float64");
  return run_typed<double>(task, wide, alpha, rows, divisors, layout, narrow, keep_empty);
}

void select_pooled(Tensor pooled, Tensor alpha, Tensor rows, std::optional<Tensor> divisors, Tensor layout, Tensor out) {
  run(Task::SELECT, pooled, alpha, rows, divisors, layout, out, false);
}

bool spread_gradient(Tensor grad, Tensor alpha, Tensor rows, std::optional<Tensor> divisors, Tensor layout,
                     bool keep_empty, Tensor grad_pooled) {
  return run(Task::SPREAD, grad_pooled, alpha, rows, divisors, layout, grad, keep_empty);
}

void sum_alpha_gradient(Tensor grad, Tensor pooled, Tensor rows, std::optional<Tensor> divisors, Tensor layout,
                        Tensor grad_alpha) {
  run(Task::GATHER_ALPHA, pooled, grad_alpha, rows, divisors, layout, grad, false);
}

template <typename Id, typename Length>
void fill_rows_typed(const Id* ids, const Length* lengths, int64_t num_ids, int64_t num_keys, int64_t batch_size,
                     const std::vector<Routing>& routings, const std::vector<int64_t>& places, int32_t* rows,
                     int64_t num_pieces) {
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
    check(piece >= 0 && piece < num_pieces && key >= 0 && key < num_keys, "places", "pieces and keys that exist");
    check(lies_within(first_row, routings[f].num_blocks(), MOST), "places", "rows of alpha");
    routings[f].with_blocks([&](const auto& block) {
      int64_t next = begins[key];
      for (int64_t b = 0; b < batch_size; ++b) {
        const int64_t length = static_cast<int64_t>(lengths[key * batch_size + b]);
        check(length == 0 || length == 1, "lengths", "bags of at most one id");
        rows[b * num_pieces + piece] =
            length == 0 ? -1 : static_cast<int32_t>(first_row + block(static_cast<int64_t>(ids[next])));
        next += length;
      }
    });
  }
}

// Rows of alpha of single-id features. `places` holds three numbers each: piece, key, and the row of its block 0.
void fill_rows(Tensor ids, Tensor lengths, std::vector<Tensor> routings, std::vector<int64_t> places, Tensor rows) {
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
      fill_rows_typed(id, length, ids.numel(), num_keys, batch_size, routes, places, to, num_pieces);
    });
  });
}

// Whether no bag is longer than the longest of its key, and every id lies in 0 .. the bound of its key.
bool are_good_bags(Tensor ids, Tensor lengths, Tensor bounds, Tensor longest) {
  const int64_t num_keys = bounds.numel(), num_bags = lengths.numel(), num_ids = ids.numel();
  const int64_t* bound = numbers<int64_t>(bounds, ScalarType::Long, "bounds");
  const int64_t* most = numbers<int64_t>(longest, ScalarType::Long, "longest");
  check(num_keys > 0 && num_bags % num_keys == 0 && longest.numel() == num_keys, "bounds", "one for each key");
  bool are_good = true;
  with_integers(ids, "ids", [&](const auto* id) {
    with_integers(lengths, "lengths", [&](const auto* length) {
      int64_t left = num_ids;
      for (int64_t key = 0; key < num_keys && are_good; ++key) {
        const int64_t longest_of_key = std::min(most[key], num_ids);  // so that good lengths do not overflow their sum
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
  std::vector<Routing> routings;             // F
  const int64_t* pieces;                     // of every (feature, block), one past the last for what is dropped
  const std::vector<int64_t>& first_of;      // F + 1: where a feature's blocks begin in `pieces`
  int64_t num_ids, num_pieces, batch_size;
  size_t weight_bytes;
};

template <typename Id, typename Length>
void split_typed(const Split& split) {
  const Id* id = static_cast<const Id*>(split.ids);
  const Length* length = static_cast<const Length*>(split.lengths);
  Length* counts = static_cast<Length*>(split.split_lengths);
  const int64_t num_features = static_cast<int64_t>(split.routings.size());
  std::vector<int32_t> bag_of_id(static_cast<size_t>(split.num_ids));  // split bag, -1 for what is dropped
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

// Splits the bags of all features by block, ids of a bag in their order. split_ids and split_weights are filled from the
// front; what is dropped leaves room at their end.
void split_bags(Tensor ids, Tensor lengths, std::optional<Tensor> weights, std::vector<Tensor> routings, Tensor pieces,
                std::vector<int64_t> first_of, int64_t batch_size, Tensor split_ids, Tensor split_lengths,
                std::optional<Tensor> split_weights) {
  for (const Tensor& tensor : {pieces, split_ids, split_lengths}) check_plain(tensor, "tensors");
  const bool wide_ids = is_wide(ids, "ids"), wide_lengths = is_wide(lengths, "lengths");
  check(split_ids.scalar_type() == ids.scalar_type() && split_ids.numel() == ids.numel(), "split_ids", "room for ids");
  check(split_lengths.scalar_type() == lengths.scalar_type(), "split_lengths", "the dtype of lengths");
  check(pieces.scalar_type() == ScalarType::Long, "pieces", "int64");
  const bool rises = first_of.size() == routings.size() + 1 && first_of.front() >= 0 &&
                     std::is_sorted(first_of.begin(), first_of.end()) && first_of.back() == pieces.numel();
  check(rises, "first_of", "F + 1 rising places");
  check(batch_size >= 0 && batch_size <= lengths.numel(), "batch_size", "no more than there are lengths");
  check(lengths.numel() == static_cast<int64_t>(routings.size()) * batch_size, "lengths", "shape (F * B,)");
  const int64_t num_bags = split_lengths.numel();
  const bool are_whole = batch_size == 0 ? num_bags == 0 : num_bags % batch_size == 0;
  check(are_whole && num_bags <= std::numeric_limits<int32_t>::max(), "split_lengths", "shape (K * B,), below 2^31");
  Split split{ids.const_data_ptr(), lengths.const_data_ptr(), nullptr, split_ids.mutable_data_ptr(),
              split_lengths.mutable_data_ptr(), nullptr, std::vector<Routing>(routings.begin(), routings.end()),
              static_cast<const int64_t*>(pieces.const_data_ptr()), first_of, ids.numel(),
              batch_size == 0 ? 0 : num_bags / batch_size, batch_size, 0};
  check(weights.has_value() == split_weights.has_value(), "split_weights", "room for weights, or neither");
  if (weights) {
    for (const Tensor& tensor : {*weights, *split_weights}) {
      check_plain(tensor, "weights");
      const bool fits = tensor.numel() == ids.numel() && tensor.scalar_type() == weights->scalar_type();
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

}  // namespace

// Which instruction set the innermost loops run on, and, with a limit, from now on up to that one.
extern "C" const char* dnis_block_instruction_set(const char* limit) {
  constexpr const char* NAMES[] = {"baseline", "avx2", "avx512"};
  for (size_t i = 0; limit != nullptr && i < std::size(NAMES); ++i)
    if (std::strcmp(limit, NAMES[i]) == 0) instruction_set = widest_instruction_set(static_cast<InstructionSet>(i));
  return NAMES[static_cast<size_t>(instruction_set.load())];
}

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def(
      "select_pooled(Tensor pooled, Tensor alpha, Tensor rows, Tensor? divisors, Tensor layout, Tensor(a!) out) -> ()");
  library.def(
      "spread_gradient(Tensor grad, Tensor alpha, Tensor rows, Tensor? divisors, Tensor layout, bool keep_empty, "
      "Tensor(a!) grad_pooled) -> bool");
  library.def(
      "sum_alpha_gradient(Tensor grad, Tensor pooled, Tensor rows, Tensor? divisors, Tensor layout, "
      "Tensor(a!) grad_alpha) -> ()");
  library.def("fill_rows(Tensor ids, Tensor lengths, Tensor[] routings, int[] places, Tensor(a!) rows) -> ()");
  library.def("are_good_bags(Tensor ids, Tensor lengths, Tensor bounds, Tensor longest) -> bool");
  library.def(
      "split_bags(Tensor ids, Tensor lengths, Tensor? weights, Tensor[] routings, Tensor pieces, int[] first_of, "
      "int batch_size, Tensor(a!) split_ids, Tensor(b!) split_lengths, Tensor(c!)? split_weights) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) {
  library.impl("select_pooled", TORCH_BOX(&select_pooled));
  library.impl("spread_gradient", TORCH_BOX(&spread_gradient));
  library.impl("sum_alpha_gradient", TORCH_BOX(&sum_alpha_gradient));
  library.impl("fill_rows", TORCH_BOX(&fill_rows));
  library.impl("are_good_bags", TORCH_BOX(&are_good_bags));
  library.impl("split_bags", TORCH_BOX(&split_bags));
}
