// dnis_torchrec::bag_offsets: where the bags of a batch begin, from their lengths, which are checked on the way.
//
// Packaged models take lengths from strangers: what they ask for has to be there, and an error names the feature.
// Shapes: B batch, F features, I ids of a batch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Feature `index` of names that line breaks separate.
std::string one_of(const std::string& names, int64_t index) {
  size_t begin = 0;
  for (; index > 0; --index) begin = names.find('\n', begin) + 1;
  return "feature '" + names.substr(begin, names.find('\n', begin) - begin) + "'";
}

std::string all_of(const std::string& names) {
  std::string place = "features '";
  for (const char letter : names) place += letter == '\n' ? std::string("', '") : std::string(1, letter);
  return place + "'";
}

[[noreturn]] void refuse(const std::string& place, const std::string& requirement, const std::string& received) {
  throw std::invalid_argument(place + ": expected " + requirement + ", got " + received);
}

template <typename Length>
void add_up(const Length* lengths, int64_t num_bags, int64_t num_ids, int64_t batch_size, const std::string& names,
            int64_t* offsets) {
  int64_t total = 0;
  offsets[0] = 0;
  for (int64_t bag = 0; bag < num_bags; ++bag) {
    const int64_t length = static_cast<int64_t>(lengths[bag]);
    if (__builtin_expect(length < 0 || length > num_ids - total, 0)) {
      const std::string place = one_of(names, bag / batch_size), sample = " in sample " + std::to_string(bag % batch_size);
      if (length < 0) refuse(place, "lengths of at least 0", std::to_string(length) + sample);
      const std::string left = std::to_string(num_ids - total);
      refuse(place, "no more ids than there are", "a bag of " + std::to_string(length) + sample + ", with " + left + " left");
    }
    total += length;
    offsets[bag + 1] = total;
  }
  if (total != num_ids) {
    refuse(all_of(names), "as many ids as their lengths add up to, " + std::to_string(total), std::to_string(num_ids));
  }
}

// The F names, UTF-8, separated by line breaks. A tensor, because torch's stable ABI loses the memory of every string.
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
  if (!is_wide && dtype != ScalarType::Int) refuse(all_of(features), "int32 or int64 lengths", "others");
  int64_t num_features = 1;
  for (const char letter : features) num_features += letter == '\n';
  const bool fits = lengths.dim() == 2 && lengths.size(0) == num_features && lengths.is_contiguous() && lengths.is_cpu();
  if (!fits) refuse(all_of(features), "contiguous lengths of shape (F, B) on the CPU", "others");
  const int64_t num_bags = lengths.numel(), size = num_bags + 1, stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      1, &size, &stride, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, &handle));
  Tensor offsets(handle);
  int64_t* begins = static_cast<int64_t*>(offsets.mutable_data_ptr());
  const void* data = lengths.const_data_ptr();
  if (is_wide) {
    add_up(static_cast<const int64_t*>(data), num_bags, ids.numel(), lengths.size(1), features, begins);
  } else {
    add_up(static_cast<const int32_t*>(data), num_bags, ids.numel(), lengths.size(1), features, begins);
  }
  return offsets;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dnis_torchrec, library) {
  library.def("bag_offsets(Tensor lengths, Tensor ids, Tensor features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dnis_torchrec, CPU, library) {
  library.impl("bag_offsets", TORCH_BOX(&bag_offsets));
}
