#include "gpu/cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

namespace tandem::gpu {
namespace {

namespace fs = std::filesystem;

constexpr std::array<char, 8> magic = {'t', 'a', 'n', 'd', 'e', 'm', 'k', '1'};

struct Header {
  std::array<char, 8> magic;
  std::uint64_t checksum;  ///< covers everything after this field
  std::uint64_t key_bytes;
  std::uint64_t symbol_bytes;
  std::uint64_t image_bytes;
  KernelUsage usage;
  std::uint32_t reserved;
};
static_assert(sizeof(Header) == 64, "no padding: the header is written as it lies in memory");
constexpr std::size_t checksum_end = 16;

/// Closes a descriptor, and removes its file unless it was kept.
class TemporaryFile {
 public:
  explicit TemporaryFile(const fs::path& path)
      : path_(path), descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) {}
  ~TemporaryFile() {
    if (descriptor_ < 0) return;
    close(descriptor_);
    if (!kept_) unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  bool write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(descriptor_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return fsync(descriptor_) == 0;
  }
  bool rename_to(const fs::path& target) {
    kept_ = rename(path_.c_str(), target.c_str()) == 0;
    return kept_;
  }
  [[nodiscard]] bool open_ok() const { return descriptor_ >= 0; }

 private:
  fs::path path_;
  int descriptor_;
  bool kept_ = false;
};

}  // namespace

std::string pack_entry(std::string_view key, const CompiledKernel& kernel) {
  Header header{.magic = magic,
                .checksum = 0,
                .key_bytes = key.size(),
                .symbol_bytes = kernel.symbol.size(),
                .image_bytes = kernel.image.size(),
                .usage = kernel.usage,
                .reserved = 0};
  std::string bytes(sizeof(Header), '\0');
  bytes.append(key).append(kernel.symbol).append(kernel.image.data(), kernel.image.size());
  std::memcpy(bytes.data(), &header, sizeof(Header));
  header.checksum = fnv1a(std::string_view(bytes).substr(checksum_end));
  std::memcpy(bytes.data(), &header, sizeof(Header));
  return bytes;
}

std::optional<CompiledKernel> unpack_entry(std::string_view bytes, std::string& key) {
  Header header;
  if (bytes.size() < sizeof(Header)) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof(Header));
  const std::string_view body = bytes.substr(sizeof(Header));
  // Each length is compared before the sum, which could wrap round.
  if (header.magic != magic || header.key_bytes > body.size() || header.symbol_bytes > body.size() ||
      header.image_bytes > body.size() ||
      header.key_bytes + header.symbol_bytes + header.image_bytes != body.size() ||
      header.checksum != fnv1a(bytes.substr(checksum_end))) {
    return std::nullopt;
  }
  const std::string_view image = body.substr(header.key_bytes + header.symbol_bytes);
  key = body.substr(0, header.key_bytes);
  return CompiledKernel{.image = {image.begin(), image.end()},
                        .symbol = std::string(body.substr(header.key_bytes, header.symbol_bytes)),
                        .usage = header.usage};
}

std::string cache_key(const KernelName& name, const CompilerInfo& compiler) {
  std::string key = fmt::format("sources {:016x}\nNVRTC {}.{}\n", sources_digest(name.header), compiler.major,
                                compiler.minor);
  key += architecture_option(name) + "\n";
  for (const char* option : compile_options()) key += fmt::format("{}\n", option);
  return key + fmt::format("{}\n{}\n{}", name.header, name.expression, name.functions);
}

fs::path default_cache_directory() {
  if (const char* own = std::getenv("TANDEM_CACHE_DIR")) return own;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg == '/')
    return fs::path(xdg) / "tandem";
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/')
    return fs::path(home) / ".cache/tandem";
  return {};
}

fs::path DiskCache::file_of(std::string_view key) const {
  return directory_ / fmt::format("{:016x}.kernel", fnv1a(key));
}

std::optional<CompiledKernel> DiskCache::load(std::string_view key) const noexcept try {
  if (directory_.empty()) return std::nullopt;
  std::ifstream file(file_of(key), std::ios::binary);
  if (!file) return std::nullopt;
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::string found;
  std::optional<CompiledKernel> kernel = unpack_entry(bytes, found);
  if (kernel && found != key) return std::nullopt;
  return kernel;
} catch (...) {
  return std::nullopt;
}

bool DiskCache::store(std::string_view key, const CompiledKernel& kernel) const noexcept try {
  if (directory_.empty()) return false;
  std::error_code error;
  fs::create_directories(directory_, error);
  if (error) return false;
  static std::atomic<unsigned> counter = 0;
  const fs::path target = file_of(key);
  TemporaryFile file(fmt::format("{}.{}.{}.part", target.string(), getpid(), counter++));
  return file.open_ok() && file.write(pack_entry(key, kernel)) && file.rename_to(target);
} catch (...) {
  return false;
}

}  // namespace tandem::gpu
