// Prints the functions that tests ask for as the GPU's kernels have them, into a header that the emulated
// kernels are compiled with:  print_functions HEADER
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <map>

#include "contract/published_functions.hpp"
#include "gpu/function_source.hpp"

namespace tandem {
namespace {

/// Text by digest: several cases may have one function.
std::map<std::uint64_t, std::string> printed() {
  std::map<std::uint64_t, std::string> texts;
  for (const harness::Named& f : harness::tested_functions()) {
    std::vector<ConstTensor> views;
    for (const harness::Captured& c : f.captured) {
      ConstTensor& view = views.emplace_back(nullptr, c.dtype, std::initializer_list<std::int64_t>{});
      view.rank = static_cast<int>(c.shape.size());
      std::copy(c.shape.begin(), c.shape.end(), view.shape.begin());
    }
    std::optional<Function> score;
    std::optional<Function> mask;
    if (!f.score.empty())
      score = Function::parse(f.score, Function::Kind::score, views, harness::real_captured(f));
    if (!f.mask.empty()) mask = Function::parse(f.mask, Function::Kind::mask, views);
    const gpu::CallFunctions both{.score = score ? &*score : nullptr, .mask = mask ? &*mask : nullptr};
    texts.emplace(gpu::functions_config(both).digest, gpu::function_source(both));
    gpu::CallFunctions with_gradients = both;
    if (both.score != nullptr) {
      for (const int n : harness::real_captured(f)) with_gradients.gradients |= 1U << n;
    }
    const std::uint64_t digest = gpu::functions_config(with_gradients).digest;
    texts.emplace(digest, gpu::function_source(with_gradients));
  }
  const Dropout any{};
  const gpu::CallFunctions dropout{.dropout = &any};  // without functions
  texts.emplace(gpu::functions_config(dropout).digest, gpu::function_source(dropout));
  return texts;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  if (argc != 2) return 1;
  std::ofstream file(argv[1]);
  std::string digests;
  for (const auto& [digest, text] : tandem::printed()) {
    file << text;
    digests += fmt::format("{}{:#x}ULL", digests.empty() ? "" : ", ", digest);
  }
  file << "#define TANDEM_PRINTED_FUNCTIONS " << digests << '\n';
  return file.flush() ? 0 : 1;
}
