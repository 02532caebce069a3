// The JSON header of a safetensors file, parsed event by event: nothing is built for what the format does not
// allow.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "files/safetensors.hpp"

namespace tandem::files {

/// Fills `entries` and `metadata` from the header's text. Throws Error, naming `file`, for anything but
/// {"__metadata__": {string: string}, tensor: {"dtype": string, "shape": [integers], "data_offsets": [begin,
/// end]}, ...} with no key twice. What dtype, shape and offsets say is the caller's to check.
void parse_safetensors_header(const std::string& file, std::string_view header,
                              std::map<std::string, SafetensorsEntry>& entries, Metadata& metadata);

}  // namespace tandem::files
