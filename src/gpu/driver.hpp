// The NVIDIA driver, opened at run time: one binary runs with or without a GPU.
#pragma once

#include <string>

#include "gpu/abi.hpp"

namespace tandem::gpu {

/// The driver functions that Tandem calls, and no others. Names and signatures are the driver's.
struct Driver {
  abi::Result (*get_error_name)(abi::Result, const char**);
  abi::Result (*get_error_string)(abi::Result, const char**);
  abi::Result (*init)(unsigned int);
  abi::Result (*driver_get_version)(int*);
  abi::Result (*device_get)(abi::Device*, int);
  abi::Result (*device_get_count)(int*);
  abi::Result (*device_get_name)(char*, int, abi::Device);
  abi::Result (*device_get_attribute)(int*, abi::DeviceAttribute, abi::Device);
  abi::Result (*device_total_memory)(std::size_t*, abi::Device);
  abi::Result (*primary_context_retain)(abi::Context*, abi::Device);
  abi::Result (*context_get_current)(abi::Context*);
  abi::Result (*context_push)(abi::Context);
  abi::Result (*context_pop)(abi::Context*);
  abi::Result (*context_synchronize)();
  abi::Result (*module_load_data)(abi::Module*, const void*);
  abi::Result (*module_unload)(abi::Module);
  abi::Result (*module_get_function)(abi::Function*, abi::Module, const char*);
  abi::Result (*module_get_global)(abi::DevicePointer*, std::size_t*, abi::Module, const char*);
  abi::Result (*function_get_attribute)(int*, abi::FunctionAttribute, abi::Function);
  abi::Result (*function_set_attribute)(abi::Function, abi::FunctionAttribute, int);
  abi::Result (*launch_kernel)(const abi::LaunchConfig*, abi::Function, void**, void**);
  abi::Result (*tensor_map_encode_tiled)(void*, abi::TensorMapType, std::uint32_t, void*,
                                         const std::uint64_t*, const std::uint64_t*, const std::uint32_t*,
                                         const std::uint32_t*, int, abi::TensorMapSwizzle, int, int);
  abi::Result (*memory_alloc)(abi::DevicePointer*, std::size_t);
  abi::Result (*memory_free)(abi::DevicePointer);
  abi::Result (*memory_alloc_async)(abi::DevicePointer*, std::size_t, abi::Stream);
  abi::Result (*memory_free_async)(abi::DevicePointer, abi::Stream);
  abi::Result (*memory_get_info)(std::size_t*, std::size_t*);
  abi::Result (*copy_async)(abi::DevicePointer, abi::DevicePointer, std::size_t, abi::Stream);
  abi::Result (*copy_to_device_async)(abi::DevicePointer, const void*, std::size_t, abi::Stream);
  abi::Result (*copy_to_host_async)(void*, abi::DevicePointer, std::size_t, abi::Stream);
  abi::Result (*copy_to_host)(void*, abi::DevicePointer, std::size_t);
  abi::Result (*memset_d8_async)(abi::DevicePointer, unsigned char, std::size_t, abi::Stream);
  abi::Result (*stream_create)(abi::Stream*, unsigned int);
  abi::Result (*stream_destroy)(abi::Stream);
  abi::Result (*stream_synchronize)(abi::Stream);
  abi::Result (*stream_is_capturing)(abi::Stream, int*);
  abi::Result (*event_create)(abi::Event*, unsigned int);
  abi::Result (*event_destroy)(abi::Event);
  abi::Result (*event_record)(abi::Event, abi::Stream);
  abi::Result (*event_synchronize)(abi::Event);
  abi::Result (*event_elapsed_time)(float*, abi::Event, abi::Event);
};

/// The initialised driver, opened once a process. Throws Error: unsupported where libcuda.so.1 is missing,
/// lacks a function (the message names it and the version needed) or finds no device; runtime where the
/// driver fails to start.
const Driver& driver();

/// Why driver() would throw, or an empty string. Never throws.
std::string why_no_driver();

/// Throws Error for a driver call that failed: out_of_memory where it says so, else runtime, with the call,
/// the driver's name for the code and its text.
void check(abi::Result result, const char* call);

}  // namespace tandem::gpu
