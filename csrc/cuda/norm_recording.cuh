// What a recording of a norm does beside the inversion, for one row and one block of threads.
#pragma once

#include <cuda_runtime.h>

#include "common/calls.h"
#include "common/rmsnorm_inverse.h"
#include "cuda/row_sums.cuh"

namespace icl_patch::cuda {
namespace {

// The number of a dtype that is nearest to x.
__device__ __forceinline__ float rounded(DType dtype, float x) {
  return dtype == DType::kBf16   ? round_to_bf16(x)
         : dtype == DType::kFp16 ? fp16_to_fp32(fp32_to_fp16(x))
                                 : x;
}

__device__ __forceinline__ void store(DType dtype, void* to, int64_t at, float x) {
  switch (dtype) {
    case DType::kFp32: static_cast<float*>(to)[at] = x; break;
    case DType::kBf16: static_cast<uint16_t*>(to)[at] = fp32_to_bf16(x); break;
    default: static_cast<uint16_t*>(to)[at] = fp32_to_fp16(x);
  }
}

template <class V>
struct DirectionSums {
  V norm2{}, largest{};

  ICL_PATCH_INLINE void merge(const DirectionSums& other) {
    norm2 += other.norm2;
    largest = larger(largest, other.largest);
  }
};

struct HAndV {
  float z, v;
};

// Writes v = h/‖h‖² and 1/‖h‖² of row b, and returns h·v in the first warp. Both are 0 where fp32
// cannot hold such a v; 1/‖h‖² is NaN where h has one.
template <int kThreads, class Row>
__device__ float record_direction(const NormRecording& call, int64_t b, float* partials,
                                  const Row& row) {
  constexpr double kLeast = 0x1p-126, kMost = 3.4028234663852886e38;
  const int k_count = static_cast<int>(call.k);
  return call.h.visit([&](const auto* data) -> float {
    const auto* h = data + b * call.h.row;
    const int64_t column = call.h.column;
    DirectionSums<double> own;
#pragma unroll 8
    for (int k = threadIdx.x; k < k_count; k += kThreads) {
      const double z = static_cast<float>(h[k * column]);
      own.norm2 += z * z;
      own.largest = larger(own.largest, magnitude(z));
    }
    const DirectionSums<double> sums = row.across_block(own);
    double inverse = 1 / sums.norm2;
    const double steepest = sums.largest * inverse;
    if (sums.norm2 == 0 || steepest > kMost || steepest < kLeast) inverse = 0;
    if (threadIdx.x == 0) {
      const float narrow = static_cast<float>(inverse);
      call.inverse_norm2[b] =
          inverse > 0 && narrow < static_cast<float>(kLeast) ? static_cast<float>(kLeast) : narrow;
    }
    if (inverse != inverse) inverse = 0;  // of a NaN: v is 0 there
    float* const v = call.v + b * call.k;
    return coefficient_of<kThreads>(k_count, partials, [=](int k) -> HAndV {
      const float z = static_cast<float>(h[k * column]);
      const float along = static_cast<float>(z * inverse);
      v[k] = along;
      return {z, along};
    });
  });
}

// Writes row `to` of y, scale(k) x(k) / sqrt(mean(x²) + eps).
template <int kThreads, class X, class S>
__device__ void write_norm(const NormRecording& call, int64_t to, float* partials, X x, S scale) {
  const int n = static_cast<int>(call.n);
  const float reciprocal = reciprocal_rms<kThreads>(n, static_cast<float>(call.eps), partials, x);
  for (int k = threadIdx.x; k < n; k += kThreads) {
    float normed = x(k) * reciprocal;
    if (call.cast_first) normed = rounded(call.y_dtype, normed);
    store(call.y_dtype, call.y, to * call.n + k, normed * scale(k));
  }
}

}  // namespace
}  // namespace icl_patch::cuda
