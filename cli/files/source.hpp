// Where a file reader gets its bytes: a file on disk, or memory (tests and fuzzing). And how it reports what
// is wrong.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tandem/error.hpp"

namespace tandem::files {

/// A sequence of bytes of known length that is read at offsets.
class Source {
 public:
  Source(std::string name, std::uint64_t size) : name_(std::move(name)), size_(size) {}
  virtual ~Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  /// What error messages call it: the path.
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::uint64_t size() const { return size_; }
  /// Fills `into` from `offset`. The caller has checked the range against size(). Throws Error if the bytes
  /// cannot be had all the same (a disk failure, a file cut short while it is read).
  virtual void read(std::uint64_t offset, std::span<std::byte> into) const = 0;

 private:
  std::string name_;
  std::uint64_t size_;
};

/// Bytes in memory, which must outlive the source.
class MemorySource final : public Source {
 public:
  MemorySource(std::string name, std::span<const std::byte> bytes)
      : Source(std::move(name), bytes.size()), bytes_(bytes) {}
  void read(std::uint64_t offset, std::span<std::byte> into) const override;

 private:
  std::span<const std::byte> bytes_;
};

/// Opens a regular file. Throws Error where there is none, or it may not be read.
std::unique_ptr<Source> open_file(const std::string& path);

/// `text` as it may stand in a one-line message: quoted, unprintable bytes as \xNN, at most 60 characters.
std::string in_quotes(std::string_view text);

/// `text` as it may be shown on a terminal: unprintable bytes as \xNN, and so the bytes of characters that
/// control it (escape sequences, the direction of text) and of what is no UTF-8. The rest stays.
std::string printable(std::string_view text);

/// Throws the Error of a malformed file: "<file>: <message>". The message names what was found, the rule, the
/// remedy.
template <typename... Args>
[[noreturn]] void refuse(const std::string& file, fmt::format_string<Args...> message, Args&&... args) {
  throw Error(Status::invalid_argument, file + ": " + fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace tandem::files
