// What main() and the subcommands agree on.
#pragma once

#include <functional>

namespace CLI {
class App;
}  // namespace CLI

namespace tandem::cli {

/// Exit codes; documented in `tandem --help`.
enum ExitCode : int { success = 0, verify_failed = 1, bad_input = 2, runtime_failure = 3 };

/// What a subcommand does once the whole command line has been parsed. Returns an exit code, throws Error.
using Command = std::function<int()>;

/// Each adds its subcommand to `app`; the one the user names leaves its work in `chosen`.
void add_run(CLI::App& app, Command& chosen);
void add_verify(CLI::App& app, Command& chosen);
void add_bench(CLI::App& app, Command& chosen);
void add_tune(CLI::App& app, Command& chosen);
void add_explain(CLI::App& app, Command& chosen);
void add_info(CLI::App& app, Command& chosen);
void add_demo(CLI::App& app, Command& chosen);
void add_trace(CLI::App& app, Command& chosen);

}  // namespace tandem::cli
