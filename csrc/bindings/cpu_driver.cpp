#include "bindings/cpu_driver.h"

#include <torch/headeronly/util/Exception.h>

#ifdef ICL_PATCH_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <cstring>

namespace icl_patch {
namespace {

#define ICL_PATCH_PRODUCTS(isa) isa::pass_rows, isa::prepare_rows, isa::linear_outputs
#define ICL_PATCH_ROWS(isa)                                                             \
  isa::invert_rows, isa::norm_rows, isa::gated_outputs, isa::rotary_rows,              \
      isa::read_direction, isa::attention_parts, isa::attention_outputs

#ifdef ICL_PATCH_X86
// Whether the processor has tiles and Linux lets this process use them. Linux keeps room for their
// contents only for processes that have asked.
bool request_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const unsigned bf16_and_tile = 1u << 22 | 1u << 24, tile_state = 3u << 17;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & bf16_and_tile) != bf16_and_tile)
    return false;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return (a & tile_state) == tile_state &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

const CpuDriver* find() {
  const char* name = std::getenv("ICL_PATCH_CPU");
#ifdef ICL_PATCH_X86
  const bool fma = __builtin_cpu_supports("fma");
  const bool avx2 = fma && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 =
      fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const bool amx = avx512_bf16 && request_tiles();
#endif
  static const CpuDriver drivers[] = {
#ifdef ICL_PATCH_X86
      {"amx", amx, ICL_PATCH_PRODUCTS(amx), ICL_PATCH_ROWS(avx512_bf16)},
      {"avx512_bf16", avx512_bf16, ICL_PATCH_PRODUCTS(avx512_bf16), ICL_PATCH_ROWS(avx512_bf16)},
      {"avx512", avx512, ICL_PATCH_PRODUCTS(avx512), ICL_PATCH_ROWS(avx512)},
      {"avx2", avx2, ICL_PATCH_PRODUCTS(avx2), ICL_PATCH_ROWS(avx2)},
#endif
      {"portable", true, ICL_PATCH_PRODUCTS(portable), ICL_PATCH_ROWS(portable)},
  };
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
