// The CUDA driver of the RMSNorm inversion as a C function of matrices of one dtype, whose rows lie
// one after another.
#include "cuda/rmsnorm_inverse.cu"

namespace icl_patch::cuda {
namespace {
double shared_memory[1 << 15];
}
}  // namespace icl_patch::cuda

// update: the target is delta, the fallback h; dtype: a DType; column: from one number of a row to
// the next.
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
