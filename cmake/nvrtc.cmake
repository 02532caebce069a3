# Finds NVRTC and cuda.h for the shipped set and the tests. The library itself needs neither to build: it opens NVRTC at run
# time and declares the driver's interface itself.
set(TANDEM_NVIDIA_ROOT "" CACHE PATH "A CUDA toolkit, or the nvidia/cu13 directory of the nvidia-cuda-nvrtc wheel")
file(GLOB tandem_wheel_roots $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cu13
  ${PROJECT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/nvidia/cu13)
set(tandem_nvidia_roots ${TANDEM_NVIDIA_ROOT} ${tandem_wheel_roots} $ENV{CUDA_HOME} /usr/local/cuda /usr/local/cuda-13
  /usr/local/cuda-13.0)
if(DEFINED ENV{TANDEM_NVRTC})
  set(TANDEM_NVRTC $ENV{TANDEM_NVRTC} CACHE FILEPATH "The CUDA compiler that makes the shipped kernels")
endif()
find_file(TANDEM_NVRTC NAMES libnvrtc.so.13 libnvrtc.so.12 PATHS ${tandem_nvidia_roots} PATH_SUFFIXES lib lib64
  NO_CMAKE_SYSTEM_PATH DOC "The CUDA compiler that makes the shipped kernels")
find_path(TANDEM_CUDA_INCLUDE NAMES cuda.h PATHS ${tandem_nvidia_roots} PATH_SUFFIXES include
  NO_CMAKE_SYSTEM_PATH NO_SYSTEM_ENVIRONMENT_PATH DOC "Where cuda.h is; only a test reads it")
mark_as_advanced(TANDEM_NVRTC TANDEM_CUDA_INCLUDE)
