#include "files/atomic_write.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "files/source.hpp"

namespace tandem::files {
namespace {

constexpr mode_t permissions = 0666;  // less the umask

std::string directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// A hidden name beside `path` that no other process uses at the same time.
std::string temporary_name(const std::string& path, int attempt) {
  // A long name is cut, so that this one has at most the 255 bytes that a name may have.
  constexpr std::size_t most = 200;
  const std::string target = std::filesystem::path(path).filename().string();
  return (std::filesystem::path(directory_of(path)) /
          fmt::format(".{}.{}.{}.tmp", target.substr(0, most), ::getpid(), attempt))
      .string();
}

constexpr int attempts = 100;

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  struct stat info {};
  const bool replaces = ::stat(path_.c_str(), &info) == 0;
  if (!replaces && errno != ENOENT) fail("cannot be written");  // a name that is too long, for one
  if (replaces && !S_ISREG(info.st_mode)) {
    refuse(path_, "is {}; outputs replace regular files only, give another path",
           S_ISDIR(info.st_mode) ? "a directory" : "not a regular file");
  }
  create();
  if (replaces) adopt_permissions(info);
}

void AtomicFile::create() {
  descriptor_ = ::open(directory_of(path_).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, permissions);
  // EISDIR: a kernel without O_TMPFILE; EOPNOTSUPP: a file system without it.
  if (descriptor_ >= 0 || (errno != EISDIR && errno != EOPNOTSUPP)) {
    if (descriptor_ < 0) fail("cannot be written");
    return;
  }
  for (int i = 0; i < attempts && descriptor_ < 0; ++i) {
    temporary_ = temporary_name(path_, i);
    descriptor_ = ::open(temporary_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, permissions);
    if (descriptor_ < 0 && errno != EEXIST) break;
  }
  if (descriptor_ < 0) {
    temporary_.clear();
    fail("cannot be written");
  }
}

void AtomicFile::adopt_permissions(const struct stat& replaced) {
  // What only its owner could read must not be everyone's from now on. A group's permissions go to no other
  // group: where the file cannot be given to it, they are left out.
  struct stat own {};
  if (::fstat(descriptor_, &own) != 0) fail("cannot be written");
  mode_t mode = replaced.st_mode & 0777U;
  if (own.st_uid != replaced.st_uid) static_cast<void>(::fchown(descriptor_, replaced.st_uid, gid_t(-1)));
  if (own.st_gid != replaced.st_gid && ::fchown(descriptor_, uid_t(-1), replaced.st_gid) != 0) mode &= ~070U;
  if (::fchmod(descriptor_, mode) != 0) fail("cannot be given the permissions of the file it replaces");
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  // Linux transfers at most 2^31 - 4096 bytes a call.
  constexpr std::size_t most = std::size_t{1} << 30;
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor_, bytes.data(), std::min(bytes.size(), most));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("writing failed");
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

void AtomicFile::flush() {
  if (::fsync(descriptor_) != 0) fail("writing failed");
}

void AtomicFile::commit() {
  flush();
  // linkat cannot replace a file and rename needs a name: link under a hidden name, then rename.
  const std::string nameless = fmt::format("/proc/self/fd/{}", descriptor_);
  for (int i = 0; i < attempts && temporary_.empty(); ++i) {
    const std::string name = temporary_name(path_, i);
    if (::linkat(AT_FDCWD, nameless.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      temporary_ = name;
    } else if (errno != EEXIST) {
      break;
    }
  }
  if (temporary_.empty() || ::rename(temporary_.c_str(), path_.c_str()) != 0)
    fail("cannot be given its name");
  temporary_.clear();
  // The name reaches the disk with its directory.
  const int directory = ::open(directory_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}

void AtomicFile::fail(const char* what) const {
  const int code = errno;
  const char* remedy = code == ENOSPC || code == EDQUOT || code == EFBIG
                           ? "free some space or write elsewhere"
                       : code == ENOENT                  ? "create the directory first"
                       : code == EACCES || code == EROFS ? "choose a directory this user may write to"
                       : code == ENAMETOOLONG            ? "choose a shorter name"
                                                         : "check the path and the disk";
  throw Error(Status::runtime,
              fmt::format("{}: {}: {}; no file was left, {}", path_, what, std::strerror(code), remedy));
}

}  // namespace tandem::files
