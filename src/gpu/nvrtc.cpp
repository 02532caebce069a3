#include "gpu/nvrtc.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <vector>

namespace tandem::gpu {
namespace {

namespace fs = std::filesystem;

/// 12.0 is the first with C++20 class types as template arguments and sm_90a.
constexpr const char* sonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

/// Where this library lies: the nvidia wheels are beside the Python package that holds it.
fs::path library_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&library_directory), &info) == 0 || info.dli_fname == nullptr)
    return {};
  std::error_code ignored;
  return fs::weakly_canonical(info.dli_fname, ignored).parent_path();
}

/// /usr/local/cuda, then cuda-13.1, cuda-13.0, ..., newest first.
std::vector<fs::path> toolkits() {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator("/usr/local", ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("cuda-13") || name.starts_with("cuda-12")) found.push_back(entry.path());
  }
  std::ranges::sort(found, std::greater<>());
  found.insert(found.begin(), "/usr/local/cuda");
  return found;
}

std::vector<fs::path> directories() {
  const fs::path own = library_directory();
  std::vector<fs::path> found;
  for (const fs::path& packages : {own.parent_path(), own}) {
    found.push_back(packages / "nvidia/cu13/lib");
    found.push_back(packages / "nvidia/cuda_nvrtc/lib");
  }
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* home = std::getenv(variable)) found.push_back(fs::path(home) / "lib64");
  }
  for (const fs::path& toolkit : toolkits()) found.push_back(toolkit / "lib64");
  return found;
}

void* open_somewhere(std::string& tried) {
  for (const char* name : sonames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return library;
  }
  for (const char* name : sonames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  tried = "the system's library path";
  for (const fs::path& directory : directories()) {
    for (const char* name : sonames) {
      if (void* library = dlopen((directory / name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    }
    tried += ", " + directory.string();
  }
  return nullptr;
}

template <typename Function>
bool find(void* library, Function*& entry, const char* symbol) {
  entry = reinterpret_cast<Function*>(dlsym(library, symbol));
  return entry != nullptr;
}

bool fill(void* library, Nvrtc& f) {
  return find(library, f.get_error_string, "nvrtcGetErrorString") &&
         find(library, f.version, "nvrtcVersion") && find(library, f.create_program, "nvrtcCreateProgram") &&
         find(library, f.destroy_program, "nvrtcDestroyProgram") &&
         find(library, f.add_name_expression, "nvrtcAddNameExpression") &&
         find(library, f.compile_program, "nvrtcCompileProgram") &&
         find(library, f.get_lowered_name, "nvrtcGetLoweredName") &&
         find(library, f.get_log_size, "nvrtcGetProgramLogSize") &&
         find(library, f.get_log, "nvrtcGetProgramLog") &&
         find(library, f.get_cubin_size, "nvrtcGetCUBINSize") &&
         find(library, f.get_cubin, "nvrtcGetCUBIN") && find(library, f.get_ptx_size, "nvrtcGetPTXSize") &&
         find(library, f.get_ptx, "nvrtcGetPTX") &&
         find(library, f.count_architectures, "nvrtcGetNumSupportedArchs") &&
         find(library, f.list_architectures, "nvrtcGetSupportedArchs");
}

/// NVRTC opens its companion by bare name, which the loader finds only on the system path or if it is open
/// already.
void open_builtins(const OpenedNvrtc& opened) {
  int major = 0;
  int minor = 0;
  opened.functions.version(&major, &minor);
  const fs::path beside =
      fs::path(opened.path).parent_path() / fmt::format("libnvrtc-builtins.so.{}.{}", major, minor);
  dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
}

}  // namespace

OpenedNvrtc open_nvrtc() {
  OpenedNvrtc opened;
  void* library = nullptr;
  if (const char* wanted = std::getenv("TANDEM_NVRTC")) {
    library = dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      opened.objection =
          fmt::format("TANDEM_NVRTC={} cannot be opened: {}", wanted, why != nullptr ? why : "no reason");
      return opened;
    }
  } else {
    std::string tried;
    library = open_somewhere(tried);
    if (library == nullptr) {
      opened.objection = fmt::format(
          "no CUDA compiler found (libnvrtc.so.13 or .12) in {}: pip install nvidia-cuda-nvrtc, or set "
          "TANDEM_NVRTC to the library's file",
          tried);
      return opened;
    }
  }
  if (!fill(library, opened.functions)) {
    opened.objection = "the CUDA compiler found is no NVRTC of version 12 or later";
    return opened;
  }
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(opened.functions.version), &info) != 0 &&
      info.dli_fname != nullptr) {
    opened.path = info.dli_fname;
  }
  open_builtins(opened);
  return opened;
}

}  // namespace tandem::gpu
