// Any bytes at all: the .npy reader either throws tandem::Error or returns an array that fits the bytes.
#include <cstdlib>

#include "files/npy.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  for (const auto stored_as :
       {std::optional<DType>(), std::optional(DType::bf16), std::optional(DType::e4m3)}) {
    try {
      const files::TensorData array = files::read_npy(files::MemorySource("input", bytes), stored_as);
      if (array.bytes().size() >= size) std::abort();
    } catch (const Error& error) {
      if (std::string_view(error.what()).find('\n') != std::string_view::npos) std::abort();
    }
  }
  return 0;
}
