// The CUDA driver of the RMSNorm inversion: a block for a row. The row comes from memory once. What every evaluation sums, e and p
// in fp64, stays in registers up to 4,096 coordinates, then in shared memory while it fits (10,000 on sm_80, 14,000 on sm_90);
// longer rows are read again at every evaluation, from L2 as a rule.
#include <cuda_runtime.h>

#include "rmsnorm_inverse.h"
#include "rmsnorm_inverse_cuda.h"

namespace icl_patch::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxValues = 5;  // of the structs that are summed
constexpr int kBatch = 4;      // coordinates a thread reads before it uses the first

enum class Keep { kRegisters, kShared, kNothing };

template <class S>
__device__ __forceinline__ S shuffled(const S& x, int distance) {
  S other;
  const double* from = reinterpret_cast<const double*>(&x);
  double* to = reinterpret_cast<double*>(&other);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / sizeof(double)); ++i) to[i] = __shfl_xor_sync(0xffffffffu, from[i], distance);
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

extern __shared__ double shared_memory[];  // an Exchange, then e and p of a row that is kept there

// Of columns apart from each other; the arithmetic of their addresses would be most of a kernel, if it were in line everywhere.
__device__ __noinline__ double apart(const Matrix& x, int64_t b, int k) { return x.at(b, k); }

template <int kThreads, int kItems, Keep kKeep, bool kUpdate>
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

  __device__ bool is_double() const { return call_.hidden_is_double; }
  __device__ void scale(double power) { power_ = power; }
  __device__ void form(const Update& update) { update_ = update; }

  struct Inputs {
    double scale, other, fallback;  // other: target, or delta
  };

  // A coordinate of a survey.
  struct At {
    const BlockRow& row;
    int k;
    Inputs x;

    __device__ double scale() const { return x.scale; }
    __device__ double delta() const { return x.other; }
    __device__ double fallback() const { return kUpdate ? x.fallback : row.call_.fallback.data ? row.call_.fallback.at(row.b_, k) : 0; }
    __device__ double index() const { return static_cast<double>(k); }
    __device__ double m() const { return (kUpdate ? row.update_.m(x.scale) : x.scale) * row.power_; }
    __device__ double g() const { return (kUpdate ? row.update_.g(x.other, x.scale, x.fallback) : x.other) * row.power_; }

    __device__ double store(double hidden, double new_scale) const {
      return put(kUpdate ? hidden - x.fallback : hidden, new_scale);
    }

    __device__ double put(double hidden, double new_scale) const {
      const int64_t i = row.start_ + k;
      row.call_.new_scale[i] = new_scale;
      if (row.call_.hidden_is_double) {
        static_cast<double*>(row.call_.hidden)[i] = hidden;
      } else {
        const float single = static_cast<float>(hidden);
        static_cast<float*>(row.call_.hidden)[i] = single;
        hidden = single;
      }
      return finite_or_nan(hidden) + finite_or_nan(new_scale);
    }
  };

  // A coordinate of an evaluation.
  struct Term {
    double e_, p_;
    __device__ double e() const { return e_; }
    __device__ double p() const { return p_; }
  };

  template <class F>
  __device__ __forceinline__ void each(F f) const {
    for (int first = 0; first < n_; first += kBatch * kThreads) {
      double scale[kBatch], other[kBatch], fallback[kBatch];
      read(call_.scale, first, scale);
      read(kUpdate ? call_.delta : call_.target, first, other);
      if (kUpdate) read(call_.fallback, first, fallback);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int k = place(first, j);
        if (k < n_) f(At{*this, k, {scale[j], other[j], kUpdate ? fallback[j] : 0}});
      }
    }
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> survey(F f) const {
    S<double> sum;
    each([&](const At& at) { f(sum, at); });
    return across_block(sum);
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> reduce(F f) const {
    S<double> sum;
    if (kKeep == Keep::kRegisters) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) f(sum, Term{e_[j], p_[j]});
    } else if (kKeep == Keep::kShared) {
      for (int k = threadIdx.x; k < n_; k += kThreads) f(sum, Term{shared_[k], shared_[n_ + k]});
    } else {
      each([&](const At& at) {
        const auto [e, p] = usable(at.m(), at.g(), smallest_);
        f(sum, Term{e, p});
      });
    }
    return across_block(sum);
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> prepare(double smallest, F f) {
    smallest_ = smallest;
    S<double> sum;
    if (kKeep == Keep::kRegisters) {
#pragma unroll
      for (int part = 0; part < kItems; part += kBatch) prepare_registers(part, sum, f);
    } else {
      each([&](const At& at) {
        f(sum, at);
        if (kKeep == Keep::kNothing) return;
        const auto [e, p] = usable(at.m(), at.g(), smallest);
        shared_[at.k] = e;  // every thread reads what it wrote
        shared_[n_ + at.k] = p;
      });
    }
    return across_block(sum);
  }

  template <class F>
  __device__ __forceinline__ double once(F f) const {
    __syncthreads();
    if (threadIdx.x == 0) exchange_.values[0] = f();
    __syncthreads();
    return exchange_.values[0];
  }

  __device__ void keep() const {
    each([](const At& at) { at.put(0, at.x.scale); });
  }

  __device__ void spoil() const {
    const double nan = kInfinity - kInfinity;
    each([=](const At& at) { at.store(nan, nan); });
  }

 private:
  __device__ __forceinline__ static int place(int first, int j) { return first + j * kThreads + static_cast<int>(threadIdx.x); }

  // One dtype for a batch, so that its loads are in flight together.
  __device__ __forceinline__ void read(const Matrix& x, int first, double (&to)[kBatch]) const {
    if (x.column != 1) {
      for (int j = 0; j < kBatch; ++j) to[j] = place(first, j) < n_ ? apart(x, b_, place(first, j)) : 0;
      return;
    }
    switch (x.dtype) {
      case Float::kDouble: return load<double>(x, first, to, [](double value) { return value; });
      case Float::kSingle: return load<float>(x, first, to, [](float value) -> double { return value; });
      case Float::kBrain: return load<uint16_t>(x, first, to, [](uint16_t value) -> double { return from_brain(value); });
      default: load<uint16_t>(x, first, to, [](uint16_t value) -> double { return from_half(value); });
    }
  }

  template <class T, class F>
  __device__ __forceinline__ void load(const Matrix& x, int first, double (&to)[kBatch], F widen) const {
    const T* const from = static_cast<const T*>(x.data) + b_ * x.row + place(first, 0);
    T values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) values[j] = place(first, j) < n_ ? from[j * kThreads] : T{};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j] = widen(values[j]);
  }

  template <class S, class F>
  __device__ __forceinline__ void prepare_registers(int part, S& sum, F f) {
    double scale[kBatch], other[kBatch], fallback[kBatch];
    const int first = part * kThreads;
    read(call_.scale, first, scale);
    read(kUpdate ? call_.delta : call_.target, first, other);
    if (kUpdate) read(call_.fallback, first, fallback);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const At at{*this, place(first, j), {scale[j], other[j], kUpdate ? fallback[j] : 0}};
      const auto [e, p] = usable(at.m(), at.g(), smallest_);
      const bool inside = at.k < n_;
      if (inside) f(sum, at);
      e_[part + j] = inside ? e : 1;
      p_[part + j] = inside ? p : 0;
    }
  }

  template <class S>
  __device__ __forceinline__ S across_block(S sum) const {
    static_assert(sizeof(S) <= kMaxValues * sizeof(double));
    sum = across_warp(sum);
    if (kThreads == kWarp) return sum;
    S* of_warps = reinterpret_cast<S*>(exchange_.values);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    __syncthreads();
    if (lane == 0) of_warps[warp] = sum;
    __syncthreads();
    return across_warp(lane < kThreads / kWarp ? of_warps[lane] : S{});
  }

  const Inversion& call_;
  const int64_t b_;
  const int n_;
  const int64_t start_;  // of the row in the outputs
  Exchange& exchange_;
  double* const shared_;
  double power_ = 1, smallest_ = 0;
  Update update_;
  double e_[kKeep == Keep::kRegisters ? kItems : 1], p_[kKeep == Keep::kRegisters ? kItems : 1];
};

template <int kThreads, int kItems, Keep kKeep, bool kUpdate>
__global__ __launch_bounds__(kThreads, 512 / kThreads) void invert_kernel(const __grid_constant__ Inversion call) {
  const int64_t b = blockIdx.x;
  BlockRow<kThreads, kItems, kKeep, kUpdate> row(call, b);
  Outcome outcome;
  if (kUpdate) {
    outcome = update_row(row, call.n, call.eps, call.bisection);
  } else {
    outcome = invert_row(row, call.n, Radius{call.rms.at(b, 0), call.eps}, call.bisection);
  }
  if (threadIdx.x == 0) {
    call.shift[b] = outcome.shift;
    call.status[b] = outcome.status;
    call.evaluations[b] = outcome.evaluations;
  }
}

// kept: bytes of the row that stay in shared memory; most: of which a block may have so many.
template <int kThreads, int kItems, Keep kKeep>
cudaError_t launch(const Inversion& call, cudaStream_t stream, int64_t kept = 0, int most = 0) {
  const auto kernel = call.delta.data ? invert_kernel<kThreads, kItems, kKeep, true> : invert_kernel<kThreads, kItems, kKeep, false>;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.rows));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Exchange) + kept;
  config.stream = stream;
  if (kept > 0) {
    // always the same: another host thread may set it for a shorter row before this one launches
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return error;
  }
  return cudaLaunchKernelEx(&config, kernel, call);
}

constexpr int64_t kReserved = 1024;  // bytes of shared memory that CUDA takes of every block

// The block depends on n and the device alone, so that a row's bits do not depend on the batch.
cudaError_t launch_for(const Inversion& call, int32_t device, cudaStream_t stream) {
  if (call.n <= 256) return launch<32, 8, Keep::kRegisters>(call, stream);
  if (call.n <= 2048) return launch<256, 8, Keep::kRegisters>(call, stream);
  if (call.n <= 4096) return launch<512, 8, Keep::kRegisters>(call, stream);
  int of_block = 0, of_processor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  const int64_t kept = 2 * call.n * static_cast<int64_t>(sizeof(double)), needed = kept + static_cast<int64_t>(sizeof(Exchange));
  // Two rows on a multiprocessor: while one waits for its memory or its sums, the other computes.
  if (2 * (needed + kReserved) <= of_processor) return launch<256, 8, Keep::kShared>(call, stream, kept, of_block);
  if (needed <= of_block) return launch<512, 8, Keep::kShared>(call, stream, kept, of_block);
  return launch<512, 8, Keep::kNothing>(call, stream);
}

}  // namespace

const char* invert_rows(const Inversion& call, int32_t device, void* stream) {
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = launch_for(call, device, static_cast<cudaStream_t>(stream));
  if (current != device) cudaSetDevice(current);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or whoever looks next takes it for his own
  return cudaGetErrorString(error);
}

}  // namespace icl_patch::cuda
