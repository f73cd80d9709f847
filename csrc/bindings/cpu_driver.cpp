#include "bindings/cpu_driver.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>

namespace icl_patch {
namespace {

#define ICL_PATCH_DRIVERS(isa)                                                                  \
  isa::prepare_rows, isa::linear_outputs, isa::invert_rows, isa::norm_rows, isa::gated_outputs, \
      isa::read_direction

const CpuDriver* find() {
#ifdef ICL_PATCH_X86
  const bool fma = __builtin_cpu_supports("fma");
  const bool avx2 = fma && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 =
      fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  static const CpuDriver drivers[] = {
#ifdef ICL_PATCH_X86
      {"avx512_bf16", avx512_bf16, ICL_PATCH_DRIVERS(avx512_bf16)},
      {"avx512", avx512, ICL_PATCH_DRIVERS(avx512)},
      {"avx2", avx2, ICL_PATCH_DRIVERS(avx2)},
#endif
      {"portable", true, ICL_PATCH_DRIVERS(portable)},
  };
  const char* name = std::getenv("ICL_PATCH_CPU");
  for (const CpuDriver& driver : drivers)
    if (driver.supported && (!name || !*name || !std::strcmp(name, driver.instructions)))
      return &driver;
  return nullptr;
}

}  // namespace

const CpuDriver* find_cpu_driver() {
  static const CpuDriver* const driver = find();
  return driver;
}

const CpuDriver& cpu_driver() {
  const CpuDriver* driver = find_cpu_driver();
  STD_TORCH_CHECK(driver != nullptr, "ICL_PATCH_CPU names no instruction set of this processor");
  return *driver;
}

}  // namespace icl_patch
