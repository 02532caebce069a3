#include "gpu/cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "problem/log.hpp"
#include "problem/stats.hpp"
#include "tandem/error.hpp"

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

/// An open file or folder; what it says of itself cannot be exchanged for another's.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  [[nodiscard]] bool open_ok() const { return number_ >= 0; }
  [[nodiscard]] int number() const { return number_; }
  [[nodiscard]] struct stat facts() const {
    struct stat facts {};
    if (fstat(number_, &facts) != 0) facts.st_uid = static_cast<uid_t>(-1);  // nobody's
    return facts;
  }

 private:
  int number_;
};

/// A folder may itself be a link; what counts is whose the folder is that it leads to.
Descriptor open_folder(const fs::path& path) {
  return Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

/// Why another user than this one and root could have written what has these facts: one of `writers` is among
/// its permissions, or it is another user's. Empty if none could.
std::string why_untrusted(const struct stat& facts, mode_t writers) {
  if ((facts.st_mode & writers) != 0)
    return fmt::format("may be written by users other than its owner (mode {:04o})", facts.st_mode & 07777);
  if (facts.st_uid != geteuid() && facts.st_uid != 0)
    return fmt::format("belongs to user {}, who is neither user {} nor root", facts.st_uid, geteuid());
  return {};
}

/// A file under a name that no other has, which is removed unless it was renamed.
class TemporaryFile {
 public:
  TemporaryFile(const Descriptor& folder, std::string name)
      : folder_(folder),
        name_(std::move(name)),
        file_(openat(folder.number(), name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) {}
  ~TemporaryFile() {
    if (file_.open_ok() && !kept_) unlinkat(folder_.number(), name_.c_str(), 0);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  bool write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(file_.number(), bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return fsync(file_.number()) == 0;
  }
  bool rename_to(const std::string& target) {
    kept_ = renameat(folder_.number(), name_.c_str(), folder_.number(), target.c_str()) == 0;
    return kept_;
  }
  [[nodiscard]] bool open_ok() const { return file_.open_ok(); }

 private:
  const Descriptor& folder_;
  std::string name_;
  Descriptor file_;
  bool kept_ = false;
};

/// The bytes of a file that nobody but this user and root can have written; it follows no link. Else nothing,
/// and why; that stays empty if there is no such file.
std::optional<std::string> read_trusted(const Descriptor& folder, const std::string& name,
                                        std::string& why_not) {
  // O_NONBLOCK: a pipe of that name is not waited for.
  const Descriptor file(
      openat(folder.number(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file.open_ok()) {
    if (errno != ENOENT) why_not = errno == ELOOP ? "is a symbolic link" : "cannot be opened";
    return std::nullopt;
  }
  const struct stat facts = file.facts();
  why_not = S_ISREG(facts.st_mode) ? why_untrusted(facts, S_IWGRP | S_IWOTH) : "is not a file";
  if (!why_not.empty()) return std::nullopt;
  std::string bytes(static_cast<std::size_t>(facts.st_size), '\0');
  std::size_t read = 0;
  while (read < bytes.size()) {
    const ssize_t n = ::read(file.number(), bytes.data() + read, bytes.size() - read);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    read += static_cast<std::size_t>(n);
  }
  bytes.resize(read);
  return bytes;
}

std::string name_of(std::string_view key) {
  return fmt::format("{:016x}.kernel", fnv1a(key));
}

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

DiskCache::DiskCache(fs::path directory) : directory_(std::move(directory)) {
  if (!directory_.has_filename()) directory_ = directory_.parent_path();  // "cache/", which store would make
}

fs::path DiskCache::file_of(std::string_view key) const {
  return directory_ / name_of(key);
}

std::string DiskCache::why_refused() const {
  const Descriptor folder = open_folder(directory_);
  return folder.open_ok() ? why_untrusted(folder.facts(), S_IWOTH) : "";
}

std::optional<CompiledKernel> DiskCache::load(std::string_view key) const try {
  const Descriptor folder = open_folder(directory_);
  if (!folder.open_ok()) return std::nullopt;
  const struct stat facts = folder.facts();
  if (const std::string why = why_untrusted(facts, S_IWOTH); !why.empty()) {
    if ((facts.st_mode & S_IWOTH) != 0) {
      fail(Status::unsupported,
           "the folder of compiled kernels must be writable by its owner alone, since the "
           "GPU runs what it holds; {} {}: chmod go-w it, or set TANDEM_CACHE_DIR to a "
           "folder of your own, or to nothing for no cache",
           directory_.string(), why);
    }
    log(LogLevel::info, "the kernel cache {} is not used: it {}", directory_.string(), why);
    return std::nullopt;
  }
  std::string why_not;
  std::string found;
  std::optional<CompiledKernel> kernel;
  if (const auto bytes = read_trusted(folder, name_of(key), why_not)) {
    kernel = unpack_entry(*bytes, found);
    if (!kernel) why_not = "is damaged";
  }
  if (!why_not.empty()) log(LogLevel::info, "{} is not loaded: it {}", file_of(key).string(), why_not);
  if (kernel && found != key) return std::nullopt;
  return kernel;
} catch (const Error&) {
  throw;
} catch (...) {
  return std::nullopt;
}

bool DiskCache::store(std::string_view key, const CompiledKernel& kernel) const noexcept try {
  if (directory_.empty()) return false;
  std::error_code error;
  fs::create_directories(directory_.parent_path(), error);
  mkdir(directory_.c_str(), 0700);
  const Descriptor folder = open_folder(directory_);
  if (!folder.open_ok() || !why_untrusted(folder.facts(), S_IWOTH).empty()) return false;
  static std::atomic<unsigned> counter = 0;
  const std::string target = name_of(key);
  TemporaryFile file(folder, fmt::format("{}.{}.{}.part", target, getpid(), counter++));
  return file.open_ok() && file.write(pack_entry(key, kernel)) && file.rename_to(target);
} catch (...) {
  return false;
}

}  // namespace tandem::gpu
