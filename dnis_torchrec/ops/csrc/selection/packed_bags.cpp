// Bags split by block and packed, and soft selection of what they pool to: see dnis_torchrec/ops/packed_bags.py.
//
// Built together with block_operators.cpp, against torch's stable ABI.
// Shapes: B batch, F features, K keys, R packed rows, S blocks, I ids, P <= I pieces.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "row_loops.h"

namespace {

using namespace dnis_torchrec;

struct Pieces {
  int64_t* starts;       // (F, B + 1): first piece of every bag
  int32_t* rows;         // row of alpha
  int32_t* sizes;        // ids in a piece
  int32_t* piece_of_id;  // -1 for an id of no block
};

template <typename Id, typename Length>
void find_typed(const Id* ids, const Length* lengths, int64_t num_ids, int64_t batch_size,
                const std::vector<Routing>& routings, const std::vector<int64_t>& features, const Pieces& pieces) {
  int64_t i = 0;
  int32_t next = 0;
  std::vector<int64_t> last_bag;
  std::vector<int32_t> piece_of_block;
  for (size_t f = 0; f < routings.size(); ++f) {
    const int64_t first_row = features[3 * f], first_alpha_row = features[3 * f + 1], num_blocks = features[3 * f + 2];
    check(num_blocks >= 0 && num_blocks <= routings[f].num_blocks(), "features", "numbers of blocks");
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

// Splits every bag by block. `features` holds three numbers each: row of the table that id 0 is, row of alpha of block 0,
// and number of blocks. Pieces are numbered feature by feature, bag by bag, and in a bag as its ids come.
void find_pieces(Tensor ids, Tensor lengths, std::vector<Tensor> routings, std::vector<int64_t> features, Tensor starts,
                 Tensor rows, Tensor sizes, Tensor piece_of_id) {
  const int64_t num_features = static_cast<int64_t>(routings.size());
  check(features.size() == 3 * routings.size(), "features", "three numbers for each routing");
  check(starts.dim() == 2 && starts.size(0) == num_features && starts.size(1) >= 1, "starts", "shape (F, B + 1)");
  const int64_t batch_size = starts.size(1) - 1;
  check(lengths.numel() == num_features * batch_size, "lengths", "shape (F * B,)");
  check(ids.numel() <= std::numeric_limits<int32_t>::max(), "ids", "fewer than 2^31");
  for (const Tensor& tensor : {rows, sizes, piece_of_id}) check(tensor.numel() == ids.numel(), "pieces", "room for all");
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

// Lays the pieces of every feature out over its keys, row by row: its j-th goes to key j % keys, row j / keys. Returns
// where the ids of every piece begin. What it reads is read once: whatever lies over it, nothing is written outside.
template <typename Length>
std::vector<int64_t> place_pieces(const int64_t* starts, const int32_t* sizes, int64_t num_pieces, int64_t batch_size,
                                  const std::vector<int64_t>& num_keys, int64_t num_rows, int64_t num_ids,
                                  Length* packed_lengths) {
  std::vector<int64_t> begins(static_cast<size_t>(num_pieces));
  int64_t total = 0;
  for (size_t f = 0; f < num_keys.size(); ++f, starts += batch_size + 1) {
    const int64_t first = starts[0], end = starts[batch_size];
    check(first >= 0 && first <= end && end <= num_pieces, "starts", "rising ones");
    check(end - first <= num_keys[f] * num_rows, "packed_lengths", "room for all pieces");
    for (int64_t key = 0; key < num_keys[f]; ++key, packed_lengths += num_rows) {
      std::fill(packed_lengths, packed_lengths + num_rows, Length(0));
      Length* length = packed_lengths;
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

struct Packed {
  const int32_t* piece_of_id;
  const char* weights;
  char* packed_weights;
  size_t weight_bytes;
};

template <typename Id>
void pack_typed(const Id* ids, Id* packed_ids, int64_t num_ids, std::vector<int64_t>& next, const Packed& packed) {
  const int64_t num_pieces = static_cast<int64_t>(next.size());
  for (int64_t i = 0; i < num_ids; ++i) {
    const int32_t piece = packed.piece_of_id[i];
    if (piece < 0) continue;
    check(piece < num_pieces && next[piece] < num_ids, "piece_of_id", "pieces that there are");
    const int64_t position = next[piece]++;
    packed_ids[position] = ids[i];
    if (packed.weights == nullptr) continue;
    std::memcpy(packed.packed_weights + position * packed.weight_bytes, packed.weights + i * packed.weight_bytes,
                packed.weight_bytes);
  }
}

// Orders ids by key, packed row and their place in the bag. packed_ids and packed_weights are filled from the front.
void pack_ids(Tensor ids, std::optional<Tensor> weights, Tensor starts, Tensor sizes, Tensor piece_of_id,
              std::vector<int64_t> num_keys, Tensor packed_ids, Tensor packed_lengths,
              std::optional<Tensor> packed_weights) {
  const int64_t num_ids = ids.numel();
  const bool fits = starts.dim() == 2 && starts.size(0) == static_cast<int64_t>(num_keys.size()) && starts.size(1) >= 1;
  check(fits, "starts", "shape (F, B + 1)");
  int64_t total_keys = 0;
  for (const int64_t count : num_keys) {
    check(count > 0 && count <= packed_lengths.numel(), "num_keys", "one at least for each feature, and room for all");
    total_keys += count;
  }
  const int64_t num_rows = total_keys == 0 ? 0 : packed_lengths.numel() / total_keys;
  check(packed_lengths.numel() == num_rows * total_keys, "packed_lengths", "shape (K * R,)");
  check(piece_of_id.numel() == num_ids, "piece_of_id", "one for each id");
  check_plain(packed_ids, "packed_ids");
  check(packed_ids.scalar_type() == ids.scalar_type() && packed_ids.numel() == num_ids, "packed_ids", "room for ids");
  Packed packed{numbers<int32_t>(piece_of_id, ScalarType::Int, "piece_of_id"), nullptr, nullptr, 0};
  check(weights.has_value() == packed_weights.has_value(), "packed_weights", "room for weights, or neither");
  if (weights) {
    for (const Tensor& tensor : {*weights, *packed_weights}) {
      check_plain(tensor, "weights");
      check(tensor.numel() == num_ids && tensor.scalar_type() == weights->scalar_type(), "weights", "one for each id");
    }
    packed.weights = static_cast<const char*>(weights->const_data_ptr());
    packed.packed_weights = static_cast<char*>(packed_weights->mutable_data_ptr());
    packed.weight_bytes = weights->element_size();
  }
  std::vector<int64_t> next;
  with_integers(packed_lengths, "packed_lengths", [&](const auto* length) {
    using Length = std::remove_cv_t<std::remove_pointer_t<decltype(length)>>;
    next = place_pieces(numbers<int64_t>(starts, ScalarType::Long, "starts"),
                        numbers<int32_t>(sizes, ScalarType::Int, "sizes"), sizes.numel(), starts.size(1) - 1, num_keys,
                        num_rows, num_ids, static_cast<Length*>(packed_lengths.mutable_data_ptr()));
  });
  with_integers(ids, "ids", [&](const auto* id) {
    using Id = std::remove_cv_t<std::remove_pointer_t<decltype(id)>>;
    pack_typed(id, static_cast<Id*>(packed_ids.mutable_data_ptr()), num_ids, next, packed);
  });
}

// One feature of soft selection.
struct Feature {
  int64_t in_column, out_column, dim, num_keys, alpha_offset, alpha_stride;
};

// What all three operators of soft selection read.
struct Packing {
  std::vector<Feature> features;
  const int64_t* starts;
  const int32_t* rows;
  int64_t batch_size, num_rows, in_width, out_width;

  Packing(const Tensor& starts_, const Tensor& rows_, const Tensor& layout, const Tensor& pooled, const Tensor& out,
          int64_t alpha_size)
      : batch_size(out.size(0)), num_rows(pooled.size(0)), in_width(pooled.size(1)), out_width(out.size(1)) {
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

  void check_feature(const Feature& feature, const int64_t* start, int64_t num_pieces, int64_t alpha_size) const {
    const bool sound = feature.num_keys > 0 && feature.num_keys <= MOST && feature.dim >= 0 &&
                       feature.dim <= MOST;  // so that no product overflows
    check(sound && lies_within(feature.in_column, feature.num_keys * feature.dim, in_width), "layout", "keys inside");
    check(lies_within(feature.out_column, feature.dim, out_width), "layout", "outputs inside");
    check(lies_within(feature.alpha_offset, feature.dim, alpha_size), "layout", "alphas inside");
    const int64_t left = alpha_size - feature.alpha_offset - feature.dim;
    const bool has_stride = feature.alpha_stride >= 0 && feature.alpha_stride <= alpha_size;
    check(has_stride, "layout", "alphas inside");
    bool rises = start[0] >= 0;
    for (int64_t b = 0; b < batch_size; ++b) rises &= start[b] <= start[b + 1];
    check(rises && start[batch_size] <= num_pieces, "starts", "rising ones");
    const int64_t count = start[batch_size] - start[0];
    check(count == 0 || (count - 1) / feature.num_keys < num_rows, "starts", "pieces that there are");
    bool fits = true;
    for (int64_t p = start[0]; p < start[batch_size]; ++p)
      fits &= rows[p] >= 0 && rows[p] * feature.alpha_stride <= left;
    check(fits, "rows", "rows of alpha");
  }

  // Calls visit(columns from `begin` of the piece in its packed row, first alpha) for the pieces of a bag.
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
void select(const Packing& packing, const Number* pooled, const Number* alpha, Number* out) {
  const RowLoops<Number>& loops = row_loops<Number>();
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (size_t f = 0; f < packing.features.size(); ++f) {
        const int64_t dim = packing.features[f].dim;
        Number* to = out + b * packing.out_width + packing.features[f].out_column;
        bool is_first = true;
        packing.walk(f, b, [&](int64_t at, int64_t alpha_at) {
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
  torch::stable::parallel_for(0, packing.batch_size, SAMPLES_PER_THREAD, range);
}

// grad_pooled = grad * alpha[row]; what no piece takes stays as it is.
template <typename Number>
void spread(const Packing& packing, const Number* grad, const Number* alpha, Number* grad_pooled) {
  const RowLoops<Number>& loops = row_loops<Number>();
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (size_t f = 0; f < packing.features.size(); ++f) {
        const int64_t dim = packing.features[f].dim;
        const Number* from = grad + b * packing.out_width + packing.features[f].out_column;
        packing.walk(f, b, [&](int64_t at, int64_t alpha_at) {
          loops.multiply(from, alpha + alpha_at, grad_pooled + at, dim);
        });
      }
    }
  };
  torch::stable::parallel_for(0, packing.batch_size, SAMPLES_PER_THREAD, range);
}

// grad_alpha[row] += grad * pooled.
template <typename Number>
void gather_alpha(const Packing& packing, const Number* grad, const Number* pooled, Number* grad_alpha,
                  int64_t alpha_size) {
  const RowLoops<Number>& loops = row_loops<Number>();
  sum_over_samples(packing.batch_size, grad_alpha, alpha_size, [&](int64_t b, Number* sum) {
    for (size_t f = 0; f < packing.features.size(); ++f) {
      const int64_t dim = packing.features[f].dim;
      const Number* left = grad + b * packing.out_width + packing.features[f].out_column;
      packing.walk(f, b, [&](int64_t at, int64_t alpha_at) {
        loops.add_product(left, pooled + at, sum + alpha_at, dim);
      });
    }
  });
}

enum class Task { SELECT, SPREAD, GATHER_ALPHA };

// `wide` holds the pieces, `narrow` the outputs; which of them, or of `alpha`, is written depends on the task.
template <typename Number>
void run_typed(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& starts, const Tensor& rows,
               const Tensor& layout, const Tensor& narrow) {
  const ScalarType dtype = wide.scalar_type();
  check(wide.dim() == 2 && narrow.dim() == 2, "tensors", "matrices");
  const Packing packing(starts, rows, layout, wide, narrow, alpha.numel());
  const Tensor& written = task == Task::SELECT ? narrow : task == Task::SPREAD ? wide : alpha;
  check_apart(written, starts, "starts");
  check_apart(written, rows, "rows");
  if (task == Task::SELECT) {
    select(packing, numbers<Number>(wide, dtype, "pooled"), numbers<Number>(alpha, dtype, "alpha"),
           mutable_numbers<Number>(narrow, dtype, "out"));
  } else if (task == Task::SPREAD) {
    spread(packing, numbers<Number>(narrow, dtype, "grad"), numbers<Number>(alpha, dtype, "alpha"),
           mutable_numbers<Number>(wide, dtype, "grad_pooled"));
  } else {
    gather_alpha(packing, numbers<Number>(narrow, dtype, "grad"), numbers<Number>(wide, dtype, "pooled"),
                 mutable_numbers<Number>(alpha, dtype, "grad_alpha"), alpha.numel());
  }
}

void run(Task task, const Tensor& wide, const Tensor& alpha, const Tensor& starts, const Tensor& rows,
         const Tensor& layout, const Tensor& narrow) {
  if (wide.scalar_type() == ScalarType::Float) {
    run_typed<float>(task, wide, alpha, starts, rows, layout, narrow);
    return;
  }
  check(wide.scalar_type() == ScalarType::Double, "pooled", "float32 or float64");
  run_typed<double>(task, wide, alpha, starts, rows, layout, narrow);
}

void select_packed(Tensor pooled, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, Tensor out) {
  run(Task::SELECT, pooled, alpha, starts, rows, layout, out);
}

void spread_packed_gradient(Tensor grad, Tensor alpha, Tensor starts, Tensor rows, Tensor layout,
                            Tensor grad_pooled) {
  run(Task::SPREAD, grad_pooled, alpha, starts, rows, layout, grad);
}

void sum_packed_alpha_gradient(Tensor grad, Tensor pooled, Tensor starts, Tensor rows, Tensor layout,
                               Tensor grad_alpha) {
  run(Task::GATHER_ALPHA, pooled, grad_alpha, starts, rows, layout, grad);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def(
      "find_pieces(Tensor ids, Tensor lengths, Tensor[] routings, int[] features, Tensor(a!) starts, Tensor(b!) rows, "
      "Tensor(c!) sizes, Tensor(d!) piece_of_id) -> ()");
  library.def(
      "pack_ids(Tensor ids, Tensor? weights, Tensor starts, Tensor sizes, Tensor piece_of_id, int[] num_keys, "
      "Tensor(a!) packed_ids, Tensor(b!) packed_lengths, Tensor(c!)? packed_weights) -> ()");
  library.def(
      "select_packed(Tensor pooled, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, Tensor(a!) out) -> ()");
  library.def(
      "spread_packed_gradient(Tensor grad, Tensor alpha, Tensor starts, Tensor rows, Tensor layout, "
      "Tensor(a!) grad_pooled) -> ()");
  library.def(
      "sum_packed_alpha_gradient(Tensor grad, Tensor pooled, Tensor starts, Tensor rows, Tensor layout, "
      "Tensor(a!) grad_alpha) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) {
  library.impl("find_pieces", TORCH_BOX(&find_pieces));
  library.impl("pack_ids", TORCH_BOX(&pack_ids));
  library.impl("select_packed", TORCH_BOX(&select_packed));
  library.impl("spread_packed_gradient", TORCH_BOX(&spread_packed_gradient));
  library.impl("sum_packed_alpha_gradient", TORCH_BOX(&sum_packed_alpha_gradient));
}
