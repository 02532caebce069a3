# Builds for 64-bit Arm on another machine, with Debian's cross compiler, and runs the tests in QEMU:
#   apt-get install g++-aarch64-linux-gnu qemu-user
#   cmake --preset aarch64 && cmake --build build/aarch64 --target contract_tests && ctest --preset aarch64
# fmt, Highway and GoogleTest are headers or sources here, so the packages of the machine that builds serve.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(fmt_DIR /usr/lib/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu/cmake/fmt)
