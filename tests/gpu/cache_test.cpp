// The kernel cache: whatever happens to its files, a kernel is found whole or not at all.
#include "gpu/cache.hpp"
#include "ops/forward/launch.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>

#include "gpu/kernels.hpp"

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
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tandem-cache-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory = pattern;
  }
  void TearDown() override { fs::remove_all(directory); }

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

  fs::path directory;
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
  fs::permissions(cache.file_of("key"), fs::perms::all);
  fs::permissions(directory, fs::perms{0555});
  EXPECT_TRUE(in_child([&] {
    if (getuid() == 0 && setuid(65534) != 0) return false;  // root may write anywhere
    return cache.load("key").has_value() && !cache.store("new", sample());
  }));
  fs::permissions(directory, fs::perms::owner_all);
  EXPECT_EQ(files(), 1);
}

TEST_F(Cache, AFullDiskLeavesNothingBehind) {
  const DiskCache cache(directory);
  EXPECT_TRUE(in_child([&] {
    std::signal(SIGXFSZ,
                SIG_IGN);  // the write fails with EFBIG instead, after a part of it as on a full disk
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

TEST(CacheKey, DependsOnWhatAKernelIncludesAlone) {
  const auto digests = [](const char* changed) {
    std::vector<Source> sources{{"entry", "#pragma once\n#include \"a\"\n#include \"b\"\n"},
                                {"a", "#include \"c\"\n"},
                                {"b", "#include \"c\"\n#include \"a\"\n"},
                                {"c", "int x;\n"},
                                {"other", "#include \"c\"\n"}};
    for (Source& source : sources) {
      if (source.name == std::string_view(changed)) source.text = "#include \"c\"\n// a comment\n";
    }
    return std::pair{sources_digest("entry", sources), sources_digest("other", sources)};
  };
  const auto before = digests("");
  EXPECT_NE(before.first, before.second);
  for (const char* included : {"a", "b"}) {
    EXPECT_NE(digests(included).first, before.first) << included;
    EXPECT_EQ(digests(included).second, before.second) << included;
  }
  EXPECT_NE(digests("c").first, before.first);
  EXPECT_NE(digests("c").second, before.second);
  EXPECT_EQ(digests("other").first, before.first);
  // And of the library's own: a kernel's text does not reach another's key.
  std::vector<Source> sources(device_sources().begin(), device_sources().end());
  const std::string header = kernels::forward.name(ForwardConfig{}).header;
  for (Source& source : sources) {
    if (source.name == std::string_view("ops/cache/common/append.cuh")) source.text = "// a comment";
  }
  EXPECT_EQ(sources_digest(header, sources), sources_digest(header));
  EXPECT_NE(sources_digest("ops/cache/common/append.cuh", sources),
            sources_digest("ops/cache/common/append.cuh"));
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
    return in_child([&] { return find_kernel(kernel_of(config).name(config)).origin == origin; });
  }

  ForwardConfig config;  // too small for the shipped set
};

TEST_F(FindKernel, CompilesThenReadsTheDisk) {
  EXPECT_TRUE(found_from(Origin::compiled));
  EXPECT_TRUE(found_from(Origin::disk));
  EXPECT_EQ(files(), 1);
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

TEST_F(FindKernel, WorksWithoutACache) {
  setenv("TANDEM_CACHE_DIR", "/proc/tandem", 1);
  EXPECT_TRUE(found_from(Origin::compiled));
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
    return std::count(origins.begin(), origins.end(), Origin::compiled) == 1 &&
           std::count(origins.begin(), origins.end(), Origin::memory) == 3 &&
           std::count(kernels.begin(), kernels.end(), kernels[0]) == 4;
  }));
}

}  // namespace
}  // namespace tandem::gpu
