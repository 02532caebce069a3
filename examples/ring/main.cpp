// ring [PROCESSES [ROWS]]: causal attention and its gradients of one sequence, divided among processes of
// this machine, and checked.
#include <cstdio>

#include "check.hpp"
#include "sockets.hpp"

int main(int argc, char** argv) {
  const std::int64_t ranks = argc > 1 ? number_of(argv[1]) : 4, seqlen = argc > 2 ? number_of(argv[2]) : 1000;
  if (argc > 3 || ranks < 1 || ranks > 256 || seqlen < 1) {
    std::fprintf(stderr,
                 "usage: ring [PROCESSES [ROWS]]; 1 to 256 processes, 4 by default, 1 row or more, 1000\n");
    return 2;
  }
  try {
    const auto work = [&](Transport& transport) { return compute_and_check(transport, seqlen); };
    return in_processes(static_cast<int>(ranks), work) == 0 ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
