#include "files/source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

}  // namespace tandem::files
