// invert_rmsnorm and stable_scale, on the CPU and on CUDA.
#include <optional>
#include <tuple>

#include "bindings/tensors.h"
#include "cuda/driver.h"

#ifdef ICL_PATCH_CUDA
// With a strong reference the library could not be loaded where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace icl_patch {
namespace {

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

#ifdef ICL_PATCH_CUDA
void run_cuda(const Inversion& call, int32_t device) {
  STD_TORCH_CHECK(call.n <= 1 << 30, "expected at most 2^30 elements a row, got ", call.n);
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const char* error = cuda::invert_rows(call, device, stream);
  STD_TORCH_CHECK(error == nullptr, "inverting RMSNorm on the device failed: ", error);
}
#endif

Inversion inversion(const char* name, const Tensor& first, double eps) {
  check(name, first, first, {-1, -1});
  STD_TORCH_CHECK(first.size(1) > 0, "expected ", name, " (B, n) with n >= 1");
  check_eps(eps);
  Inversion call;
  call.rows = first.size(0);
  call.n = first.size(1);
  call.eps = eps;
  return call;
}

// Allocates the outputs and runs the call on the device of `like`.
Result run(Inversion call, const Tensor& like) {
  const int64_t rows = call.rows, n = call.n;
  const ScalarType dtype = call.hidden_is_fp64 ? ScalarType::Double : ScalarType::Float;
  Result result{allocate(like, {rows, n}, dtype, call.hidden), allocate(like, {rows}, call.shift),
                allocate(like, {rows, n}, call.new_scale),
                allocate(like, {rows}, ScalarType::Char, call.status),
                allocate(like, {rows}, ScalarType::Int, call.evaluations)};
  if (!rows) return result;
#ifdef ICL_PATCH_CUDA
  if (device_type_of(like) == aoti_torch_device_type_cuda()) {
    run_cuda(call, like.get_device_index());
    return result;
  }
#endif
  run_rows(&CpuDriver::invert_rows, call, rows, n);
  return result;
}

Result invert_rmsnorm(const Tensor& target, const Tensor& scale, const Tensor& rms, double eps,
                      std::optional<Tensor> fallback) {
  Inversion call = inversion("target", target, eps);
  const auto input = [&](const char* name, const Tensor& x) {
    return matrix(name, x, target, call.rows, call.n, true);
  };
  call.target = input("target", target);
  call.scale = input("scale", scale);
  check("rms", rms, target, {call.rows});
  call.rms = {rms.const_data_ptr(), dtype_of("rms", rms, true), rms.stride(0), 1};
  if (fallback) call.fallback = input("fallback", *fallback);
  call.hidden_is_fp64 = call.target.dtype == DType::kFp64;
  return run(call, target);
}

Result stable_scale(const Tensor& delta, const Tensor& scale, const Tensor& hidden_down, double eps) {
  Inversion call = inversion("delta", delta, eps);
  const auto input = [&](const char* name, const Tensor& x) {
    const Matrix found = matrix(name, x, delta, call.rows, call.n, true);
    call.hidden_is_fp64 |= found.dtype == DType::kFp64;
    return found;
  };
  call.delta = input("delta", delta);
  call.scale = input("scale", scale);
  call.fallback = input("hidden_down", hidden_down);
  return run(call, delta);
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  ICL_PATCH_IMPL(invert_rmsnorm);
  ICL_PATCH_IMPL(stable_scale);
}

#ifdef ICL_PATCH_CUDA
STABLE_TORCH_LIBRARY_IMPL(icl_patch, CUDA, m) {
  ICL_PATCH_IMPL(invert_rmsnorm);
  ICL_PATCH_IMPL(stable_scale);
}
#endif
