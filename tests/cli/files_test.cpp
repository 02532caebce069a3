// The file readers and writers, in memory and on disk. What the fuzzers find in general is here by name.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "files/npy.hpp"
#include "files/safetensors.hpp"
#include "files/source.hpp"
#include "harness/temporary_folder.hpp"

namespace tandem::files {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string safetensors(const std::string& header, std::size_t data_bytes) {
  std::string file(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  return file + header + std::string(data_bytes, '\1');
}

std::string safetensors_error(const std::string& content, const std::string& tensor = "") {
  try {
    const Safetensors file(std::make_unique<MemorySource>("x.safetensors", bytes_of(content)));
    if (tensor.empty()) return "accepted";
    static_cast<void>(file.load(tensor));
    return "loaded";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_EQ(std::string_view(error.what()).substr(0, 15), "x.safetensors: ") << error.what();
    return error.what();
  }
}

std::string npy(const std::string& dictionary, std::size_t data_bytes) {
  std::string file("\x93NUMPY\x01\x00", 8);
  file += static_cast<char>(dictionary.size() & 0xFFU);
  file += static_cast<char>(dictionary.size() >> 8U);
  return file + dictionary + std::string(data_bytes, '\1');
}

std::string npy_error(const std::string& content, std::optional<DType> stored_as = std::nullopt) {
  try {
    static_cast<void>(read_npy(MemorySource("x.npy", bytes_of(content)), stored_as));
    return "loaded";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    return error.what();
  }
}

class Files : public ::testing::Test {
 protected:
  [[nodiscard]] std::string path(const std::string& name) const { return (directory_ / name).string(); }
  [[nodiscard]] std::size_t count() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(directory_), {}));
  }
  harness::TemporaryFolder temporary_;
  const std::filesystem::path& directory_ = temporary_.path();
};

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Safetensors, RefusesEveryMalformedHeader) {
  const struct {
    std::string header;
    std::size_t data;
    const char* says;
  } cases[] = {
      {"not json", 0, "does not start with '{'"},
      {"", 0, "does not start with '{'"},
      {"{\"a\"", 0, "not valid JSON at byte"},
      {"{} trailing", 0, "not valid JSON at byte"},
      {R"({"a":1})", 0, "'a' is a number, an object is wanted"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "'a' has no data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":0}})", 4, "has a key 'x'"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
       R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
       0, "the key 'a' twice"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "the key 'dtype' twice"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, "the key 'k' twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "the key '__metadata__' twice"},
      {R"({"__metadata__":{"k":1}})", 0, "metadata 'k' is a number, only strings"},
      {R"({"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,4]}})", 4,
       "dtype 'Q4', which is not a safetensors dtype"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
       "has 4 bytes, its dtype F32 and shape call for 8"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 3, "claims bytes [0, 4) of 3"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "claims bytes [4, 0) of 4"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "has 1 data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", 4, "has 3 data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "a negative number in shape"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "not a 64-bit integer in shape"},
      {R"({"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]}})", 4,
       "not a 64-bit integer"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "exceeds 2^63 bytes"},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,0]}})", 0, "exceeds 2^63 bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3, "'b' starts at byte 2, the one before it ends at 1"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "'b' starts at byte 1, the one before it ends at 2"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 3, "tensors end at byte 1 of 3"},
      {"{\"a\":" + std::string(100'000, '['), 0, "'a' is a list, an object is wanted"},
      {"{\"a\":" +
           [] {
             std::string bomb;
             for (int i = 0; i < 100'000; ++i) bomb += "{\"a\":";
             return bomb;
           }(),
       0, "has a key 'a', allowed are dtype"},
      {R"({"a":{"dtype":"U8","shape":[)" +
           [] {
             std::string ones = "1";
             for (int i = 0; i < 64; ++i) ones += ",1";
             return ones;
           }() +
           R"(],"data_offsets":[0,1]}})",
       1, "more than 64 dimensions"},
      {"{\"a\nb\":1}", 0, "not valid JSON"},
      {"{\"a\\nb\":1}", 0, "'a\\x0ab' is a number"},
  };
  for (const auto& c : cases) {
    const std::string error = safetensors_error(safetensors(c.header, c.data));
    EXPECT_SAYS(error, c.says);
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

TEST(Safetensors, RefusesLyingLengths) {
  EXPECT_SAYS(safetensors_error(""), "has 0 bytes");
  EXPECT_SAYS(safetensors_error("1234567"), "has 7 bytes");
  EXPECT_SAYS(safetensors_error(std::string(8, '\xff')),
              "claims a header of 18446744073709551615 bytes, at most 100000000");
  EXPECT_SAYS(safetensors_error(std::string("\x10\0\0\0\0\0\0\0{}", 10)),
              "claims a header of 16 bytes and has 2");
}

TEST(Safetensors, LoadsOnlyWhatTandemComputesWith) {
  const std::string header = R"({"d":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},)"
                             R"("s":{"dtype":"F32","shape":[],"data_offsets":[8,12]},)"
                             R"("five":{"dtype":"F32","shape":[1,1,1,1,1],"data_offsets":[12,16]},)"
                             R"("e":{"dtype":"BF16","shape":[0,7],"data_offsets":[16,16]},)"
                             R"("u":{"dtype":"U8","shape":[2],"data_offsets":[16,18]},)"
                             R"("c":{"dtype":"I8","shape":[2],"data_offsets":[18,20]}}   )";
  const std::string file = safetensors(header, 20);
  EXPECT_SAYS(safetensors_error(file, "d"), "dtype F64, which Tandem does not compute with");
  EXPECT_SAYS(safetensors_error(file, "s"), "0 dimensions");
  EXPECT_SAYS(safetensors_error(file, "five"), "5 dimensions");
  EXPECT_SAYS(safetensors_error(file, "none"), "has no tensor 'none'");
  EXPECT_SAYS(safetensors_error(file, "u"),
              "dtype U8, which Tandem does not compute with; convert it to one "
              "of F32, F16, BF16, F8_E4M3, I8, I32, I64");
  EXPECT_EQ(safetensors_error(file, "e"), "loaded");
  EXPECT_EQ(safetensors_error(file, "c"), "loaded");
}

TEST(Npy, RefusesEveryMalformedFile) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n";
  const struct {
    std::string file;
    const char* says;
  } cases[] = {
      {"", "has 0 bytes"},
      {"PK\x03\x04 an npz archive", "does not start with \\x93NUMPY"},
      {std::string("\x93NUMPY\x04\x00", 8), "version 4"},
      {std::string("\x93NUMPY\x01\x00\x40", 9), "ends inside its header"},
      {std::string("\x93NUMPY\x01\x00\x40\x00{}", 12), "ends inside its header"},
      {std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12), "claims a header of 4294967295 bytes"},
      {npy(good, 3), "has 3 bytes of elements, its dtype and shape call for 4; it was cut short"},
      {npy(good, 5), "has 5 bytes of elements, its dtype and shape call for 4; it was added to"},
      {npy("{'descr': '>f4', 'fortran_order': False, 'shape': (1,), }", 4), "dtype '>f4'"},
      {npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", 8), "dtype '<f8'"},
      {npy("{'descr': '<u2', 'fortran_order': False, 'shape': (1,), }", 2), "say so with --npy-as bf16"},
      {npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", 4), "holds records"},
      {npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1), }", 4), "Fortran order"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (), }", 4), "has 0 dimensions"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1), }", 4), "has 5 dimensions"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", 4), "not the dictionary"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1 2), }", 4), "not the dictionary"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': 1, }", 4), "not the dictionary"},
      {npy("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,), }", 4), "not the dictionary"},
      {npy("{'descr': '<f4', 'fortran_order': False}", 4), "lacks descr, fortran_order or shape"},
      {npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", 4), "descr twice"},
      {npy("{'descr': '<f4', 'order': False, 'shape': (1,), }", 4), "a key 'order'"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), } + 1", 4), "not the dictionary"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", 4), "beyond 2^63"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 4),
       "more than 2^64"},
      {npy("{'descr': '<f4", 4), "not the dictionary"},
  };
  for (const auto& c : cases) EXPECT_SAYS(npy_error(c.file), c.says);
}

TEST(Npy, ReadsEightAndSixteenBitCodesOnRequest) {
  EXPECT_EQ(npy_error(npy("{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }", 4), DType::bf16),
            "loaded");
  EXPECT_EQ(npy_error(npy("{'descr': '|V2', 'fortran_order': True, 'shape': (2,), }", 4), DType::bf16),
            "loaded");
  EXPECT_EQ(npy_error(npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2L,), }", 2), DType::e4m3),
            "loaded");
  EXPECT_SAYS(npy_error(npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }", 2), DType::bf16),
              "--npy-as e4m3");
}

TEST(Npy, ReadsSignedBytesAsCodes) {
  const std::string file = npy("{'descr': '|i1', 'fortran_order': False, 'shape': (2,), }", 2);
  EXPECT_EQ(read_npy(MemorySource("x.npy", bytes_of(file)), std::nullopt).dtype(), DType::s8);
  EXPECT_SAYS(npy_error(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", 8)),
              "Tandem reads i1 and little-endian f4, f2, i4 and i8");
}

TEST_F(Files, RoundTripKeepsEveryByte) {
  const struct {
    DType dtype;
    std::vector<std::int64_t> shape;
  } cases[] = {{DType::f32, {2, 3}}, {DType::f16, {3, 1, 5}}, {DType::bf16, {2, 3, 4, 8}},
               {DType::e4m3, {7}},   {DType::s8, {5}},        {DType::i32, {4}},
               {DType::i64, {4}},    {DType::f32, {0, 3, 2}}};
  std::vector<TensorData> tensors;
  std::vector<NamedTensor> named;
  for (const auto& c : cases) {
    TensorData& t = tensors.emplace_back(c.dtype, c.shape);
    for (std::size_t i = 0; i < t.bytes().size(); ++i) t.bytes()[i] = static_cast<std::byte>(i * 37 + 11);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i)
    named.push_back({"tensor " + std::to_string(i), tensors[i].view()});
  AtomicFile file(path("all.safetensors"));
  write_safetensors(file, named, {{"made by", "a \"test\"\n"}});
  EXPECT_EQ(count(), 0U) << "visible before commit";
  file.commit();
  const Safetensors back(open_file(path("all.safetensors")));
  EXPECT_EQ(back.metadata().at("made by"), "a \"test\"\n");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorData safe = back.load(named[i].name);
    const std::string name = path(std::to_string(i) + ".npy");
    AtomicFile array(name);
    write_npy(array, tensors[i].view());
    array.commit();
    const TensorData numpy = read_npy(*open_file(name), tensors[i].dtype());
    for (const TensorData* read : {&safe, &numpy}) {
      EXPECT_EQ(read->dtype(), tensors[i].dtype());
      EXPECT_EQ(read->shape(), tensors[i].shape());
      EXPECT_TRUE(std::ranges::equal(read->bytes(), tensors[i].bytes()));
    }
  }
}

TEST_F(Files, AtomicFileReplacesInOneStepOrLeavesNoTrace) {
  std::ofstream(path("x")) << "old";
  {
    AtomicFile abandoned(path("x"));
    abandoned.write(bytes_of("half of the new"));
  }
  std::string content;
  std::getline(std::ifstream(path("x")), content);
  EXPECT_EQ(content, "old");
  EXPECT_EQ(count(), 1U);
  AtomicFile file(path("x"));
  file.write(bytes_of("new"));
  file.commit();
  std::getline(std::ifstream(path("x")), content);
  EXPECT_EQ(content, "new");
  EXPECT_EQ(count(), 1U);
}

TEST_F(Files, AtomicFileRefusesWhatItMustNotReplace) {
  EXPECT_THROW(AtomicFile(path("")), Error);
  EXPECT_THROW(AtomicFile("/dev/null"), Error);
  EXPECT_THROW(AtomicFile(path("no/such/directory/x")), Error);
  EXPECT_EQ(count(), 0U);
}

TEST_F(Files, AtomicFileLeavesNothingWhenTheDiskIsFull) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string error;
  try {
    AtomicFile file(path("big"));
    file.write(bytes_of(std::string(10'000, 'x')));
    file.commit();
  } catch (const Error& e) {
    error = e.what();
    EXPECT_EQ(e.status(), Status::runtime);
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_SAYS(error, "writing failed");
  EXPECT_EQ(count(), 0U);
}

TEST_F(Files, OpenFileRefusesWhatIsNotARegularFile) {
  const auto error = [](const std::string& name) -> std::string {
    try {
      static_cast<void>(open_file(name));
      return "opened";
    } catch (const Error& e) {
      return e.what();
    }
  };
  EXPECT_SAYS(error(path("none")), "No such file");
  EXPECT_SAYS(error(directory_.string()), "is a directory");
  EXPECT_SAYS(error("/dev/null"), "not a regular file");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_SAYS(error(path("pipe")), "not a regular file");
  if (::geteuid() != 0) {  // root may read everything
    std::ofstream(path("secret")) << "x";
    std::filesystem::permissions(path("secret"), std::filesystem::perms::none);
    EXPECT_SAYS(error(path("secret")), "Permission denied");
  }
}

TEST_F(Files, AFileCutShortWhileItIsReadIsAnError) {
  std::ofstream(path("x")) << std::string(100, 'x');
  const auto source = open_file(path("x"));
  std::filesystem::resize_file(path("x"), 50);
  std::vector<std::byte> buffer(100);
  EXPECT_THROW(source->read(0, buffer), Error);
}

TEST(Printable, ShowsTextAndEscapesWhatCommandsATerminal) {
  EXPECT_EQ(printable("a b ~"), "a b ~");
  EXPECT_EQ(printable("gr\xc3\xb6\xc3\x9f\x65 \xe6\xb3\xa8 \xf0\x9f\x99\x82"),
            "gr\xc3\xb6\xc3\x9f\x65 \xe6\xb3\xa8 \xf0\x9f\x99\x82");
  EXPECT_EQ(printable("\x1b[31m\t\n\x7f"), "\\x1b[31m\\x09\\x0a\\x7f");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  // C1 controls, alone and in UTF-8: U+009B introduces a sequence as ESC [ does.
  EXPECT_EQ(printable("\x9b"
                      "2J"),
            "\\x9b2J");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J\xc2\xa0"),
            "\\xc2\\x9b2J\xc2\xa0");
  // The direction of text, and what has no width.
  EXPECT_EQ(printable("\xe2\x80\xae\xe2\x81\xa6\xe2\x80\x8b\xd8\x9c"),
            "\\xe2\\x80\\xae\\xe2\\x81\\xa6\\xe2\\x80\\x8b\\xd8\\x9c");
  // ESC in more bytes than it needs; bytes that go nowhere; a sequence cut short.
  EXPECT_EQ(printable("\xc0\x9b \xe0\x80\x9b \xf0\x80\x80\x9b"),
            "\\xc0\\x9b \\xe0\\x80\\x9b \\xf0\\x80\\x80\\x9b");
  EXPECT_EQ(printable("\x80\xff\xe6\xb3"), "\\x80\\xff\\xe6\\xb3");
}

}  // namespace
}  // namespace tandem::files
