// Where results go.
#pragma once

#include <string>
#include <vector>

#include "files/safetensors.hpp"
#include "inputs.hpp"

namespace tandem::cli {

/// Checks that `path` can be written as write_outputs will, so that a long computation does not end in vain.
/// Throws Error.
void check_output_path(const std::string& path);

/// The files that write_outputs of tensors of these names makes.
std::vector<std::string> output_paths(const std::string& path, const std::vector<std::string>& names);

/// Throws Error where one of the files `outputs` is one of `inputs`, whatever paths lead to it.
void check_inputs_stay(const std::vector<std::string>& outputs, const std::vector<std::string>& inputs);

/// Writes all tensors to one .safetensors file, or, where `path` is a directory or has no extension, to
/// NAME.npy in it. All files are complete on disk before the first gets its name. Returns the paths written.
std::vector<std::string> write_outputs(const TensorSet& tensors, const std::string& path,
                                       const files::Metadata& metadata);

}  // namespace tandem::cli
