#include "outputs.hpp"

#include <filesystem>
#include <vector>

#include "files/npy.hpp"
#include "files/source.hpp"

namespace tandem::cli {
namespace {

namespace fs = std::filesystem;

/// "results/", "results" and what is a directory already, but not "results.safetensors". Paths that cannot be
/// looked at are told apart by their names; who opens them says why they cannot be.
bool names_directory(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error) || !path.has_extension();
}

std::string npy_path(const std::string& directory, const std::string& name) {
  return (fs::path(directory) / (name + ".npy")).string();
}

[[noreturn]] void no_directory(const std::string& path, const std::error_code& error) {
  throw Error(Status::runtime,
              fmt::format("{}: the directory cannot be made: {}; choose another, that this user may write to",
                          path, error.message()));
}

}  // namespace

void check_output_path(const std::string& path) {
  if (!names_directory(path)) {
    if (!path.ends_with(".safetensors")) {
      files::refuse(path,
                    "is neither a .safetensors file nor a directory by its name; say which with the name");
    }
    files::AtomicFile probe(path);
    return;
  }
  // The directory itself is made once there are results; until then its nearest ancestor tells.
  std::error_code error;
  fs::path existing = fs::absolute(path, error);
  while (!fs::exists(existing, error) && existing != existing.parent_path()) {
    // A name that leads nowhere, such as a link to itself, is an error; one that is free is not.
    if (error) no_directory(path, error);
    existing = existing.parent_path();
  }
  files::AtomicFile probe(npy_path(existing.string(), "out"));
}

std::vector<std::string> output_paths(const std::string& path, const std::vector<std::string>& names) {
  if (!names_directory(path)) return {path};
  std::vector<std::string> paths;
  paths.reserve(names.size());
  for (const std::string& name : names) paths.push_back(npy_path(path, name));
  return paths;
}

void check_inputs_stay(const std::vector<std::string>& outputs, const std::vector<std::string>& inputs) {
  for (const std::string& output : outputs) {
    for (const std::string& input : inputs) {
      std::error_code error;  // an output that does not exist replaces nothing
      if (fs::equivalent(output, input, error)) {
        files::refuse(output, "would replace the input {}; give another path for the output", input);
      }
    }
  }
}

std::vector<std::string> write_outputs(const TensorSet& tensors, const std::string& path,
                                       const files::Metadata& metadata) {
  std::vector<files::AtomicFile> written;
  if (names_directory(path)) {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) no_directory(path, error);
    for (const auto& [name, tensor] : tensors) {
      write_npy(written.emplace_back(npy_path(path, name)), tensor.view());
    }
  } else {
    std::vector<files::NamedTensor> named;
    for (const auto& [name, tensor] : tensors) named.push_back({name, tensor.view()});
    write_safetensors(written.emplace_back(path), std::move(named), metadata);
  }
  for (files::AtomicFile& file : written) file.flush();
  std::vector<std::string> paths;
  for (files::AtomicFile& file : written) {
    file.commit();
    paths.push_back(file.path());
  }
  return paths;
}

}  // namespace tandem::cli
