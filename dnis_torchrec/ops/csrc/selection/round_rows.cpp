// Rows rounded to the values that they are served as, in place, on the CPU: see dnis_torchrec/ops/row_rounding.py.
// Shapes: N rows of a shard, n of them that are rounded, D its columns, S blocks of the table.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "blocks.h"
#include "row_loops.h"

namespace {

using namespace dnis_torchrec;

constexpr int64_t NUMBERS_PER_THREAD = 1 << 14;  // numbers that outweigh waking a thread

void round_rows(Tensor codes, Tensor routing, std::optional<Tensor> rows, int64_t first_row, Tensor weight,
                Tensor residual) {
  float* weights = mutable_numbers<float>(weight, ScalarType::Float, "weight");
  float* residuals = mutable_numbers<float>(residual, ScalarType::Float, "residual");
  check(weight.dim() == 2 && residual.dim() == 2, "weight", "shape (N, D)");
  const int64_t num_rows = weight.size(0), dim = weight.size(1);
  check(residual.size(0) == num_rows && residual.size(1) == dim, "residual", "the shape of the weights");
  const float* fields = numbers<float>(codes, ScalarType::Float, "codes");
  check(codes.dim() == 3 && codes.size(1) == 4 && codes.size(2) == dim, "codes", "shape (S + 1, 4, D)");
  const int64_t num_codes = codes.size(0);
  const int64_t* ids = rows ? numbers<int64_t>(*rows, ScalarType::Long, "rows") : nullptr;
  const int64_t count = rows ? rows->numel() : num_rows;
  const Routing blocks(routing);
  check(first_row >= 0 && first_row <= MOST << 20, "first_row", "a row of the table");
  const bool is_map = blocks.kind == Routing::BYTES || blocks.kind == Routing::SHORTS;
  check(!is_map || lies_within(first_row, num_rows, blocks.size), "routing", "all rows of the shard");
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
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, NUMBERS_PER_THREAD / std::max<int64_t>(1, dim)), range);
  });
  check(fits, "rows", "rows of the shard, in blocks that have codes");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def(
      "round_rows(Tensor codes, Tensor routing, Tensor? rows, int first_row, Tensor(a!) weight, Tensor(b!) residual) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) { library.impl("round_rows", TORCH_BOX(&round_rows)); }
