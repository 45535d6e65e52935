// One operator: what the driver knows a kernel by, on the current device. Python launches it.
#include <cuda_runtime.h>
#include <torch/library.h>

#include "ahead.h"
#include "registration.h"

// 0 where the build has no such kernel, or none for this GPU; `shared`: bytes that a launch may ask for.
int64_t function(std::string name, int64_t shared) {
  const auto found = kernels().find(name);
  cudaFunction_t made = nullptr;
  if (found == kernels().end()) return 0;
  if (cudaGetFuncBySymbol(&made, found->second) != cudaSuccess) return cudaGetLastError(), 0;
  if (shared > 48 << 10) {
    const auto failed = cudaFuncSetAttribute(found->second, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    TORCH_CHECK(failed == cudaSuccess, name, ": ", shared, " bytes of shared memory: ", cudaGetErrorString(failed));
  }
  return reinterpret_cast<int64_t>(made);
}

TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("function(str name, int shared) -> int", &function); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
