// The contract on the kernels for Hopper.
#include "emulated_gpu.hpp"

int main(int argc, char** argv) {
  using namespace tandem::kernel_tests;
  return run_contract(argc, argv,
                      {.name = "emulated gpu",
                       .whole = {general_forwards(), mixed_forwards()},
                       .sharing = {split_forwards(), mixed_split_forwards()},
                       .grouped = {heads_as_rows_forwards(), mixed_heads_as_rows_forwards()},
                       .decoding = {decode_forwards()},
                       .wide = {widest_heads_forwards()},
                       .backward = true});
}
