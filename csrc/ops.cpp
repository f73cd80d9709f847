// Schemas, checks and registration of the native ops, on torch's stable ABI: one file serves every torch from 2.11 on, with or
// without CUDA. The drivers know nothing of torch.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <tuple>

#include "rmsnorm_inverse_cpu.h"
#include "rmsnorm_inverse_cuda.h"

#ifdef ICL_PATCH_CUDA
// A strong reference would keep the file from loading where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace icl_patch {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Float dtype_of(const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return Float::kDouble;
    case ScalarType::Float: return Float::kSingle;
    case ScalarType::BFloat16: return Float::kBrain;
    case ScalarType::Half: return Float::kHalf;
    default: STD_TORCH_CHECK(false, "expected ", name, " in fp64, fp32, bf16 or fp16");
  }
}

void check_place(const char* name, const Tensor& x, const Tensor& reference) {
  STD_TORCH_CHECK(x.is_cuda() == reference.is_cuda() && x.get_device_index() == reference.get_device_index(),
                  "expected ", name, " on the device of the first argument");
}

// x as (rows, n); a vector (n,) is shared by all rows.
Matrix matrix(const char* name, const Tensor& x, const Tensor& reference, int64_t rows, int64_t n) {
  check_place(name, x, reference);
  const bool shared = x.dim() == 1 && x.size(0) == n;
  STD_TORCH_CHECK(shared || (x.dim() == 2 && x.size(0) == rows && x.size(1) == n),
                  "expected ", name, " (", rows, ", ", n, ") or (", n, ",)");
  return {x.const_data_ptr(), dtype_of(name, x), shared ? 0 : x.stride(0), x.stride(shared ? 0 : 1)};
}

struct CpuDriver {
  const char* name;
  bool supported;
  void (*invert_rows)(const Inversion&, int64_t, int64_t);
};

// The widest instruction set of this processor, or the one that ICL_PATCH_CPU names; null if it names none of this processor's.
const CpuDriver* find_cpu_driver() {
  static const CpuDriver drivers[] = {
#ifdef ICL_PATCH_X86
      {"avx512", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"), avx512::invert_rows},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"), avx2::invert_rows},
#endif
      {"portable", true, portable::invert_rows},
  };
  const char* wanted = std::getenv("ICL_PATCH_CPU");
  for (const CpuDriver& driver : drivers)
    if (driver.supported && (!wanted || !*wanted || !std::strcmp(wanted, driver.name))) return &driver;
  return nullptr;
}

const CpuDriver* cpu_driver() {
  static const CpuDriver* const driver = find_cpu_driver();
  return driver;
}

void run_cpu(const Inversion& call, const Tensor&) {
  const CpuDriver* driver = cpu_driver();
  STD_TORCH_CHECK(driver != nullptr, "ICL_PATCH_CPU names no instruction set of this processor");
  const int64_t grain = std::max<int64_t>(1, 16384 / call.n);
  torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) { driver->invert_rows(call, begin, end); });
}

#ifdef ICL_PATCH_CUDA
void run_cuda(const Inversion& call, const Tensor& on) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  const char* error = cuda::invert_rows(call, on.get_device_index(), stream);
  STD_TORCH_CHECK(error == nullptr, "inverting RMSNorm on the device failed: ", error);
}
#endif

// Allocates the outputs in place of the call's null pointers and runs it.
template <void (*run)(const Inversion&, const Tensor&)>
Result finish(Inversion call, const Tensor& like) {
  const auto empty = [&](std::initializer_list<int64_t> size, ScalarType dtype) { return torch::stable::new_empty(like, size, dtype); };
  Result result{empty({call.rows, call.n}, call.hidden_is_double ? ScalarType::Double : ScalarType::Float),
                empty({call.rows}, ScalarType::Double), empty({call.rows, call.n}, ScalarType::Double),
                empty({call.rows}, ScalarType::Char), empty({call.rows}, ScalarType::Int)};
  auto& [hidden, shift, new_scale, status, evaluations] = result;
  call.hidden = hidden.mutable_data_ptr();
  call.shift = static_cast<double*>(shift.mutable_data_ptr());
  call.new_scale = static_cast<double*>(new_scale.mutable_data_ptr());
  call.status = static_cast<int8_t*>(status.mutable_data_ptr());
  call.evaluations = static_cast<int32_t*>(evaluations.mutable_data_ptr());
  if (call.rows) run(call, like);
  return result;
}

Inversion start(const char* name, const Tensor& first, double eps, bool bisection) {
  STD_TORCH_CHECK(first.dim() == 2 && first.size(1) > 0, "expected ", name, " (B, n) with n >= 1");
  STD_TORCH_CHECK(eps >= 0 && eps - eps == 0, "expected a finite eps >= 0, got ", eps);
  Inversion call;
  call.rows = first.size(0);
  call.n = first.size(1);
  call.eps = eps;
  call.bisection = bisection;
  return call;
}

template <void (*run)(const Inversion&, const Tensor&)>
Result invert_rmsnorm(const Tensor& target, const Tensor& scale, const Tensor& rms, double eps, std::optional<Tensor> fallback,
                      bool bisection) {
  Inversion call = start("target", target, eps, bisection);
  call.target = matrix("target", target, target, call.rows, call.n);
  call.scale = matrix("scale", scale, target, call.rows, call.n);
  STD_TORCH_CHECK(rms.dim() == 1 && rms.size(0) == call.rows, "expected rms (", call.rows, ",)");
  check_place("rms", rms, target);
  call.rms = {rms.const_data_ptr(), dtype_of("rms", rms), rms.stride(0), 1};
  if (fallback) call.fallback = matrix("fallback", *fallback, target, call.rows, call.n);
  call.hidden_is_double = call.target.dtype == Float::kDouble;
  return finish<run>(call, target);
}

template <void (*run)(const Inversion&, const Tensor&)>
Result stable_scale(const Tensor& delta, const Tensor& scale, const Tensor& hidden_down, double eps, bool bisection) {
  Inversion call = start("delta", delta, eps, bisection);
  call.delta = matrix("delta", delta, delta, call.rows, call.n);
  call.scale = matrix("scale", scale, delta, call.rows, call.n);
  call.fallback = matrix("hidden_down", hidden_down, delta, call.rows, call.n);
  call.hidden_is_double =
      call.delta.dtype == Float::kDouble || call.scale.dtype == Float::kDouble || call.fallback.dtype == Float::kDouble;
  return finish<run>(call, delta);
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY(icl_patch, m) {
  m.def(
      "invert_rmsnorm(Tensor target, Tensor scale, Tensor rms, float eps=0.0, Tensor? fallback=None, bool bisection=False)"
      " -> (Tensor hidden, Tensor shift, Tensor new_scale, Tensor status, Tensor evaluations)");
  m.def(
      "stable_scale(Tensor delta, Tensor scale, Tensor hidden_down, float eps=0.0, bool bisection=False)"
      " -> (Tensor u, Tensor shift, Tensor new_scale, Tensor status, Tensor evaluations)");
}

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  m.impl("invert_rmsnorm", TORCH_BOX(&icl_patch::invert_rmsnorm<&icl_patch::run_cpu>));
  m.impl("stable_scale", TORCH_BOX(&icl_patch::stable_scale<&icl_patch::run_cpu>));
}

#ifdef ICL_PATCH_CUDA
STABLE_TORCH_LIBRARY_IMPL(icl_patch, CUDA, m) {
  m.impl("invert_rmsnorm", TORCH_BOX(&icl_patch::invert_rmsnorm<&icl_patch::run_cuda>));
  m.impl("stable_scale", TORCH_BOX(&icl_patch::stable_scale<&icl_patch::run_cuda>));
}
#endif

// What was built and what is used, for icl_patch.native.
extern "C" __attribute__((visibility("default"))) const char* icl_patch_cpu_instructions() {
  const icl_patch::CpuDriver* driver = icl_patch::cpu_driver();
  return driver ? driver->name : "";
}

extern "C" __attribute__((visibility("default"))) const char* icl_patch_cuda_architectures() {
#ifdef ICL_PATCH_CUDA
  return ICL_PATCH_CUDA;
#else
  return "";
#endif
}
