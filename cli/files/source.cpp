#include "files/source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace tandem::files {
namespace {

class FileSource final : public Source {
 public:
  FileSource(std::string name, std::uint64_t size, int descriptor)
      : Source(std::move(name), size), descriptor_(descriptor) {}
  ~FileSource() override { ::close(descriptor_); }

  void read(std::uint64_t offset, std::span<std::byte> into) const override {
    // Linux transfers at most 2^31 - 4096 bytes a call.
    constexpr std::size_t most = std::size_t{1} << 30;
    while (!into.empty()) {
      const ssize_t got =
          ::pread(descriptor_, into.data(), std::min(into.size(), most), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        throw Error(Status::runtime,
                    fmt::format("{}: reading failed at byte {}: {}; check the disk and try again", name(),
                                offset, std::strerror(errno)));
      }
      if (got == 0) {
        refuse(name(),
               "ended at byte {} while it was read, {} bytes were there before; let its writer finish first",
               offset, size());
      }
      offset += static_cast<std::uint64_t>(got);
      into = into.subspan(static_cast<std::size_t>(got));
    }
  }

 private:
  int descriptor_;
};

struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;  ///< 0: no UTF-8
};

/// The first character of `text`.
Character decoded(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i]));
  };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead < 0xC0 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF8 ? 4 : 0;
  if (bytes == 0 || bytes > text.size()) return {};
  std::uint32_t code = lead & (0x7FU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0U) != 0x80) return {};
    code = code << 6U | (byte(i) & 0x3FU);
  }
  // An ASCII character in more bytes than it needs is none, since some programs take it for that all the
  // same.
  constexpr std::array<std::uint32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  return code < least[bytes] ? Character{} : Character{code, bytes};
}

/// Does a character command a terminal, or hide how the text around it reads?
bool controls(std::uint32_t code) {
  const auto within = [code](std::uint32_t first, std::uint32_t last) {
    return code >= first && code <= last;
  };
  return within(0, 0x1F) || within(0x7F, 0x9F) || code == 0x61C || within(0x200B, 0x200F) ||
         within(0x2028, 0x202E) || within(0x2060, 0x206F) || code == 0xFEFF;
}

}  // namespace

void MemorySource::read(std::uint64_t offset, std::span<std::byte> into) const {
  std::ranges::copy(bytes_.subspan(static_cast<std::size_t>(offset), into.size()), into.begin());
}

std::unique_ptr<Source> open_file(const std::string& path) {
  // O_NONBLOCK: opening a named pipe must fail below, not wait for a writer.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    const char* remedy = errno == ENOENT   ? "check the path"
                         : errno == EACCES ? "make it readable for this user"
                                           : "check the path and its permissions";
    refuse(path, "cannot be opened: {}; {}", std::strerror(errno), remedy);
  }
  struct stat info {};
  const bool known = ::fstat(descriptor, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    ::close(descriptor);
    refuse(path, "is {}; inputs are read at offsets, so give a regular file",
           known && S_ISDIR(info.st_mode) ? "a directory" : "not a regular file");
  }
  return std::make_unique<FileSource>(path, static_cast<std::uint64_t>(info.st_size), descriptor);
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t longest = 60;
  std::string result = "'";
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte > 0x7e) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += c;
    }
  }
  return result + (text.size() > longest ? "...'" : "'");
}

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const Character c = decoded(text);
    const std::string_view bytes = text.substr(0, std::max<std::size_t>(1, c.bytes));
    if (c.bytes > 0 && !controls(c.code)) {
      result += bytes;
    } else {
      for (const char byte : bytes) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
    text.remove_prefix(bytes.size());
  }
  return result;
}

}  // namespace tandem::files
