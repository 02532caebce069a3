# Device code as text in the library.
file(GLOB_RECURSE TANDEM_DEVICE_FILES RELATIVE ${PROJECT_SOURCE_DIR}/src CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/src/ops/*.cuh ${PROJECT_SOURCE_DIR}/src/ops/config.hpp ${PROJECT_SOURCE_DIR}/src/tile/*.cuh ${PROJECT_SOURCE_DIR}/src/ptx/*.cuh)
list(APPEND TANDEM_DEVICE_FILES problem/interval.hpp problem/quantized_layout.hpp problem/recipe.hpp problem/score_options.hpp config/trace.hpp config/types.hpp)
list(TRANSFORM TANDEM_DEVICE_FILES PREPEND ${PROJECT_SOURCE_DIR}/src/ OUTPUT_VARIABLE TANDEM_DEVICE_PATHS)
set(TANDEM_EMBEDDED_SOURCES ${CMAKE_CURRENT_BINARY_DIR}/embedded_sources.cpp)
add_custom_command(OUTPUT ${TANDEM_EMBEDDED_SOURCES}
  COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR}/src "-DFILES=${TANDEM_DEVICE_FILES}"
    -DOUTPUT=${TANDEM_EMBEDDED_SOURCES} -P ${PROJECT_SOURCE_DIR}/cmake/embed_sources.cmake
  DEPENDS ${TANDEM_DEVICE_PATHS} ${PROJECT_SOURCE_DIR}/cmake/embed_sources.cmake
  COMMENT "Embedding the device sources" VERBATIM)
target_sources(tandem_objects PRIVATE ${TANDEM_EMBEDDED_SOURCES})

# The shipped set: kernels compiled now, so that a first call need not wait and a machine without NVRTC is served too.
include(nvrtc)
find_package(Threads REQUIRED)
option(TANDEM_SHIP_KERNELS "Compile the usual kernels into the library (twelve minutes of processor time; needs NVRTC)" OFF)
if(TANDEM_SHIP_KERNELS AND NOT TANDEM_NVRTC)
  message(WARNING "TANDEM_SHIP_KERNELS: no NVRTC found (pip install nvidia-cuda-nvrtc, or set TANDEM_NVIDIA_ROOT); "
    "kernels will be compiled at first use")
endif()
if(TANDEM_NVRTC)
  # The library's own sources but those that compute, with its flags, so that the compiler cache has them. It is built
  # even where nothing is shipped, so that it cannot go stale.
  add_library(tandem_kernel_compiler OBJECT ops/cache/launch.cpp ops/backward/launch.cpp gpu/cache.cpp gpu/compiler.cpp
    gpu/device.cpp gpu/driver.cpp ops/forward/launch.cpp gpu/function_source.cpp gpu/kernel_spec.cpp gpu/kernels.cpp gpu/nvrtc.cpp ops/pack/launch.cpp gpu/param_fields.cpp ops/eight_bit/launch.cpp ops/eight_bit_backward/launch.cpp
    ops/quantize/launch.cpp gpu/step_params.cpp
    gpu/shipped.cpp gpu/shipped_none.cpp gpu/sources.cpp gpu/tensor_map.cpp problem/effective.cpp problem/fmt.cpp problem/log.cpp problem/stats.cpp ops/backward/plan.cpp plan/facts.cpp ops/forward/explain.cpp ops/forward/legality.cpp ops/forward/plan.cpp ops/portable_set.cpp ops/backward/sm80_plan.cpp ops/forward/sm80_plan.cpp
    ops/cache/plan.cpp ops/decode/plan.cpp ops/latent/plan.cpp ops/quantize/plan.cpp ops/eight_bit/plan.cpp ops/eight_bit_backward/plan.cpp ${TANDEM_EMBEDDED_SOURCES})
  target_include_directories(tandem_kernel_compiler PUBLIC ${PROJECT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(tandem_kernel_compiler PUBLIC OpenMP::OpenMP_CXX tandem_fmt_headers ${CMAKE_DL_LIBS} PRIVATE tandem_flags)
  add_executable(ship_kernels ${PROJECT_SOURCE_DIR}/tools/ship_kernels.cpp)
  target_link_libraries(ship_kernels PRIVATE tandem_kernel_compiler tandem_flags Threads::Threads)
endif()
if(TANDEM_SHIP_KERNELS AND TANDEM_NVRTC)
  set(TANDEM_SHIPPED_ARCHIVE ${CMAKE_CURRENT_BINARY_DIR}/shipped_kernels.bin)
  add_custom_command(OUTPUT ${TANDEM_SHIPPED_ARCHIVE}
    COMMAND ${CMAKE_COMMAND} -E env TANDEM_NVRTC=${TANDEM_NVRTC} $<TARGET_FILE:ship_kernels> ${TANDEM_SHIPPED_ARCHIVE}
    DEPENDS ship_kernels COMMENT "Compiling the shipped kernels" VERBATIM USES_TERMINAL)
  add_custom_target(tandem_shipped_kernels DEPENDS ${TANDEM_SHIPPED_ARCHIVE})
  add_dependencies(tandem_objects tandem_shipped_kernels)
  target_sources(tandem_objects PRIVATE gpu/shipped_archive.cpp)
  set_source_files_properties(gpu/shipped_archive.cpp PROPERTIES OBJECT_DEPENDS ${TANDEM_SHIPPED_ARCHIVE}
    COMPILE_DEFINITIONS TANDEM_SHIPPED_ARCHIVE="${TANDEM_SHIPPED_ARCHIVE}")
else()
  target_sources(tandem_objects PRIVATE gpu/shipped_none.cpp)
endif()
