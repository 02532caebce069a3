#include "outputs.hpp"

#include <filesystem>
#include <vector>

#include "files/npy.hpp"
#include "files/source.hpp"

namespace tandem::cli {
namespace {

bool is_directory(const std::string& path) {
  return path.ends_with('/') || std::filesystem::is_directory(path);
}

std::string npy_path(const std::string& directory, const std::string& name) {
  return (std::filesystem::path(directory) / (name + ".npy")).string();
}

}  // namespace

void check_output_path(const std::string& path) {
  if (is_directory(path)) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (error) {
      throw Error(Status::runtime,
                  fmt::format("{}: cannot be created: {}; choose a directory this user may write to", path,
                              error.message()));
    }
    files::AtomicFile probe(npy_path(path, "out"));
  } else if (path.ends_with(".safetensors")) {
    files::AtomicFile probe(path);
  } else {
    files::refuse(
        path, "is neither a .safetensors file nor a directory (DIR/) by its name; say which with the name");
  }
}

std::vector<std::string> write_outputs(const TensorSet& tensors, const std::string& path,
                                       const files::Metadata& metadata) {
  std::vector<files::AtomicFile> written;
  if (is_directory(path)) {
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
