// Runs an AOTInductor package of `dnis package` with libtorch alone: no Python, no TorchRec, no FBGEMM.
//
//   load_package PACKAGE < REQUEST
//
// A request is numbers between blanks: batch size B, number of dense features, number of features F, number of ids I, then
// B rows of dense features, F rows of B bag lengths, I ids and, if bags are weighted, I weights. Prints a prediction per
// line. A package holds machine code: run only those that you trust.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace fs = std::filesystem;

void check(bool condition, const std::string& message) {
  if (!condition) throw std::runtime_error(message);
}

at::ScalarType dtype_named(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> dtypes = {
      {"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"float64", at::kDouble},
      {"int64", at::kLong},    {"int32", at::kInt},    {"int16", at::kShort},       {"int8", at::kChar},
      {"uint16", at::kUInt16}, {"uint8", at::kByte},   {"bool", at::kBool}};
  const auto found = dtypes.find(name);
  check(found != dtypes.end(), "constants.index: unknown dtype " + name);
  return found->second;
}

// A file in memory for as long as the process lives: its pages are read as they are touched, and shared between processes.
struct MappedFile {
  char* data;
  size_t size;

  explicit MappedFile(const fs::path& path) {
    const int file = open(path.c_str(), O_RDONLY);
    struct stat status {};
    check(file >= 0 && fstat(file, &status) == 0, path.string() + ": expected a file that can be read");
    size = static_cast<size_t>(status.st_size);
    void* mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    check(mapped != MAP_FAILED, path.string() + ": expected a file that can be mapped");
    data = static_cast<char*>(mapped);
  }
};

// The tensors of constants.safetensors, as constants.index lists them: dtype, offset, bytes, number of sizes, sizes, name.
std::unordered_map<std::string, at::Tensor> map_constants(const MappedFile& file, const fs::path& index) {
  std::unordered_map<std::string, at::Tensor> constants;
  std::ifstream lines(index);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string dtype, name;
    size_t offset = 0, bytes = 0, dims = 0;
    fields >> dtype >> offset >> bytes >> dims;
    std::vector<int64_t> sizes(dims);
    for (int64_t& size : sizes) fields >> size;
    std::getline(fields >> std::ws, name);
    check(!name.empty() && offset <= file.size && bytes <= file.size - offset, "constants.index: a line out of bounds");
    const auto tensor = at::from_blob(file.data + offset, sizes, at::TensorOptions().dtype(dtype_named(dtype)));
    check(tensor.nbytes() == bytes, "constants.index: " + name + ": another number of bytes than its sizes say");
    constants.emplace(name, tensor);
  }
  return constants;
}

template <typename Number>
at::Tensor read_tensor(std::istream& request, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(dtype));
  Number* data = static_cast<Number*>(tensor.data_ptr());
  for (int64_t i = 0; i < tensor.numel(); ++i) check(static_cast<bool>(request >> data[i]), "request: too short");
  return tensor;
}

// Found without a JSON parser: `dnis package` writes each field on a line of its own, after two blanks.
bool read_is_weighted(const fs::path& manifest) {
  std::ifstream file(manifest);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const bool is_weighted = text.find("\n  \"is_weighted\": true") != std::string::npos;
  const bool is_known = is_weighted || text.find("\n  \"is_weighted\": false") != std::string::npos;
  check(is_known, manifest.string() + ": expected is_weighted to be true or false");
  return is_weighted;
}

std::vector<at::Tensor> read_request(std::istream& request, bool is_weighted) {
  int64_t batch_size = 0, num_dense = 0, num_features = 0, num_ids = 0;
  request >> batch_size >> num_dense >> num_features >> num_ids;
  check(static_cast<bool>(request), "request: too short");
  const at::Tensor dense = read_tensor<float>(request, {batch_size, num_dense}, at::kFloat);
  const at::Tensor lengths = read_tensor<int32_t>(request, {num_features, batch_size}, at::kInt);
  const at::Tensor values = read_tensor<int64_t>(request, {num_ids}, at::kLong);
  std::vector<at::Tensor> inputs = {dense, values, lengths};
  if (is_weighted) inputs.push_back(read_tensor<float>(request, {num_ids}, at::kFloat));
  check((request >> std::ws).eof(), "request: too long");
  return inputs;
}

void serve(const fs::path& package) {
  const at::NoGradGuard no_grad;
  // operators that torch does not have register themselves when their library is loaded, which has to come first
  if (fs::is_directory(package / "lib")) {
    for (const auto& library : fs::directory_iterator(package / "lib")) {
      const void* loaded = dlopen(library.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
      check(loaded != nullptr, library.path().string() + ": expected a library that can be loaded");
    }
  }
  const MappedFile file(package / "constants.safetensors");
  auto constants = map_constants(file, package / "constants.index");
  torch::inductor::AOTIModelPackageLoader model(
      (package / "model.pt2").string(), "model", /*run_single_threaded=*/false, /*num_runners=*/1);
  model.load_constants(constants, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  const bool is_weighted = read_is_weighted(package / "package.json");
  const at::Tensor predictions = model.run(read_request(std::cin, is_weighted)).at(0).contiguous();
  for (int64_t i = 0; i < predictions.numel(); ++i) std::printf("%.8g\n", predictions.const_data_ptr<float>()[i]);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: load_package PACKAGE < REQUEST\n";
    return 2;
  }
  try {
    serve(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
