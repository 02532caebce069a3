#include "outputs.hpp"

#include <filesystem>
#include <vector>

#include "files/npy.hpp"
#include "files/source.hpp"

namespace tandem::cli {
namespace {

/// "results/", "results" and what is a directory already, but not "results.safetensors".
bool names_directory(const std::filesystem::path& path) {
  return std::filesystem::is_directory(path) || !path.has_extension();
}

std::string npy_path(const std::string& directory, const std::string& name) {
  return (std::filesystem::path(directory) / (name + ".npy")).string();
}

void make_directory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    throw Error(Status::runtime,
                fmt::format("{}: cannot be created: {}; choose a directory this user may write to", path,
                            error.message()));
  }
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
  std::filesystem::path existing = std::filesystem::absolute(path);
  while (!std::filesystem::exists(existing)) existing = existing.parent_path();
  files::AtomicFile probe(npy_path(existing.string(), "out"));
}

std::vector<std::string> write_outputs(const TensorSet& tensors, const std::string& path,
                                       const files::Metadata& metadata) {
  std::vector<files::AtomicFile> written;
  if (names_directory(path)) {
    make_directory(path);
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
