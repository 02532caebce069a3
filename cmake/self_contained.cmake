# Link with this and a program can be carried to another machine: it needs the C library there and no more. The GPU tests and
# benchmarks do, which are built where there is no GPU.
add_library(tandem_self_contained INTERFACE)
target_link_options(tandem_self_contained INTERFACE -static-libstdc++ -static-libgcc -Wl,--as-needed)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_link_libraries(tandem_self_contained INTERFACE -Wl,-Bstatic gomp -Wl,-Bdynamic)
endif()
