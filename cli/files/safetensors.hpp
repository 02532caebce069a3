// The safetensors format (https://github.com/huggingface/safetensors, "Format"): eight bytes of header
// length, a JSON header that names each tensor's dtype, shape and bytes, then the bytes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "files/atomic_write.hpp"
#include "files/source.hpp"
#include "files/tensor_data.hpp"

namespace tandem::files {

using Metadata = std::map<std::string, std::string>;

/// What the header says of one tensor. `begin` and `end` count from the end of the header.
struct SafetensorsEntry {
  std::string dtype_name;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// A checked safetensors file: the header is read and verified on construction, tensors when they are asked
/// for.
class Safetensors {
 public:
  /// Throws Error unless the whole file keeps the format's rules: a header of at most 100 MB that is one JSON
  /// object without duplicate keys, known dtypes, shape times element size equal to the bytes, and bytes that
  /// cover the rest of the file exactly, without overlap or hole.
  explicit Safetensors(std::unique_ptr<Source> source);

  [[nodiscard]] const std::string& name() const { return source_->name(); }
  [[nodiscard]] const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  [[nodiscard]] const Metadata& metadata() const { return metadata_; }

  /// Reads one tensor. Throws Error if there is none of that name, it has no or more than four dimensions, or
  /// its dtype is not F32, F16, BF16, F8_E4M3, I8, I32 or I64.
  [[nodiscard]] TensorData load(const std::string& tensor) const;

 private:
  std::unique_ptr<Source> source_;
  std::uint64_t data_start_ = 0;
  std::map<std::string, SafetensorsEntry> entries_;
  Metadata metadata_;
};

/// Writes tensors (contiguous, of the dtypes above) in the format's canonical layout: widest elements first,
/// then by name.
void write_safetensors(AtomicFile& file, std::vector<NamedTensor> tensors, const Metadata& metadata = {});

}  // namespace tandem::files
