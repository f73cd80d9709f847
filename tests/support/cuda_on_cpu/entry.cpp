// The CUDA driver of the RMSNorm inversion, and of a recording, as C functions of matrices whose
// rows lie one after another.
#include "cuda/rmsnorm_inverse.cu"

namespace icl_patch::cuda {
namespace {
double shared_memory[1 << 15];
}
}  // namespace icl_patch::cuda

// update: the target is delta, the fallback h; dtype: of all matrices, a DType; column: from one
// number of a row to the next.
extern "C" const char* invert_rows(int64_t rows, int64_t n, bool update, int dtype, int64_t column,
                                   const void* target, const void* scale, const void* rms,
                                   const void* fallback, double eps, int shared_memory_limit,
                                   void* hidden, double* shift, double* new_scale, int8_t* status,
                                   int32_t* evaluations) {
  using namespace icl_patch;
  emulated::shared_memory_limit = shared_memory_limit;
  const auto matrix = [&](const void* data) {
    return Matrix{data, static_cast<DType>(dtype), n * column, column};
  };
  Inversion call;
  call.rows = rows;
  call.n = n;
  (update ? call.delta : call.target) = matrix(target);
  call.scale = matrix(scale);
  call.rms = {rms, static_cast<DType>(dtype), 1, 1};
  if (fallback) call.fallback = matrix(fallback);
  call.eps = eps;
  call.hidden = hidden;
  call.hidden_is_fp64 = call.scale.dtype == DType::kFp64;
  call.shift = shift;
  call.new_scale = new_scale;
  call.status = status;
  call.evaluations = evaluations;
  return cuda::invert_rows(call, 0, nullptr);
}

// dtype: of h, the weight and y; y_pair and delta are in fp32.
extern "C" const char* record_norm(int64_t rows, int64_t n, int64_t k, int dtype, int64_t column,
                                   const void* y_pair, const void* h, const void* delta,
                                   const void* weight, double eps, float offset, bool cast_first,
                                   int shared_memory_limit, void* y, float* u, float* v,
                                   float* inverse_norm2, float* new_scale, int8_t* status) {
  using namespace icl_patch;
  emulated::shared_memory_limit = shared_memory_limit;
  const auto narrow = static_cast<DType>(dtype);
  NormRecording call;
  call.rows = rows;
  call.n = n;
  call.k = k;
  call.context = {y_pair, DType::kFp32, n * column, column};
  call.fallback = call.context.shifted(rows * n * column);
  call.h = {h, narrow, k * column, column};
  call.delta = {delta, DType::kFp32, n * column, column};
  call.scale = {weight, narrow, 0, column};
  call.eps = eps;
  call.offset = offset;
  call.cast_first = cast_first;
  call.y = y;
  call.y_dtype = narrow;
  call.hidden = u;
  call.v = v;
  call.inverse_norm2 = inverse_norm2;
  call.new_scale_fp32 = new_scale;
  call.status = status;
  return cuda::record_norm(call, 0, nullptr);
}
