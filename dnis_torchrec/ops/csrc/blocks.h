// What the operators on blocks share: how they check their arguments, and where rows belong.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace dnis_torchrec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t SAMPLES_PER_THREAD = 64;  // samples that outweigh waking a thread
constexpr int64_t MAX_PARTIAL_SUMS = 16;    // parts in which alpha's gradient is summed, at most
constexpr int64_t SAMPLES_PER_SUM = 256;  // and in fewer where the batch is small
constexpr int64_t MOST = 1 << 30;  // columns, keys, rows of alpha: far from where integers end
constexpr int64_t FEW_BLOCKS = 16;  // up to here comparing with all ends beats guessing a branch

inline void check(bool condition, const char* argument, const char* requirement) {
  if (!condition)
    throw std::invalid_argument(
        std::string("block operators: ") + argument + ": expected " + requirement);
}

inline void check_plain(const Tensor& tensor, const char* argument) {
  check(tensor.is_contiguous() && tensor.is_cpu(), argument, "a contiguous one on the CPU");
}

template <typename Number>
const Number* numbers(const Tensor& tensor, ScalarType dtype, const char* argument) {
  check(tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.is_cpu(), argument,
      "another dtype or layout");
  return static_cast<const Number*>(tensor.const_data_ptr());
}

template <typename Number>
Number* mutable_numbers(const Tensor& tensor, ScalarType dtype, const char* argument) {
  numbers<Number>(tensor, dtype, argument);
  return static_cast<Number*>(tensor.mutable_data_ptr());
}

// Whether [first, first + count) lies in [0, size); nothing overflows, whatever the numbers are.
inline bool lies_within(int64_t first, int64_t count, int64_t size) {
  return first >= 0 && count >= 0 && first <= size && count <= size - first;
}

// Checks that what is written does not lie over what tells where to write.
inline void check_apart(const Tensor& written, const Tensor& read, const char* argument) {
  const auto begin_of = [](const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  };
  const auto end_of = [&](const Tensor& tensor) {
    return begin_of(tensor) + tensor.numel() * tensor.element_size();
  };
  const bool is_apart = begin_of(written) >= end_of(read) || begin_of(read) >= end_of(written);
  check(is_apart, argument, "memory that nothing is written to");
}

// Calls run(pointer to the integers), an int64_t or an int32_t one.
template <typename Run>
void with_integers(const Tensor& tensor, const char* argument, const Run& run) {
  if (tensor.scalar_type() == ScalarType::Long)
    return run(numbers<int64_t>(tensor, ScalarType::Long, argument));
  check(tensor.scalar_type() == ScalarType::Int, argument, "int32 or int64");
  run(numbers<int32_t>(tensor, ScalarType::Int, argument));
}

// Calls run(pointer to the ids, pointer to the lengths).
template <typename Run>
void with_bags(const Tensor& ids, const Tensor& lengths, const Run& run) {
  with_integers(ids, "ids", [&](const auto* id) {
    with_integers(lengths, "lengths", [&](const auto* length) { run(id, length); });
  });
}

// Where a row belongs: uint8 or uint16 block of every row, or (int64) the rising ends of the
// blocks; nothing passes on.
struct Routing {
  enum Kind { NONE, BYTES, SHORTS, ENDS };
  Kind kind;
  const void* data;
  int64_t size;

  explicit Routing(const Tensor& tensor) : kind(NONE), data(nullptr), size(tensor.numel()) {
    check(tensor.is_contiguous() && tensor.is_cpu(), "routings", "contiguous ones");
    if (size == 0) return;
    data = tensor.const_data_ptr();
    const ScalarType dtype = tensor.scalar_type();
    check(dtype == ScalarType::Byte || dtype == ScalarType::UInt16 || dtype == ScalarType::Long,
        "routings", "uint8, uint16 or int64");
    kind = dtype == ScalarType::Byte ? BYTES : dtype == ScalarType::UInt16 ? SHORTS : ENDS;
  }

  // No row lies in a block from here on.
  int64_t num_blocks() const {
    return kind == NONE ? 1 : kind == ENDS ? size + 1 : kind == BYTES ? 256 : 65'536;
  }

  int64_t block(int64_t id) const {
    if (kind == NONE) return 0;
    if (kind == ENDS) {
      const int64_t* ends = static_cast<const int64_t*>(data);
      if (size > FEW_BLOCKS) return std::upper_bound(ends, ends + size, id) - ends;
      int64_t block = 0;
      for (int64_t s = 0; s < size; ++s) block += id >= ends[s];
      return block;
    }
    return kind == BYTES ? block_of_row<uint8_t>(id) : block_of_row<uint16_t>(id);
  }

  // Calls visit(id -> block); what kind of routing this is is not asked again for every id.
  template <typename Visit>
  void with_blocks(const Visit& visit) const {
    if (kind == BYTES) return visit([this](int64_t id) { return block_of_row<uint8_t>(id); });
    if (kind == SHORTS) return visit([this](int64_t id) { return block_of_row<uint16_t>(id); });
    visit([this](int64_t id) { return block(id); });
  }

 private:
  template <typename Block>
  int64_t block_of_row(int64_t id) const {
    check(id >= 0 && id < size, "ids", "rows of their table");
    return static_cast<const Block*>(data)[id];
  }
};

// out[i] = the sum over samples b of what `add(b, sum)` adds to sum[i]: alpha's gradient. Summed in
// parts that do not depend on how many threads there are, so that every machine gives the same
// bits.
template <typename Number, typename Add>
void sum_over_samples(int64_t batch_size, Number* out, int64_t size, Add add) {
  const int64_t most = (batch_size + MAX_PARTIAL_SUMS - 1) / MAX_PARTIAL_SUMS;
  const int64_t step = std::max(SAMPLES_PER_SUM, most);
  const int64_t num_parts = (batch_size + step - 1) / step;
  std::vector<Number> sums(static_cast<size_t>(num_parts * size), Number(0));
  const auto range = [&](int64_t first_part, int64_t last_part) {
    for (int64_t part = first_part; part < last_part; ++part) {
      const int64_t end = std::min(batch_size, (part + 1) * step);
      for (int64_t b = part * step; b < end; ++b) add(b, sums.data() + part * size);
    }
  };
  torch::stable::parallel_for(0, num_parts, 1, range);
  for (int64_t i = 0; i < size; ++i) {
    double total = 0;
    for (int64_t part = 0; part < num_parts; ++part) total += sums[part * size + i];
    out[i] = static_cast<Number>(total);
  }
}

}  // namespace dnis_torchrec
