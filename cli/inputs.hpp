// Tensors from files, by the names of the arguments they are for.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "files/safetensors.hpp"
#include "files/tensor_data.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tandem::cli {

using TensorSet = std::map<std::string, files::TensorData>;

struct InputOptions {
  std::vector<std::string> paths;    ///< x.safetensors, x.npy or ROLE=x.npy
  std::vector<std::string> renames;  ///< ROLE=NAME, for safetensors
  std::optional<DType> npy_as;
};

struct Inputs {
  TensorSet tensors;
  std::vector<std::string> ignored;  ///< tensors of a safetensors file that are no argument
  files::Metadata metadata;
  std::vector<std::string> files;  ///< the paths that were read
};

/// Adds FILES, --tensor and --npy-as.
void add_input_options(CLI::App& command, InputOptions& options, bool required);

/// Reads every file. Throws Error, before any computation.
Inputs load_inputs(const InputOptions& options);

/// Parses a dtype's short name, "bf16". Throws Error naming `what` and the choices.
DType parse_dtype(const std::string& name, const char* what);

/// A CLI option whose value is a dtype.
CLI::Option* add_dtype_option(CLI::App& command, const std::string& flag, std::optional<DType>& into,
                              const std::string& help);

}  // namespace tandem::cli
