// The instructions of src/ptx in the emulator: they write the bytes that a GPU wrote.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "hardware_truth.hpp"
#include "launch.hpp"

namespace tandem::kernel_tests {
namespace {

/// What all sections write in the emulator.
std::vector<unsigned char> emulated() {
  TruthInputs in = truth_inputs();
  std::vector<unsigned char> bytes = blank_truth();
  emulator::Options options{.buffers = {emulator::readable(in.bf16), emulator::readable(in.f16),
                                        emulator::readable(in.numbers), emulator::writable(bytes)}};
  TruthParams params =
      truth_params({in.bf16.data(), in.f16.data(), in.numbers.data(), bytes.data()}, &emulator::encode);
  for (int section = 0; section < truth_sections; ++section) {
    params.section = static_cast<TruthSection>(section);
    const auto ctas = static_cast<unsigned>(truth_ctas(params.section));
    emulator::launch(
        &hardware_truth, params,
        {.blocks = ctas, .threads = truth_threads, .shared_bytes = sizeof(TruthShared), .cluster = ctas},
        options);
  }
  return bytes;
}

/// The section that writes a byte, and the word of it.
std::string place_of(std::size_t byte) {
  const auto at = [&](TruthSection section, std::size_t begin) {
    return std::string(name_of(section)) + ", word " + std::to_string((byte - begin) / 4);
  };
  if (byte >= truth_cluster_offset) return at(TruthSection::cluster_stores, truth_cluster_offset);
  if (byte >= truth_late_offset) return at(TruthSection::copies, truth_late_offset);
  if (byte >= truth_sum_offset) return at(TruthSection::reduce_add, truth_sum_offset);
  for (int s = 2; s >= 0; --s) {
    const auto store = static_cast<TruthSection>(static_cast<int>(TruthSection::store_b32) + s);
    if (byte >= truth_target_offset(s)) return at(store, truth_target_offset(s));
  }
  int section = static_cast<int>(TruthSection::mma_f16);
  const auto begin = [&] {
    return static_cast<std::size_t>(truth_begin(static_cast<TruthSection>(section))) * 4;
  };
  while (byte < begin()) --section;
  return at(static_cast<TruthSection>(section), begin());
}

/// The file is recorded by gpu_tests with TANDEM_RECORD_TRUTH.
TEST(Instructions, AreTheHardwares) {
  std::ifstream file(TANDEM_HARDWARE_TRUTH, std::ios::binary);
  ASSERT_TRUE(file) << TANDEM_HARDWARE_TRUTH;
  const std::vector<unsigned char> packed((std::istreambuf_iterator<char>(file)),
                                          std::istreambuf_iterator<char>());
  const std::vector<unsigned char> truth = unpack_truth(packed);
  const std::vector<unsigned char> found = emulated();
  ASSERT_EQ(truth.size(), found.size()) << "record the truth anew";
  for (std::size_t i = 0; i < truth.size(); ++i) ASSERT_EQ(found[i], truth[i]) << place_of(i);
}

/// A matrix whose elements say where they are, stored transposed: memory has its columns as rows.
void transposed_kernel(u32* out) {
  auto* const base = ptx::dynamic_shared();
  const auto lane = static_cast<u32>(ptx::thread_index());
  u32 words[4];
  for (u32 i = 0; i < 4; ++i) {
    const u32 first = 1000 * i + 100 * (lane / 4) + 2 * (lane % 4);
    words[i] = first | (first + 1) << 16;
  }
  ptx::stmatrix_x4_transposed(base + 16 * lane, words[0], words[1], words[2], words[3]);
  ptx::sync_warp();
  for (u32 i = 0; i < 4; ++i)
    ptx::store_global(out + 4 * lane + i,
                      ptx::load_shared(reinterpret_cast<const u32*>(base + 16 * lane) + i));
}

TEST(Instructions, MatricesAreStoredTransposed) {
  std::vector<u32> out(128);
  emulator::launch(&transposed_kernel, out.data(), {.blocks = 1, .threads = 32, .shared_bytes = 512},
                   {.buffers = {emulator::writable(out)}});
  for (u32 at = 0; at < 256; ++at) {
    const u32 column = at / 8 % 8;
    const u32 row = at % 8;
    EXPECT_EQ(out[at / 2] >> (16 * (at % 2)) & 0xffffU, 1000 * (at / 64) + 100 * row + column) << at;
  }
}

}  // namespace
}  // namespace tandem::kernel_tests
