// Any bytes at all: the safetensors reader either throws tandem::Error or returns tensors that fit the bytes.
#include <cstdlib>

#include "files/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem::files;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    const Safetensors file(std::make_unique<MemorySource>("input", bytes));
    std::uint64_t total = 0;
    for (const auto& [name, entry] : file.entries()) {
      total += entry.end - entry.begin;
      try {
        const TensorData tensor = file.load(name);
        if (tensor.bytes().size() != entry.end - entry.begin) std::abort();
      } catch (const tandem::Error&) {  // a dtype or rank that Tandem does not compute with
      }
    }
    if (total > size) std::abort();
  } catch (const tandem::Error& error) {
    if (std::string_view(error.what()).find('\n') != std::string_view::npos) std::abort();
  }
  return 0;
}
