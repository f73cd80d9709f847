// The CUDA driver of the RMSNorm inversion as a C function of contiguous fp64 or fp32 matrices.
#include "rmsnorm_inverse.cu"

namespace icl_patch::cuda {
namespace {
double shared_memory[1 << 15];
}
}  // namespace icl_patch::cuda

// update: the target is delta, the fallback h; single: every matrix and the hidden vectors are fp32.
extern "C" const char* invert_rows(int64_t rows, int64_t n, bool update, bool single, const void* target, const void* scale,
                                   const void* rms, const void* fallback, double eps, bool bisection, int shared_memory_limit,
                                   void* hidden, double* shift, double* new_scale, int8_t* status, int32_t* evaluations) {
  using namespace icl_patch;
  emulated::shared_memory_limit = shared_memory_limit;
  const auto matrix = [&](const void* data, int64_t row, int64_t column) {
    return Matrix{data, single ? Float::kSingle : Float::kDouble, row, column};
  };
  Inversion call;
  call.rows = rows;
  call.n = n;
  (update ? call.delta : call.target) = matrix(target, n, 1);
  call.scale = matrix(scale, n, 1);
  call.rms = matrix(rms, 1, 1);
  if (fallback) call.fallback = matrix(fallback, n, 1);
  call.eps = eps;
  call.bisection = bisection;
  call.hidden = hidden;
  call.hidden_is_double = !single;
  call.shift = shift;
  call.new_scale = new_scale;
  call.status = status;
  call.evaluations = evaluations;
  return cuda::invert_rows(call, 0, nullptr);
}
