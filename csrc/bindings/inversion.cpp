// invert_rmsnorm, stable_scale and record_norm, on the CPU and on CUDA.
#include <optional>
#include <tuple>
#include <vector>

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
template <class Call>
void run_cuda(const char* (*rows)(const Call&, int32_t, void*), const Call& call, int64_t most,
              int32_t device) {
  STD_TORCH_CHECK(call.n <= most, "expected at most ", most, " elements a row, got ", call.n);
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const char* error = rows(call, device, stream);
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
    run_cuda(cuda::invert_rows, call, 1 << 30, like.get_device_index());
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

// Row m of a recording: each driver gives it the bits of the op that it stands for.
void record_row(const NormRecording& call, const Matrix& scale, int64_t m) {
  const CpuDriver& driver = cpu_driver();
  const int64_t n = call.n, k = call.k, element = size_of(call.y_dtype);
  const auto output = [&](int64_t row) { return static_cast<char*>(call.y) + row * n * element; };
  const auto normalise = [&](int64_t row, const Matrix& scale) {  // in place
    Norm norm;
    norm.rows = 1;
    norm.n = n;
    norm.x = {output(row), call.y_dtype, n, 1};
    norm.scale = scale;
    norm.eps = static_cast<float>(call.eps);
    norm.cast_first = call.cast_first;
    norm.y = output(row);
    driver.norm_rows(norm, 0, 1);
  };
  Linear plain;  // with the context
  plain.rows = plain.all = 1;
  plain.n = n;
  plain.plain = call.context.shifted(m * call.context.row);
  plain.y = output(m);
  plain.y_dtype = call.y_dtype;
  driver.linear_outputs(plain, nullptr, 0, nullptr, 0, n);
  normalise(m, scale);

  float* const v = call.v + m * k;
  float* const u = static_cast<float*>(call.hidden) + m * n;
  driver.read_direction(call.h, m, k, v, call.inverse_norm2 + m, false);
  std::vector<double> new_scale(n);
  double shift;
  int32_t evaluations;
  Inversion update = call;
  update.delta = call.delta.shifted(m * call.delta.row);
  update.fallback = call.fallback.shifted(m * call.fallback.row);
  update.scale = scale;
  update.hidden = u;
  update.shift = &shift;
  update.new_scale = new_scale.data();
  update.status = call.status + m;
  update.evaluations = &evaluations;
  driver.invert_rows(update, 0, 1);
  float* const narrow = call.new_scale_fp32 + m * n;
  for (int64_t i = 0; i < n; ++i) narrow[i] = static_cast<float>(new_scale[i]);

  Linear changed = plain;
  changed.k = k;
  changed.z = call.h.shifted(m * call.h.row);
  changed.plain = update.fallback;
  changed.factors = {1, {{u, DType::kFp32, 0, 1}}, {{v, DType::kFp32, 0, 1}}, true};
  changed.y = output(call.rows + m);
  std::vector<float> z(k);
  float coefficient;
  driver.prepare_rows(changed, z.data(), k, &coefficient);
  driver.linear_outputs(changed, z.data(), k, &coefficient, 0, n);
  normalise(call.rows + m, {narrow, DType::kFp32, 0, 1});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> record_norm(
    const Tensor& y_pair, const Tensor& h, const Tensor& delta, const Tensor& weight, double eps,
    std::optional<ScalarType> out_dtype, double scale_offset, bool cast_first) {
  NormRecording call;
  static_cast<Inversion&>(call) = inversion("delta", delta, eps);
  const int64_t rows = call.rows, n = call.n;
  check("y_pair", y_pair, delta, {2 * rows, n});
  check("h", h, delta, {rows, -1});
  check("weight", weight, delta, {n});
  call.k = h.size(1);
  call.context = matrix("y_pair", y_pair, delta, 2 * rows, n);
  call.fallback = call.context.shifted(rows * call.context.row);
  call.h = matrix("h", h, delta, rows, call.k);
  call.delta = matrix("delta", delta, delta, rows, n);
  call.scale = matrix("weight", weight, delta, rows, n);
  call.offset = static_cast<float>(scale_offset);
  call.cast_first = cast_first;
  Tensor pair = allocate(delta, {2 * rows, n}, out_dtype.value_or(y_pair.scalar_type()), call.y);
  call.y_dtype = dtype_of("out_dtype", pair);
  Tensor u = allocate(delta, {rows, n}, ScalarType::Float, call.hidden);
  Tensor v = allocate(delta, {rows, call.k}, call.v);
  Tensor inverse_norm2 = allocate(delta, {rows}, call.inverse_norm2);
  Tensor new_scale = allocate(delta, {rows, n}, call.new_scale_fp32);
  Tensor status = allocate(delta, {rows}, ScalarType::Char, call.status);
  if (!rows) return {pair, u, v, inverse_norm2, new_scale, status};
#ifdef ICL_PATCH_CUDA
  if (device_type_of(delta) == aoti_torch_device_type_cuda()) {
    STD_TORCH_CHECK(call.k <= 1 << 30, "expected at most 2^30 elements of h, got ", call.k);
    run_cuda(cuda::record_norm, call, 1 << 20, delta.get_device_index());
    return {pair, u, v, inverse_norm2, new_scale, status};
  }
#endif
  std::vector<float> scale(n);
  for (int64_t i = 0; i < n; ++i)
    scale[i] = static_cast<float>(call.scale.at(0, i)) + call.offset;
  parallel(rows, 2 * n + call.k, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      record_row(call, {scale.data(), DType::kFp32, 0, 1}, m);
  });
  return {pair, u, v, inverse_norm2, new_scale, status};
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  ICL_PATCH_IMPL(invert_rmsnorm);
  ICL_PATCH_IMPL(stable_scale);
  ICL_PATCH_IMPL(record_norm);
}

#ifdef ICL_PATCH_CUDA
STABLE_TORCH_LIBRARY_IMPL(icl_patch, CUDA, m) {
  ICL_PATCH_IMPL(invert_rmsnorm);
  ICL_PATCH_IMPL(stable_scale);
  ICL_PATCH_IMPL(record_norm);
}
#endif
