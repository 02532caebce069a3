// Where results go.
#pragma once

#include <string>

#include "files/safetensors.hpp"
#include "inputs.hpp"

namespace tandem::cli {

/// Checks that `path` can be written as write_outputs will, so that a long computation does not end in vain.
/// Throws Error.
void check_output_path(const std::string& path);

/// Writes all tensors to one .safetensors file, or, where `path` is a directory or has no extension, to
/// NAME.npy in it. All files are complete on disk before the first gets its name. Returns the paths written.
std::vector<std::string> write_outputs(const TensorSet& tensors, const std::string& path,
                                       const files::Metadata& metadata);

}  // namespace tandem::cli
