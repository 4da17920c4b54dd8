// What the fused operators share: the bags of a batch, how they are read and checked, and how they
// are spread over threads. A source includes this file in its namespace, behind torch's and the
// standard library's headers, with the name of its operator in OPERATOR.

constexpr int64_t WINDOW = 64;              // ids whose rows are asked of memory ahead of their use
constexpr int64_t ROWS_PER_THREAD = 4'096;  // rows and bags that outweigh waking a thread

// int32 or int64, as they come.
struct Integers {
  const void* data = nullptr;
  bool is_wide = false;

  int64_t operator[](int64_t index) const {
    return is_wide ? static_cast<const int64_t*>(data)[index]
                   : static_cast<const int32_t*>(data)[index];
  }
  void prefetch(int64_t index) const {
    __builtin_prefetch(
        static_cast<const char*>(data) + index * (is_wide ? sizeof(int64_t) : sizeof(int32_t)));
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

// Checks where offsets begin and end, and tells of how many keys they are.
int64_t count_keys(const Integers& offsets, int64_t count, int64_t num_ids, int64_t batch_size) {
  check(count > 0 && offsets[0] == 0 && offsets[count - 1] == num_ids, "offsets", RISING);
  const int64_t num_keys = batch_size == 0 ? 0 : (count - 1) / batch_size;
  check(num_keys * batch_size == count - 1, "offsets", "batch_size bags of every key");
  return num_keys;
}

// Checks the offsets of keys that no feature reads; kernels check the others, bag by bag, as they
// come to them. Each begins where the one before it ends: if all rise, what one bag holds is part
// of no other.
template <typename Feature>
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
  bags.num_keys = count_keys(bags.offsets, offsets.numel(), bags.num_ids, batch_size);
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
template <typename Feature>
void prefetch_first(const Feature& feature, const Bags& bags) {
  const int64_t first_bag = feature.key * bags.batch_size, begin = bags.offsets[first_bag];
  const int64_t end = std::min(bags.offsets[first_bag + bags.batch_size], bags.num_ids);
  if (begin < 0 || begin >= end) return;
  for (int64_t at = begin; at < begin + std::min(WINDOW, end - begin); ++at)
    feature.prefetch(bags.ids[at]);
}

// Gives the columns of the output out: features take them one after the other, so that each is
// written, and by one alone.
struct Columns {
  int64_t width;
  int64_t next = 0;

  void take(int64_t first_column, int64_t embedding_dim, const char* argument) {
    const bool fits = first_column == next && embedding_dim >= 0 && embedding_dim <= width - next &&
                      embedding_dim <= std::numeric_limits<int32_t>::max();
    check(
        fits, argument, "columns within the output, those of one feature behind those of another");
    next += embedding_dim;
  }
  void check_all_taken(const char* argument) const {
    check(next == width, argument, "columns for the whole output");
  }
};

Tensor empty_output(int64_t batch_size, int64_t width) {
  const int64_t sizes[] = {batch_size, width}, strides[] = {width, 1};
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// Pools every bag of every feature. Bags are spread over torch's threads where there is enough to
// do; each writes its own part of the output, so the result does not depend on how many threads
// there are.
//
// `pool(feature, bags, first_bag, last_bag)` pools some bags of a feature and says what it found
// wrong; of several such finds the one that comes first is described and thrown. `ahead(f)` is
// called before the bags of feature f are begun.
template <typename Feature, typename Pool, typename Ahead, typename Describe>
void pool_all(const std::vector<Feature>& features, const Bags& bags, Pool pool, Ahead ahead,
    Describe describe) {
  using Fault = decltype(pool(features[0], bags, 0, 0));
  check_unread(features, bags);
  const int64_t num_bags = static_cast<int64_t>(features.size()) * bags.batch_size;
  std::mutex mutex;
  Fault fault;
  size_t faulty = features.size();
  const auto pool_range = [&](int64_t begin, int64_t end) {
    for (int64_t next = begin; next < end;) {
      const int64_t f = next / bags.batch_size, first_bag = next - f * bags.batch_size;
      const int64_t last_bag = std::min(bags.batch_size, first_bag + end - next);
      ahead(f);
      const Fault found = pool(features[f], bags, first_bag, last_bag);
      if (found.kind != Fault::NONE) {
        const std::lock_guard<std::mutex> guard(mutex);
        const size_t feature = static_cast<size_t>(f);
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
