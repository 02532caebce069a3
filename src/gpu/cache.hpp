// Compiled kernels on disk. The cache is a convenience: whatever is wrong with it, a kernel is compiled
// instead. What another user could have written is never loaded.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "gpu/compiler.hpp"

namespace tandem::gpu {

/// A kernel and the text that tells it from all others, as bytes: magic, lengths, checksum, key, symbol,
/// image.
std::string pack_entry(std::string_view key, const CompiledKernel& kernel);

/// The kernel in `bytes`, if they are a whole, undamaged entry; `key` receives its key.
std::optional<CompiledKernel> unpack_entry(std::string_view bytes, std::string& key);

/// Everything that decides what a compiled kernel is: sources, options, compiler, header and expression.
std::string cache_key(const KernelName& name, const CompilerInfo& compiler);

/// TANDEM_CACHE_DIR, else XDG_CACHE_HOME/tandem, else HOME/.cache/tandem; empty (no cache) where none is set.
/// TANDEM_CACHE_DIR set to nothing turns the cache off.
std::filesystem::path default_cache_directory();

/// A directory of entries, both of this user or root. Safe for any number of threads and processes: entries
/// appear whole, by an atomic rename.
class DiskCache {
 public:
  explicit DiskCache(std::filesystem::path directory);

  /// Why the directory is not used; empty if it is, or would be if it were there.
  [[nodiscard]] std::string why_refused() const;

  /// The entry for `key`; nothing if it is absent, unreadable, damaged, or of another key, or if another user
  /// could have written it, which the log says. Throws Error if every user may write into the directory.
  [[nodiscard]] std::optional<CompiledKernel> load(std::string_view key) const;

  /// Writes an entry, replacing any before it. False where the file system or why_refused refuses; nothing is
  /// left behind then.
  bool store(std::string_view key, const CompiledKernel& kernel) const noexcept;

  /// The file an entry has or would have.
  [[nodiscard]] std::filesystem::path file_of(std::string_view key) const;

 private:
  std::filesystem::path directory_;
};

}  // namespace tandem::gpu
