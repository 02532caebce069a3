// Writes a random problem, the oracle's results and those of the same-dtype models of PyTorch, so that
// test_same_dtype.py can put PyTorch itself beside them.
//
//   same_dtype_dump DTYPE BATCH HEADS_Q HEADS_KV SEQLEN_Q SEQLEN_K D D_V CAUSAL SOFTCAP DLSE FOLDER
//
// Every file is a plain array of fp64 in the order of the tensor's dimensions.
#include <fmt/format.h>

#include <fstream>
#include <span>
#include <stdexcept>

#include "call.hpp"
#include "changes.hpp"
#include "cpu/reference/reference.hpp"
#include "same_dtype.hpp"

namespace tandem::harness {
namespace {

Case parse(std::span<char*> arguments) {
  const auto number = [&](std::size_t n) { return std::stoll(arguments[n]); };
  const std::string dtype = arguments[0];
  Case c;
  for (const DType candidate : {DType::f16, DType::bf16}) {
    if (dtype == name_of(candidate)) c.dtype = candidate;
  }
  change(c, {.batch = number(1), .heads_q = number(2), .heads_kv = number(3), .head_dim_qk = number(6)});
  change(c, {.head_dim_v = number(7), .seqlen_q = number(4), .seqlen_k = number(5)});
  change(c, {.softcap = std::stof(arguments[9]), .causal = number(8) != 0, .dlse = number(10) != 0});
  return c;
}

void write(const std::string& folder, const char* name, const std::vector<double>& values) {
  std::ofstream file(folder + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(double)));
  if (!file) throw std::runtime_error("cannot write " + folder + "/" + name);
}

void dump(const Case& c, const std::string& folder) {
  const Call call(c);
  write(folder, "q", call.q.values());
  write(folder, "k", call.k.values());
  write(folder, "v", call.v.values());
  write(folder, "dout", call.dout.values());
  if (c.dlse) write(folder, "dlse", call.dlse.values());
  const auto write_results = [&](const char* kind, const reference::Forward& f,
                                 const reference::Backward& b) {
    const auto file = [&](const char* name) { return fmt::format("{}_{}", kind, name); };
    write(folder, file("out").c_str(), f.out);
    write(folder, file("dq").c_str(), b.dq);
    write(folder, file("dk").c_str(), b.dk);
    write(folder, file("dv").c_str(), b.dv);
  };
  const Problem problem = call.problem();
  write_results("exact", reference::forward(problem), reference::backward(problem));
  for (const auto& [kind, model] : {std::pair{"eager", Model::eager}, std::pair{"fused", Model::fused}}) {
    write_results(kind, same_dtype_forward(problem, c.dtype, model),
                  same_dtype_backward(problem, c.dtype, model));
  }
}

}  // namespace
}  // namespace tandem::harness

int main(int argc, char** argv) {
  if (argc != 13) return 2;
  try {
    tandem::harness::dump(tandem::harness::parse({argv + 1, 11}), argv[12]);
    return 0;
  } catch (const std::exception& e) {
    fmt::print(stderr, "same_dtype_dump: {}\n", e.what());
    return 1;
  }
}
