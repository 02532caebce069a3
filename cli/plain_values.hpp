// What a value on the command line may look like.
#pragma once

namespace CLI {
class App;
}  // namespace CLI

namespace tandem::cli {

/// Makes every option of `app` and its subcommands refuse an empty value, which would count as 0, and every
/// whole number anything but decimal digits within its range: C's rules take 010 for 8.
void expect_plain_values(CLI::App& app);

}  // namespace tandem::cli
