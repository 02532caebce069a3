// Functions of NVML and of the driver, for GPU 0 alone; each question costs its board half a joule. GPU 1 has
// no counter.
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int cuDeviceGetPCIBusId(char* name, int bytes, int device) {
  std::strncpy(name, device == 0 ? "0000:01:00.0" : device == 1 ? "0000:02:00.0" : "none", bytes);
  return 0;
}

EXPORTED int nvmlInit_v2() {
  return 0;
}

EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char* name, void** board) {
  static int boards[2] = {0, 1};
  if (std::strcmp(name, "none") == 0) return 6;
  *board = &boards[name[6] - '1'];
  return 0;
}

EXPORTED int nvmlDeviceGetTotalEnergyConsumption(void* board, unsigned long long* millijoules) {
  static unsigned long long spent = 123000;
  if (*static_cast<int*>(board) == 1) return 3;
  *millijoules = spent += 500;
  return 0;
}
