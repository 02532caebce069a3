// The one kind of Python literal that an .npy header holds: {'descr': '<f4', 'fortran_order': False, 'shape':
// (2, 3), }.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::files {

struct ArrayDescription {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

/// Parses exactly that dictionary: the three keys, each once, in any order. Throws Error, naming `file`.
ArrayDescription parse_array_description(const std::string& file, std::string_view text);

}  // namespace tandem::files
