// mpirun -n PROCESSES ring_mpi [ROWS]: the same among processes that MPI joins.
#include <cstdio>

#include "check.hpp"
#include "mpi.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::int64_t seqlen = argc > 1 ? number_of(argv[1]) : 1000;
  int result = 2;
  try {
    Mpi transport;
    if (argc <= 2 && seqlen > 0) {
      result = compute_and_check(transport, seqlen);
    } else if (transport.rank() == 0) {
      std::fprintf(stderr, "usage: mpirun -n PROCESSES ring_mpi [ROWS]; 1 row or more, 1000 by default\n");
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // the others wait for this rank
  }
  MPI_Finalize();
  return result;
}
