// The CUDA driver of the RMSNorm inversion: one block per row. The row is read from memory once.
// The terms of every evaluation, e and p in fp64, stay in registers up to 4,096 coordinates, then
// in shared memory while they fit (10,000 on sm_80, 14,000 on sm_90); longer rows are read again at
// every evaluation, usually from L2.
#include <cuda_runtime.h>

#include "common/rmsnorm_inverse.h"
#include "cuda/driver.h"

namespace icl_patch::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxValues = 5;  // in a struct that is summed
constexpr int kBatch = 4;      // coordinates a thread reads before it uses the first

enum class Storage { kRegisters, kShared, kNone };  // of e and p

template <class S>
__device__ __forceinline__ S shuffled(const S& x, int distance) {
  S other;
  const double* from = reinterpret_cast<const double*>(&x);
  double* to = reinterpret_cast<double*>(&other);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / sizeof(double)); ++i)
    to[i] = __shfl_xor_sync(0xffffffffu, from[i], distance);
  return other;
}

template <class S>
__device__ __forceinline__ S across_warp(S x) {
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) x.merge(shuffled(x, distance));
  return x;
}

struct Exchange {
  double values[kMaxWarps * kMaxValues];
};

extern __shared__ double
    shared_memory[];  // an Exchange, then e and p of a row that is row_bytes there

// Reads a coordinate whose neighbours are not contiguous. Inlined, the arithmetic of its address
// would be most of a kernel.
__device__ __noinline__ double load_strided(const Matrix& x, int64_t b, int k) {
  return x.at(b, k);
}

template <int kThreads, int kItems, Storage kStorage, bool kUpdate>
class BlockRow {
 public:
  using Value = double;

  __device__ BlockRow(const Inversion& call, int64_t b)
      : call_(call),
        b_(b),
        n_(static_cast<int>(call.n)),
        start_(b * call.n),
        exchange_(*reinterpret_cast<Exchange*>(shared_memory)),
        shared_(shared_memory + sizeof(Exchange) / sizeof(double)) {}

  __device__ bool is_fp64() const { return call_.hidden_is_fp64; }
  __device__ void set_scale(double power) { power_ = power; }
  __device__ void set_update(const Update& update) { update_ = update; }

  struct Inputs {
    double scale, other, fallback;  // other: target, or delta
  };

  // A coordinate of sum_inputs.
  struct At {
    const BlockRow& row;
    int k;
    Inputs x;

    __device__ double scale() const { return x.scale; }
    __device__ double delta() const { return x.other; }
    __device__ double fallback() const {
      return kUpdate ? x.fallback : row.call_.fallback.data ? row.call_.fallback.at(row.b_, k) : 0;
    }
    __device__ double index() const { return static_cast<double>(k); }
    __device__ double m() const {
      return (kUpdate ? row.update_.m(x.scale) : x.scale) * row.power_;
    }
    __device__ double g() const {
      return (kUpdate ? row.update_.g(x.other, x.scale, x.fallback) : x.other) * row.power_;
    }

    __device__ double store(double hidden, double new_scale) const {
      return put(kUpdate ? hidden - x.fallback : hidden, new_scale);
    }

    __device__ double put(double hidden, double new_scale) const {
      const int64_t i = row.start_ + k;
      row.call_.new_scale[i] = new_scale;
      if (row.call_.hidden_is_fp64) {
        static_cast<double*>(row.call_.hidden)[i] = hidden;
      } else {
        const float narrow = static_cast<float>(hidden);
        static_cast<float*>(row.call_.hidden)[i] = narrow;
        hidden = narrow;
      }
      return zero_if_finite(hidden) + zero_if_finite(new_scale);
    }
  };

  template <class F>
  __device__ __forceinline__ void each(F f) const {
    for (int first = 0; first < n_; first += kBatch * kThreads)
      batch(first, [&](int, const At& at) {
        if (at.k < n_) f(at);
      });
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> sum_inputs(F f) const {
    S<double> sum;
    each([&](const At& at) { f(sum, at); });
    return across_block(sum);
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> sum_terms(F f) const {
    S<double> sum;
    if (kStorage == Storage::kRegisters) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) f(sum, Term<double>{e_[j], p_[j]});
    } else if (kStorage == Storage::kShared) {
      for (int k = threadIdx.x; k < n_; k += kThreads)
        f(sum, Term<double>{shared_[k], shared_[n_ + k]});
    } else {
      each([&](const At& at) { f(sum, term(at.m(), at.g(), smallest_)); });
    }
    return across_block(sum);
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> prepare_terms(double smallest, F f) {
    smallest_ = smallest;
    S<double> sum;
    if (kStorage == Storage::kRegisters) {
#pragma unroll
      for (int part = 0; part < kItems; part += kBatch) prepare_registers(part, sum, f);
    } else {
      each([&](const At& at) {
        f(sum, at);
        if (kStorage == Storage::kNone) return;
        const auto [e, p] = term(at.m(), at.g(), smallest);
        shared_[at.k] = e;  // each thread reads only its own coordinates: no barrier
        shared_[n_ + at.k] = p;
      });
    }
    return across_block(sum);
  }

  template <class F>
  __device__ __forceinline__ double compute_once(F f) const {
    __syncthreads();
    if (threadIdx.x == 0) exchange_.values[0] = f();
    __syncthreads();
    return exchange_.values[0];
  }

  __device__ void store_unchanged() const {
    each([](const At& at) { at.put(0, at.x.scale); });
  }

  __device__ void store_nan() const {
    const double nan = kInfinity - kInfinity;
    each([=](const At& at) { at.store(nan, nan); });
  }

 private:
  __device__ __forceinline__ static int place(int first, int j) {
    return first + j * kThreads + static_cast<int>(threadIdx.x);
  }

  // The switch stands outside of a batch's loop, so that its loads are in flight together.
  __device__ __forceinline__ void read(const Matrix& x, int first, double (&to)[kBatch]) const {
    if (x.column != 1) {
      for (int j = 0; j < kBatch; ++j)
        to[j] = place(first, j) < n_ ? load_strided(x, b_, place(first, j)) : 0;
      return;
    }
    switch (x.dtype) {
      case DType::kFp64: return load<double>(x, first, to, [](double value) { return value; });
      case DType::kFp32:
        return load<float>(x, first, to, [](float value) -> double { return value; });
      case DType::kBf16:
        return load<uint16_t>(x, first, to,
                              [](uint16_t value) -> double { return bf16_to_fp32(value); });
      default:
        load<uint16_t>(x, first, to, [](uint16_t value) -> double { return fp16_to_fp32(value); });
    }
  }

  template <class T, class F>
  __device__ __forceinline__ void load(const Matrix& x, int first, double (&to)[kBatch],
                                       F widen) const {
    const T* const from = x.as<T>() + b_ * x.row + place(first, 0);
    T values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) values[j] = place(first, j) < n_ ? from[j * kThreads] : T{};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j] = widen(values[j]);
  }

  template <class S, class F>
  __device__ __forceinline__ void prepare_registers(int part, S& sum, F f) {
    batch(part * kThreads, [&](int j, const At& at) {
      const auto [e, p] = term(at.m(), at.g(), smallest_);
      const bool inside = at.k < n_;
      if (inside) f(sum, at);
      e_[part + j] = inside ? e : 1;
      p_[part + j] = inside ? p : 0;
    });
  }

  // f(j, at) for the thread's coordinates of a batch, some of which may lie beyond the row.
  template <class F>
  __device__ __forceinline__ void batch(int first, F f) const {
    double scale[kBatch], other[kBatch], fallback[kBatch];
    read(call_.scale, first, scale);
    read(kUpdate ? call_.delta : call_.target, first, other);
    if (kUpdate) read(call_.fallback, first, fallback);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      f(j, At{*this, place(first, j), {scale[j], other[j], kUpdate ? fallback[j] : 0}});
  }

  template <class S>
  __device__ __forceinline__ S across_block(S sum) const {
    static_assert(sizeof(S) <= kMaxValues * sizeof(double));
    sum = across_warp(sum);
    if (kThreads == kWarp) return sum;
    S* warp_sums = reinterpret_cast<S*>(exchange_.values);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    __syncthreads();
    if (lane == 0) warp_sums[warp] = sum;
    __syncthreads();
    return across_warp(lane < kThreads / kWarp ? warp_sums[lane] : S{});
  }

  const Inversion& call_;
  const int64_t b_;
  const int n_;
  const int64_t start_;  // the row's first element in the outputs
  Exchange& exchange_;
  double* const shared_;
  double power_ = 1, smallest_ = 0;
  Update update_;
  double e_[kStorage == Storage::kRegisters ? kItems : 1],
      p_[kStorage == Storage::kRegisters ? kItems : 1];
};

template <int kThreads, int kItems, Storage kStorage, bool kUpdate>
__global__ __launch_bounds__(kThreads, 512 / kThreads) void invert_kernel(
    const __grid_constant__ Inversion call) {
  const int64_t b = blockIdx.x;
  BlockRow<kThreads, kItems, kStorage, kUpdate> row(call, b);
  Outcome outcome;
  if (kUpdate) {
    outcome = update_row(row, call.n, call.eps);
  } else {
    outcome = invert_row(row, call.n, {call.rms.at(b, 0), call.eps});
  }
  if (threadIdx.x == 0) {
    call.shift[b] = outcome.shift;
    call.status[b] = outcome.status;
    call.evaluations[b] = outcome.evaluations;
  }
}

// row_bytes: of the row in shared memory; most: the shared memory that a block may have.
template <int kThreads, int kItems, Storage kStorage>
cudaError_t launch(const Inversion& call, cudaStream_t stream, int64_t row_bytes = 0,
                   int most = 0) {
  const auto kernel = call.delta.data ? invert_kernel<kThreads, kItems, kStorage, true>
                                      : invert_kernel<kThreads, kItems, kStorage, false>;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.rows));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Exchange) + row_bytes;
  config.stream = stream;
  if (row_bytes > 0) {
    // Always the same limit: another host thread may set it for a shorter row before this launch.
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return error;
  }
  return cudaLaunchKernelEx(&config, kernel, call);
}

constexpr int64_t kReserved = 1024;  // bytes of shared memory that CUDA reserves in every block

// The block's size depends on n and the device alone, so that a row's bits do not depend on the
// batch.
cudaError_t launch_for(const Inversion& call, int32_t device, cudaStream_t stream) {
  if (call.n <= 256) return launch<32, 8, Storage::kRegisters>(call, stream);
  if (call.n <= 2048) return launch<256, 8, Storage::kRegisters>(call, stream);
  if (call.n <= 4096) return launch<512, 8, Storage::kRegisters>(call, stream);
  int block_limit = 0, multiprocessor_limit = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&block_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessor_limit,
                                   cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  const int64_t row_bytes = 2 * call.n * static_cast<int64_t>(sizeof(double)),
                needed = row_bytes + static_cast<int64_t>(sizeof(Exchange));
  // With two rows on a multiprocessor, one computes while the other waits for its memory or sums.
  if (2 * (needed + kReserved) <= multiprocessor_limit)
    return launch<256, 8, Storage::kShared>(call, stream, row_bytes, block_limit);
  if (needed <= block_limit)
    return launch<512, 8, Storage::kShared>(call, stream, row_bytes, block_limit);
  return launch<512, 8, Storage::kNone>(call, stream);
}

}  // namespace

const char* invert_rows(const Inversion& call, int32_t device, void* stream) {
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = launch_for(call, device, static_cast<cudaStream_t>(stream));
  if (current != device) cudaSetDevice(current);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the next caller would take for its own
  return cudaGetErrorString(error);
}

}  // namespace icl_patch::cuda
