# One source, many instruction sets. tandem_per_target(TARGET SOURCE) adds SOURCE to TARGET once for every instruction set
# of this architecture, each copy compiled with its own flags and its code in the namespace tandem::cpu::<name>.
# The names are those of tandem::cpu::Target. Which copy runs is decided at run time (src/cpu/targets/target.cpp). What
# follows SOURCE are compiler options of its own.

set(TANDEM_FLAGS_portable "")
# Highway compiles NEON with the cryptography extension; nothing here uses it, so that any armv8-a runs the result.
set(TANDEM_FLAGS_neon -march=armv8-a+crypto)
set(TANDEM_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2)
set(TANDEM_FLAGS_avx512 ${TANDEM_FLAGS_avx2} -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl)
set(TANDEM_FLAGS_avx512_bf16 ${TANDEM_FLAGS_avx512} -mavx512bf16)
# The instructions of the matrix unit are written by name (simd/matrix_unit.hpp): they want an assembler that knows them,
# which binutils has been since 2.35, and no flag. amx_emulated is for tests: plain code stands in for them.
set(TANDEM_FLAGS_amx ${TANDEM_FLAGS_avx512_bf16} -DTANDEM_MATRIX_UNIT)
# Decoding looks 8-bit values up in tables of bytes.
set(TANDEM_DECODE_FLAGS_amx -mavx512vbmi)
set(TANDEM_DECODE_FLAGS_amx_emulated -mavx512vbmi)
set(TANDEM_FLAGS_amx_emulated ${TANDEM_FLAGS_amx} -DTANDEM_EMULATED)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(TANDEM_CPU_TARGETS portable avx2 avx512 avx512_bf16 amx)
  if(TANDEM_BUILD_TESTS)
    list(APPEND TANDEM_CPU_TARGETS amx_emulated)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(TANDEM_CPU_TARGETS portable neon)
else()
  set(TANDEM_CPU_TARGETS portable)
endif()

function(tandem_per_target target source)
  cmake_path(REMOVE_EXTENSION source OUTPUT_VARIABLE path)
  cmake_path(ABSOLUTE_PATH source NORMALIZE)
  foreach(name IN LISTS TANDEM_CPU_TARGETS)
    set(copy ${CMAKE_CURRENT_BINARY_DIR}/${path}_${name}.cpp)
    file(CONFIGURE OUTPUT ${copy} CONTENT "#include \"${source}\"\n")
    # Highway as headers only: with one static target it needs nothing from its library (nor its debug checks).
    set(definitions TANDEM_TARGET=${name} HWY_IS_DEBUG_BUILD=0 HWY_DISABLE_PCLMUL_AES)
    if(name STREQUAL portable)
      # Highway gives up its emulated 128-bit registers below GCC 12.3 (PR 106322, a wrong 16-bit multiplication), for
      # one lane at a time. No kernel multiplies 16-bit integers, and the tests run this target.
      list(APPEND definitions HWY_COMPILE_ONLY_EMU128 HWY_BROKEN_EMU128=0)
    else()
      list(APPEND definitions HWY_COMPILE_ONLY_STATIC)
    endif()
    # Vector code without inlining is some fifty times slower, so that even a debug build optimises it. Sanitizers watch
    # every copy but the portable one, whose emulated registers then take minutes and gigabytes to compile (a forward
    # kernel 31 s instead of 2 s).
    set(debug_options -O2)
    if(TANDEM_SANITIZE)
      set(debug_options -O1)
      if(name STREQUAL portable)
        list(APPEND debug_options -fno-sanitize=all)
      endif()
    endif()
    set(more "")
    if(source MATCHES "/decode/")
      set(more ${TANDEM_DECODE_FLAGS_${name}})
    endif()
    set_source_files_properties(${copy} TARGET_DIRECTORY ${target} PROPERTIES
      COMPILE_OPTIONS "${TANDEM_FLAGS_${name}};${more};${ARGN};$<$<CONFIG:Debug>:${debug_options}>" COMPILE_DEFINITIONS "${definitions}")
    target_sources(${target} PRIVATE ${copy})
  endforeach()
endfunction()
