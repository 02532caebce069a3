// The kernel cache: whatever happens to its files, a kernel is found whole or not at all.
#include "gpu/cache.hpp"
#include "ops/forward/launch.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>

#include "gpu/kernels.hpp"
#include "harness/error_of.hpp"
#include "harness/runbook.hpp"
#include "harness/temporary_folder.hpp"
#include "tandem/log.hpp"
#include "tandem/stats.hpp"

namespace tandem::gpu {
namespace {

namespace fs = std::filesystem;

CompiledKernel sample(std::size_t bytes = 5000, char first = 'a') {
  CompiledKernel kernel{.image = std::vector<char>(bytes), .symbol = "_Z6sample", .usage = {168, 8, 16, 32}};
  for (std::size_t i = 0; i < bytes; ++i) kernel.image[i] = static_cast<char>(first + i % 7);
  return kernel;
}

bool same(const CompiledKernel& a, const CompiledKernel& b) {
  return a.image == b.image && a.symbol == b.symbol && a.usage.registers == b.usage.registers &&
         a.usage.stack_bytes == b.usage.stack_bytes &&
         a.usage.spill_store_bytes == b.usage.spill_store_bytes &&
         a.usage.spill_load_bytes == b.usage.spill_load_bytes;
}

class Cache : public testing::Test {
 protected:
  [[nodiscard]] std::string read(const fs::path& file) const {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const fs::path& file, const std::string& bytes) const {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
  }
  [[nodiscard]] std::ptrdiff_t files() const {
    return std::distance(fs::directory_iterator(directory), fs::directory_iterator());
  }

  harness::TemporaryFolder temporary;
  const fs::path& directory = temporary.path();
};

/// Runs f in a child process; true if it returns true there.
bool in_child(const std::function<bool()>& f) {
  const pid_t child = fork();
  if (child == 0) _exit(f() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_F(Cache, GivesBackWhatWasStored) {
  const DiskCache cache(directory / "made/on/demand");
  EXPECT_FALSE(cache.load("key"));
  EXPECT_TRUE(cache.store("key", sample()));
  const auto found = cache.load("key");
  ASSERT_TRUE(found);
  EXPECT_TRUE(same(*found, sample()));
  EXPECT_FALSE(cache.load("another key"));
}

TEST_F(Cache, AnyFlippedByteIsAMiss) {
  const DiskCache cache(directory);
  ASSERT_TRUE(cache.store("key", sample(300)));
  const std::string good = read(cache.file_of("key"));
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x40);
    write(cache.file_of("key"), bad);
    EXPECT_FALSE(cache.load("key")) << "byte " << i;
  }
  write(cache.file_of("key"), good);
  EXPECT_TRUE(cache.load("key"));
}

TEST_F(Cache, AnyTruncationOrGrowthIsAMiss) {
  const DiskCache cache(directory);
  ASSERT_TRUE(cache.store("key", sample(300)));
  const std::string good = read(cache.file_of("key"));
  for (std::size_t n = 0; n < good.size(); ++n) {
    write(cache.file_of("key"), good.substr(0, n));
    EXPECT_FALSE(cache.load("key")) << n << " bytes";
  }
  write(cache.file_of("key"), good + "x");
  EXPECT_FALSE(cache.load("key"));
}

TEST_F(Cache, LengthsThatWrapRoundAreAMiss) {
  std::string entry = pack_entry("key", sample(300));
  // key_bytes, symbol_bytes and image_bytes whose sum modulo 2^64 is right.
  const std::uint64_t lengths[3] = {std::uint64_t{1} << 63, std::uint64_t{1} << 63, 3 + 9 + 300};
  entry.replace(16, sizeof(lengths), reinterpret_cast<const char*>(lengths), sizeof(lengths));
  const std::uint64_t checksum = fnv1a(std::string_view(entry).substr(16));
  entry.replace(8, sizeof(checksum), reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  std::string key;
  EXPECT_FALSE(unpack_entry(entry, key));
}

TEST_F(Cache, AnotherKeysEntryUnderThisNameIsAMiss) {
  const DiskCache cache(directory);
  ASSERT_TRUE(cache.store("key", sample()));
  fs::copy(cache.file_of("key"), cache.file_of("other"));
  EXPECT_FALSE(cache.load("other"));
}

TEST_F(Cache, ADirectoryInPlaceOfAnEntryIsAMissAndNoError) {
  const DiskCache cache(directory);
  fs::create_directories(cache.file_of("key"));
  EXPECT_FALSE(cache.load("key"));
  EXPECT_FALSE(cache.store("key", sample()));
  EXPECT_EQ(files(), 1) << "a temporary file was left behind";
}

TEST_F(Cache, NoDirectoryOrOneThatCannotBeMadeIsNoError) {
  EXPECT_FALSE(DiskCache("").store("key", sample()));
  write(directory / "file", "in the way");
  EXPECT_FALSE(DiskCache(directory / "file/cache").store("key", sample()));
  EXPECT_FALSE(DiskCache("/proc/tandem").store("key", sample()));
  EXPECT_FALSE(DiskCache("/proc/tandem").load("key"));
}

TEST_F(Cache, AReadOnlyDirectoryStillServesWhatItHas) {
  const DiskCache cache(directory);
  ASSERT_TRUE(cache.store("key", sample()));
  fs::permissions(cache.file_of("key"), fs::perms{0644});
  fs::permissions(directory, fs::perms{0555});
  EXPECT_TRUE(in_child([&] {
    if (getuid() == 0 && setuid(65534) != 0) return false;  // root may write anywhere
    return cache.load("key").has_value() && !cache.store("new", sample());
  }));
  fs::permissions(directory, fs::perms::owner_all);
  EXPECT_EQ(files(), 1);
}

/// What the log says while `f` runs.
std::string logged(const std::function<void()>& f) {
  static std::string lines;
  lines.clear();
  set_log(LogLevel::info, [](LogLevel, const char* message) { lines += message; });
  f();
  set_log(LogLevel::off, nullptr);
  return lines;
}

TEST_F(Cache, WhatAnotherUserCouldHaveWrittenIsAMissThatTheLogTells) {
  const DiskCache cache(directory);
  const fs::path entry = cache.file_of("key");
  const auto refused = [&](const std::string& why) {
    const std::string line = logged([&] { EXPECT_FALSE(cache.load("key")); });
    EXPECT_EQ(line, why.empty() ? "" : entry.string() + " is not loaded: it " + why);
    return in_runbook("slow-first-call.md", line);
  };
  refused("");
  ASSERT_TRUE(cache.store("key", sample()));
  for (const mode_t mode : {0620, 0602, 0666}) {
    chmod(entry.c_str(), mode);
    EXPECT_TRUE(refused(fmt::format("may be written by users other than its owner (mode {:04o})", mode)));
  }
  chmod(entry.c_str(), 0644);
  EXPECT_TRUE(cache.load("key"));
  if (geteuid() == 0) {
    ASSERT_EQ(chown(entry.c_str(), 65534, 65534), 0);
    refused("belongs to user 65534, who is neither user 0 nor root");
  }
  fs::remove(entry);
  write(directory / "target", pack_entry("key", sample()));
  fs::create_symlink(directory / "target", entry);
  refused("is a symbolic link");
  fs::remove(entry);
  ASSERT_EQ(mkfifo(entry.c_str(), 0600), 0);
  refused("is not a file");
  fs::remove(entry);
  write(entry, "");
  EXPECT_TRUE(refused("is damaged"));
}

TEST_F(Cache, AFolderThatEveryUserMayWriteIntoIsAnError) {
  const DiskCache cache(directory);
  ASSERT_TRUE(cache.store("key", sample()));
  for (const mode_t mode : {0777, 01777}) {
    chmod(directory.c_str(), mode);
    EXPECT_EQ(
        error_of(Status::unsupported, [&] { return cache.load("key"); }),
        fmt::format("the folder of compiled kernels must be writable by its owner alone, since the GPU "
                    "runs what it holds; {} may be written by users other than its owner (mode {:04o}): "
                    "chmod go-w it, or set TANDEM_CACHE_DIR to a folder of your own, or to nothing for "
                    "no cache",
                    directory.string(), mode));
    EXPECT_FALSE(cache.store("other", sample()));
    EXPECT_NE(cache.why_refused(), "");
  }
  EXPECT_EQ(files(), 1);
  chmod(directory.c_str(), 0775);  // a group is trusted with the folder, not with what is in it
  EXPECT_TRUE(cache.load("key"));
  EXPECT_EQ(cache.why_refused(), "");
}

TEST_F(Cache, AFolderOfAnotherUserIsNotUsed) {
  if (geteuid() != 0) GTEST_SKIP() << "root alone can give a folder away";
  const DiskCache cache(directory);
  ASSERT_TRUE(cache.store("key", sample()));
  ASSERT_EQ(chown(directory.c_str(), 65534, 65534), 0);
  const std::string why = "belongs to user 65534, who is neither user 0 nor root";
  const std::string line = logged([&] { EXPECT_FALSE(cache.load("key")); });
  EXPECT_EQ(line, "the kernel cache " + directory.string() + " is not used: it " + why);
  EXPECT_TRUE(in_runbook("slow-first-call.md", line));
  EXPECT_EQ(cache.why_refused(), why);
  EXPECT_FALSE(cache.store("other", sample()));
}

TEST_F(Cache, AFolderIsMadeForItsOwnerAloneAndMayBeALink) {
  const mode_t before = umask(0);
  EXPECT_TRUE(DiskCache((directory / "made").string() + "/").store("key", sample()));
  umask(before);
  EXPECT_EQ(fs::status(directory / "made").permissions(), fs::perms::owner_all);
  fs::create_symlink(directory / "made", directory / "link");
  EXPECT_TRUE(DiskCache(directory / "link").load("key"));
}

TEST_F(Cache, AFullDiskLeavesNothingBehind) {
  const DiskCache cache(directory);
  EXPECT_TRUE(in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);  // so that the write fails after a part of it, as on a full disk
    const rlimit limit{4096, 4096};
    return setrlimit(RLIMIT_FSIZE, &limit) == 0 && !cache.store("key", sample(100000)) && !cache.load("key");
  }));
  EXPECT_EQ(files(), 0);
}

TEST_F(Cache, ProcessesThatRaceOnOneKeySeeWholeEntriesOnly) {
  const DiskCache cache(directory);
  std::vector<pid_t> children;
  for (char writer = 0; writer < 4; ++writer) {
    const pid_t child = fork();
    if (child == 0) {
      bool good = true;
      for (int i = 0; i < 50; ++i) {
        good &= cache.store("key", sample(20000, static_cast<char>('a' + writer)));
        const auto found = cache.load("key");
        good &= found && same(*found, sample(20000, found->image[0]));
      }
      _exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  EXPECT_EQ(files(), 1);
}

TEST_F(Cache, DirectoryFollowsTheEnvironment) {
  const auto with = [](const char* own, const char* xdg, const char* home) {
    const auto set = [](const char* name, const char* value) {
      value != nullptr ? setenv(name, value, 1) : unsetenv(name);
    };
    set("TANDEM_CACHE_DIR", own);
    set("XDG_CACHE_HOME", xdg);
    set("HOME", home);
    return default_cache_directory();
  };
  EXPECT_TRUE(in_child([&] {
    return with("/own", "/xdg", "/home/x") == "/own" && with(nullptr, "/xdg", "/home/x") == "/xdg/tandem" &&
           with(nullptr, nullptr, "/home/x") == "/home/x/.cache/tandem" &&
           with(nullptr, "relative", "/home/x") == "/home/x/.cache/tandem" &&
           with("", "/xdg", "/home/x").empty() && with(nullptr, nullptr, nullptr).empty();
  }));
}

TEST(CacheKey, TellsConfigsAndCompilersApart) {
  ForwardConfig a;
  ForwardConfig b;
  b.stages = 3;
  const CompilerInfo old{.major = 13, .minor = 0, .path = "x"};
  const CompilerInfo other{.major = 13, .minor = 1, .path = "x"};
  EXPECT_NE(cache_key(kernel_of(a).name(a), old), cache_key(kernel_of(b).name(b), old));
  EXPECT_NE(cache_key(kernel_of(a).name(a), old), cache_key(kernel_of(a).name(a), other));
  EXPECT_EQ(cache_key(kernel_of(a).name(a), old), cache_key(kernel_of(a).name(a), {13, 0, "elsewhere"}));
}

/// The whole chain, in child processes so that memory is empty each time.
class FindKernel : public Cache {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
    Cache::SetUp();
    setenv("TANDEM_CACHE_DIR", directory.c_str(), 1);
    config.tiling.head_dim_qk = config.tiling.head_dim_v = 32;
    config.tiling.block_m = 64;
    config.tiling.block_n = 16;
    config.schedule.pingpong = false;
  }
  void TearDown() override {
    unsetenv("TANDEM_CACHE_DIR");
    if (!directory.empty()) Cache::TearDown();
  }
  [[nodiscard]] bool found_from(Origin origin) const {
    return in_child([&] {  // whose counters begin at 0
      const Origin found = find_kernel(kernel_of(config).name(config)).origin;
      const std::vector<KernelStats> counted = stats().kernels;
      return found == origin && counted.size() == 1 && counted[0].kernels == 1 &&
             counted[0].origin == (origin == Origin::disk ? "disk" : "compiled");
    });
  }

  ForwardConfig config;  // too small for the shipped set
};

TEST_F(FindKernel, CompilesThenReadsTheDisk) {
  EXPECT_TRUE(found_from(Origin::compiled));
  EXPECT_TRUE(found_from(Origin::disk));
  EXPECT_EQ(files(), 1);
}

TEST_F(FindKernel, TheLogSaysThatItWasCompiled) {
  EXPECT_TRUE(in_child([&] {
    return in_runbook("slow-first-call.md", logged([&] { find_kernel(kernel_of(config).name(config)); }));
  }));
}

TEST_F(FindKernel, RebuildsADamagedEntry) {
  ASSERT_TRUE(found_from(Origin::compiled));
  const fs::path entry = fs::directory_iterator(directory)->path();
  const std::string good = read(entry);
  write(entry, good.substr(0, good.size() / 2));
  EXPECT_TRUE(found_from(Origin::compiled));
  EXPECT_TRUE(found_from(Origin::disk));
  EXPECT_EQ(read(entry).size(), good.size());
}

TEST_F(FindKernel, RefusesACacheThatEveryUserMayWriteInto) {
  chmod(directory.c_str(), 0777);
  const std::string error =
      error_of(Status::unsupported, [&] { return find_kernel(kernel_of(config).name(config)); });
  EXPECT_NE(error.find(directory.string() + " may be written"), std::string::npos) << error;
}

TEST_F(FindKernel, WorksWithoutACache) {
  setenv("TANDEM_CACHE_DIR", "/proc/tandem", 1);
  EXPECT_TRUE(found_from(Origin::compiled));
}

TEST_F(FindKernel, IsAnEventButFromMemory) {
  EXPECT_TRUE(in_child([&] {
    static std::string seen;
    set_events([](const Event& e) { seen += fmt::format("{} {} {};", e.operation, e.family, e.kernel); }, 1);
    for (int i = 0; i < 2; ++i) find_kernel(kernel_of(config).name(config));
    return seen == "kernel sm_90a compiled;";
  }));
}

TEST_F(FindKernel, ThreadsThatRaceCompileOnce) {
  EXPECT_TRUE(in_child([&] {
    std::array<Origin, 4> origins{};
    std::array<const CompiledKernel*, 4> kernels{};
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < origins.size(); ++i) {
        threads.emplace_back([&, i] {
          const FoundKernel found = find_kernel(kernel_of(config).name(config));
          origins[i] = found.origin;
          kernels[i] = found.kernel.get();
        });
      }
    }
    const std::vector<KernelStats> counted = stats().kernels;
    return std::count(origins.begin(), origins.end(), Origin::compiled) == 1 && counted.size() == 2 &&
           counted[0].kernels == 1 && counted[0].nanoseconds > 0 && counted[1].origin == "memory" &&
           counted[1].kernels == 3 && std::count(origins.begin(), origins.end(), Origin::memory) == 3 &&
           std::count(kernels.begin(), kernels.end(), kernels[0]) == 4;
  }));
}

}  // namespace
}  // namespace tandem::gpu
