// The `tandem` program: parses the command line, runs one subcommand, turns failures into one line and an
// exit code.
#include <fmt/core.h>

#include <csignal>
#include <cstdio>
#include <new>
#include <string>

#include "command.hpp"
#include "files/source.hpp"
#include "gpu_memory.hpp"
#include "plain_values.hpp"
#include "tandem/attention.hpp"

namespace tandem::cli {
namespace {

constexpr const char* footer = R"(Exit codes:
  0  success
  1  verify or demo: a result is off by more than its bound
  2  a wrong command line, or input that breaks a rule
  3  the machine failed: memory, disk, driver

Examples:
  tandem run qkv.safetensors --causal --out result.safetensors
  tandem run q.npy k.npy v.npy dout.npy --backward --out results/
  tandem verify qkv.safetensors --causal --backward --dtype bf16
  tandem bench --dtype bf16 --head-dim 128 --seqlen 2048 --pass both
  tandem tune --seqlen 8192 --block-n 112,128,176 --stages 2,3
  tandem explain --seqlen 4096 --heads 16 --heads-kv 2 --causal
  tandem info

`tandem SUBCOMMAND --help` says more. Results go to stdout (--json: as one JSON document), messages to
stderr.)";

/// An error is one line, whatever its text came from.
int fail(ExitCode code, std::string message) {
  while (!message.empty() && message.back() == '\n') message.pop_back();
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  fmt::print(stderr, "tandem: {}\n", message);
  return code;
}

/// To the library, what this machine's GPU cannot run is a wish that no backend can meet, like any other.
ExitCode code_of(const Error& error) {
  if (error.status() == Status::invalid_argument) return bad_input;
  return error.status() == Status::unsupported && !is_objection_of_gpu(error.what()) ? bad_input
                                                                                     : runtime_failure;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app{"Exact attention, forward and backward, at the speed of the machine.", "tandem"};
  app.footer(footer);
  app.set_version_flag("--version", std::string("tandem ") + version());
  app.require_subcommand(1);
  Command chosen;
  add_run(app, chosen);
  add_verify(app, chosen);
  add_bench(app, chosen);
  add_tune(app, chosen);
  add_explain(app, chosen);
  add_info(app, chosen);
  add_demo(app, chosen);
  expect_plain_values(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success))
      return app.exit(error);  // --help, --version
    const auto named = app.get_subcommands();
    if (named.empty() && argc > 1 && argv[1][0] != '-') {
      return fail(bad_input,
                  fmt::format("{} is no subcommand; see `tandem --help`", files::in_quotes(argv[1])));
    }
    return fail(bad_input, fmt::format("{}; see `tandem {}--help`", error.what(),
                                       named.empty() ? "" : named.front()->get_name() + " "));
  }
  return chosen();
}

}  // namespace
}  // namespace tandem::cli

int main(int argc, char** argv) {
  using namespace tandem;
  // Past a file size limit, write() then fails with an error that names the file, instead of killing the
  // process.
  std::signal(SIGXFSZ, SIG_IGN);
  int code = cli::runtime_failure;
  try {
    code = cli::parse_and_run(argc, argv);
  } catch (const Error& error) {
    code = cli::fail(cli::code_of(error), error.what());
  } catch (const std::bad_alloc&) {
    code = cli::fail(cli::runtime_failure, "out of memory; use smaller tensors or a machine with more of it");
  } catch (const std::exception& error) {
    code = cli::fail(cli::runtime_failure, error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return cli::fail(cli::runtime_failure, "writing to stdout failed; is the disk full?");
  }
  return code;
}
