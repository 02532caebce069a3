// A ring of the processes that mpirun has started, on any number of machines.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <vector>

#include "transport.hpp"

class Mpi : public Transport {
 public:
  Mpi() : Transport(asked(MPI_Comm_rank), asked(MPI_Comm_size)) {}

  void start(std::span<const std::byte> from, std::span<std::byte> to) override {
    const int next = (rank() + 1) % ranks(), before = (rank() + ranks() - 1) % ranks();
    // Counts of MPI are ints. Messages between two ranks keep their order.
    for (std::size_t at = 0; at < to.size(); at += most) {
      MPI_Irecv(&to[at], count(to.size() - at), MPI_BYTE, before, 0, MPI_COMM_WORLD,
                &requests_.emplace_back());
    }
    for (std::size_t at = 0; at < from.size(); at += most) {
      MPI_Isend(&from[at], count(from.size() - at), MPI_BYTE, next, 0, MPI_COMM_WORLD,
                &requests_.emplace_back());
    }
  }
  /// MPI's own errors end all processes.
  void wait() override {
    MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
  }

 private:
  static constexpr std::size_t most = std::size_t{1} << 30;
  static int count(std::size_t left) { return static_cast<int>(std::min(left, most)); }
  static int asked(int (*ask)(MPI_Comm, int*)) {
    int answer = 0;
    ask(MPI_COMM_WORLD, &answer);
    return answer;
  }

  std::vector<MPI_Request> requests_;
};
