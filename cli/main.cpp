// The `tandem` program: parses the command line, runs one subcommand, turns failures into one line and an
// exit code.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <system_error>

#include "command.hpp"
#include "files/source.hpp"
#include "gpu_memory.hpp"
#include "plain_values.hpp"
#include "report.hpp"
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
  tandem tune --seqlen 8192 --block-n 64,80,96 --stages 2,3,4
  tandem explain --seqlen 4096 --heads 16 --heads-kv 2 --causal
  tandem trace --head-dim 64 --picture trace.svg
  tandem info

`tandem SUBCOMMAND --help` says more. Results go to stdout (--json: as one JSON document), messages to
stderr.)";

/// To the library, what this machine's GPU cannot run is a wish that no backend can meet, like any other.
ExitCode code_of(const Error& error) {
  if (error.status() == Status::invalid_argument) return bad_input;
  return error.status() == Status::unsupported && !is_objection_of_gpu(error.what()) ? bad_input
                                                                                     : runtime_failure;
}

/// What goes to stderr, if anything does, and the exit code.
struct Outcome {
  int code = success;
  std::string message{};
  int system_error = 0;  ///< errno's value, where a call of the system failed
};

Outcome parse_and_run(int argc, char** argv) {
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
  add_trace(app, chosen);
  add_info(app, chosen);
  add_demo(app, chosen);
  expect_plain_values(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success))
      return {.code = app.exit(error)};  // --help, --version
    const auto named = app.get_subcommands();
    if (named.empty() && argc > 1 && argv[1][0] != '-') {
      return {.code = bad_input,
              .message = fmt::format("{} is no subcommand; see `tandem --help`", files::in_quotes(argv[1]))};
    }
    return {.code = bad_input,
            .message = fmt::format("{}; see `tandem {}--help`", error.what(),
                                   named.empty() ? "" : named.front()->get_name() + " ")};
  }
  return {.code = chosen()};
}

Outcome run(int argc, char** argv) try { return parse_and_run(argc, argv); } catch (const Error& error) {
  return {.code = code_of(error), .message = error.what()};
} catch (const std::bad_alloc&) {
  return {.code = runtime_failure,
          .message = "out of memory; use smaller tensors or a machine with more of it"};
} catch (const std::system_error& error) {
  // A thread that cannot be started; or stdout, on which main has more to say.
  return {.code = runtime_failure,
          .message = fmt::format("{}; check the memory, the disk and this process's limits (ulimit -a)",
                                 error.what()),
          .system_error = error.code().value()};
} catch (const std::exception& error) {
  return {.code = runtime_failure, .message = error.what()};
}

/// A stream that the caller closed stays closed to us: without this the first file that is opened would take
/// its number, and what is printed would go into that file. stderr goes nowhere; writing to stdout fails.
void occupy_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0 || errno != EBADF) continue;
    static_cast<void>(::open("/dev/null", stream == STDERR_FILENO ? O_WRONLY : O_RDONLY));
  }
}

}  // namespace
}  // namespace tandem::cli

int main(int argc, char** argv) {
  using namespace tandem;
  cli::occupy_standard_streams();
  // Past a file size limit, write() then fails with an error that names the file, instead of killing the
  // process.
  std::signal(SIGXFSZ, SIG_IGN);
  const cli::Outcome outcome = cli::run(argc, argv);
  errno = outcome.system_error;
  const bool printed = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  // An error of the input is told as that, wherever the output went.
  if (!printed && (outcome.message.empty() || outcome.system_error != 0)) {
    cli::say(fmt::format("writing to stdout failed: {}; send it to where it can be written",
                         errno != 0 ? std::strerror(errno) : "an earlier error"));
    return cli::runtime_failure;
  }
  if (!outcome.message.empty()) cli::say(outcome.message);
  return outcome.code;
}
