// Files that appear whole or not at all.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <span>
#include <string>

namespace tandem::files {

/// A file under construction. Nothing is visible at `path` until commit(); destroyed without it, nothing
/// remains. Where the file system can (O_TMPFILE), the file has no name until then, so that even a killed
/// process leaves nothing behind. One that replaces another keeps its permissions, group and, where this
/// process may, owner.
class AtomicFile {
 public:
  /// Throws Error if the directory cannot be written to, or `path` is something else than a regular file.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  AtomicFile& operator=(AtomicFile&&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }

  /// Appends. Throws Error if the disk is full or fails.
  void write(std::span<const std::byte> bytes);
  /// Brings the bytes to the disk (fsync). commit() does it too; with several files, flush all before
  /// committing the first.
  void flush();
  /// Gives the file its name, replacing what was there, in one step. Throws Error.
  void commit();

 private:
  void create();
  void adopt_permissions(const struct stat& replaced);
  [[noreturn]] void fail(const char* what) const;

  std::string path_;
  std::string temporary_;  ///< the name it has meanwhile, empty while it has none
  int descriptor_ = -1;
};

}  // namespace tandem::files
