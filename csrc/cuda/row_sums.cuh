// Sums over a row by one block of threads, in the order of the Triton kernels: of numbers that a
// replay computes with those again, bit for bit.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "common/matrix.h"

namespace icl_patch::cuda {
namespace {

constexpr int kSegment = 2048;      // elements of a row whose sums are taken apart
constexpr int kChunk = 64;          // of a segment's coefficient: an element a lane
constexpr int kMaxPartials = 1024;  // sums of 32 places, which are kept in shared memory

__host__ __device__ constexpr int power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// The places of a sum of squares: `width` for each segment of a row, `count` in all.
struct Places {
  int width, count;
};

__host__ __device__ constexpr Places places_of(int n) {
  const int segments = power_of_two((n + kSegment - 1) / kSegment);
  const int quarter = (n < kSegment ? power_of_two(n) : kSegment) / 4;
  const int most = 2048 / segments < 512 ? 2048 / segments : 512;
  const int width = quarter < most ? quarter : most;
  return {width < 64 ? 64 : width, segments * (width < 64 ? 64 : width)};
}

// The sum of `count` neighbouring lanes, neighbours first.
__device__ __forceinline__ float pair_sum(float x, int count) {
  for (int distance = 1; distance < count; distance *= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// 1/sqrt(mean(x²) + eps) of x(k), k < n.
template <int kThreads, class X>
__device__ float reciprocal_rms(int n, float eps, float* partials, X x) {
  const Places places = places_of(n);
  for (int place = threadIdx.x; place < places.count; place += kThreads) {
    const int segment = place / places.width;
    const int end = n - segment * kSegment < kSegment ? n : (segment + 1) * kSegment;
    float squares = 0;
    for (int k = segment * kSegment + place % places.width; k < end; k += places.width) {
      const float value = x(k);
      squares = fmaf(value, value, squares);
    }
    squares = pair_sum(squares, 32);
    if (place % 32 == 0) partials[place / 32] = squares;
  }
  __syncthreads();
  int count = places.count / 32;
  for (; count > 32; count /= 2)
    for (int first = 0; first < count / 2; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const float pair = i < count / 2 ? partials[2 * i] + partials[2 * i + 1] : 0;
      __syncthreads();
      if (i < count / 2) partials[i] = pair;
      __syncthreads();
    }
  const float total = pair_sum(partials[threadIdx.x & (count - 1)], count);
  return 1 / sqrtf(total / static_cast<float>(n) + eps);
}

// Σ z v over k < n of factors(k) = {z, v}, in the first warp. Each lane of a chunk adds up its
// elements of a segment, then the segments one after the other; the lanes are added neighbours
// first.
template <int kThreads, class F>
__device__ float coefficient_of(int n, float* partials, F factors) {
  constexpr int kSlots = kThreads > kChunk ? kThreads : kChunk, kSegments = kSlots / kChunk;
  static_assert(kSlots <= kMaxPartials);
  float even = 0, odd = 0;  // totals of two neighbouring lanes
  for (int first = 0; first < n; first += kSegments * kSegment) {
    __syncthreads();  // the partials before have been read
    for (int slot = threadIdx.x; slot < kSlots; slot += kThreads) {
      const int begin = first + slot / kChunk * kSegment;
      const int end = n - begin < kSegment ? n : begin + kSegment;
      float sum = 0;
#pragma unroll 8
      for (int k = begin + slot % kChunk; k < end; k += kChunk) {
        const auto [z, v] = factors(k);
        sum = fmaf(z, v, sum);
      }
      partials[slot] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32)
      for (int segment = 0; segment < kSegments; ++segment) {
        even += partials[segment * kChunk + 2 * threadIdx.x];
        odd += partials[segment * kChunk + 2 * threadIdx.x + 1];
      }
  }
  return threadIdx.x < 32 ? pair_sum(even + odd, 32) : 0;
}

}  // namespace
}  // namespace icl_patch::cuda
