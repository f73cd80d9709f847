// The CUDA driver of the RMSNorm inversion, and of a recording that contains it: one block per row.
// Inputs of fp32 and narrower types are read from memory once and stay in shared memory as fp32
// where they fit (19,000 coordinates of an update on sm_90). The terms of every evaluation, e and p
// in fp64, stay in registers up to 4,096 coordinates; beyond, they are computed anew at every
// evaluation. Any other row is read again at every pass, usually from L2; beyond 4,096 coordinates
// its e and p stay in shared memory where they fit.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "common/stable_update.h"
#include "cuda/driver.h"
#include "cuda/norm_recording.cuh"

namespace icl_patch::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 16;
constexpr int kMaxValues = 5;  // in a struct that is summed

enum class Storage { kRegisters, kShared, kNone };  // of e and p

__device__ __forceinline__ double shuffled(double x, int distance) {
  return __shfl_xor_sync(0xffffffffu, x, distance);
}

// Merges the structs of `count` neighbouring lanes.
template <int count = kWarp, class S>
__device__ __forceinline__ S across_lanes(S x) {
#pragma unroll
  for (int distance = count / 2; distance; distance /= 2) {
    S other;
    const double* from = reinterpret_cast<const double*>(&x);
    double* to = reinterpret_cast<double*>(&other);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(S) / sizeof(double)); ++i)
      to[i] = shuffled(from[i], distance);
    x.merge(other);
  }
  return x;
}

// The same for a warp's moments with fewer shuffles: each of the first two steps sends half of the
// values and keeps the sums of the other half. Lane 8i returns value i.
__device__ __forceinline__ double folded(const Moments<double>& x, int lane) {
  const bool upper = lane & 16, odd = lane & 8;
  const double a = (upper ? x.m2 : x.m0) + shuffled(upper ? x.m0 : x.m2, 16);
  const double b = (upper ? x.m3 : x.m1) + shuffled(upper ? x.m1 : x.m3, 16);
  double sum = (odd ? b : a) + shuffled(odd ? a : b, 8);
#pragma unroll
  for (int distance = 4; distance; distance /= 2) sum += shuffled(sum, distance);
  return sum;
}

// Sums of the warps. Two buffers take turns, so that a sum needs one barrier: who writes to one has
// passed the other's barrier, which all reached after they had read this one.
struct Exchange {
  double values[2][kMaxWarps * kMaxValues];
  Next next;
};

// Of a recording: its sums in fp32, and h·v.
struct RecordingExchange : Exchange {
  float partials[kMaxPartials];
  float coefficient;
};

extern __shared__ double
    shared_memory[];  // an Exchange, then the row's inputs, or e and p, in row_bytes

// A coordinate's inputs. other: target, or delta.
template <class T, bool kUpdate>
struct InputsOf {
  T scale, other, fallback;
};
template <class T>
struct InputsOf<T, false> {
  T scale, other;
};

enum class Op { kInvert, kUpdate, kRecord };

// kStaged: the inputs are narrow and stay in shared memory.
template <int kThreads, int kItems, Storage kStorage, bool kStaged, Op kOp>
class BlockRow {
 public:
  static constexpr bool kUpdate = kOp != Op::kInvert, kRecord = kOp == Op::kRecord;
  using Call = std::conditional_t<kRecord, NormRecording, Inversion>;
  using Shared = std::conditional_t<kRecord, RecordingExchange, Exchange>;
  using Value = double;
  using Input = std::conditional_t<kStaged, float, double>;
  using Bits = std::conditional_t<kStaged, uint32_t, uint64_t>;  // of an input as it is given
  static constexpr bool kNarrow = kStaged;
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kBatch = kItems % 4 ? 3 : 4;    // coordinates that a thread works on at once
  static constexpr int kLoads = kStaged ? 8 : kBatch;  // that it reads from memory at once

  __device__ BlockRow(const Call& call)
      : call_(call),
        n_(static_cast<int>(call.n)),
        exchange_(*reinterpret_cast<Shared*>(shared_memory)),
        shared_(shared_memory + sizeof(Shared) / sizeof(double)) {
    if constexpr (kStaged) stage();
  }

  __device__ static int64_t b() { return blockIdx.x; }
  __device__ bool is_fp64() const { return !kNarrow && call_.hidden_is_fp64; }
  __device__ void set_scale(double power) { power_ = power; }
  __device__ void set_update(const Update& update) { update_ = update; }

  using Inputs = InputsOf<Input, kUpdate>;

  // A coordinate of sum_inputs.
  struct At {
    const BlockRow& row;
    int k;
    Inputs x;

    __device__ double scale() const { return x.scale; }
    __device__ double delta() const { return x.other; }
    __device__ double fallback() const {
      if constexpr (kUpdate) {
        return x.fallback;
      } else {
        return row.call_.fallback.data ? row.call_.fallback.at(row.b(), k) : 0;
      }
    }
    __device__ double index() const { return static_cast<double>(k); }
    __device__ double m() const { return scaled(kUpdate ? row.update_.m(scale()) : scale()); }
    __device__ double g() const {
      return scaled(kUpdate ? row.update_.g(delta(), scale(), fallback()) : delta());
    }
    __device__ double scaled(double x) const { return kNarrow ? x : x * row.power_; }

    __device__ double store(double hidden, double new_scale) const {
      return put(kUpdate ? hidden - fallback() : hidden, new_scale);
    }

    __device__ double put(double hidden, double new_scale) const {
      const int64_t i = row.b() * row.call_.n + k;
      if constexpr (kRecord) {
        row.call_.new_scale_fp32[i] = static_cast<float>(new_scale);
      } else {
        row.call_.new_scale[i] = new_scale;
      }
      if (row.is_fp64()) {
        static_cast<double*>(row.call_.hidden)[i] = hidden;
      } else {
        const float narrow = static_cast<float>(hidden);
        static_cast<float*>(row.call_.hidden)[i] = narrow;
        hidden = narrow;
        if constexpr (kRecord) row.keep(k, narrow, static_cast<float>(fallback()), new_scale);
      }
      return zero_if_finite(hidden) + zero_if_finite(new_scale);
    }
  };

  template <class F>
  __device__ __forceinline__ void each(F f) const {
    if constexpr (kStaged) {
#pragma unroll 1  // more would take more registers than three rows on a multiprocessor leave
      for (int k = threadIdx.x; k < n_; k += kThreads) f(At{*this, k, staged(k)});
    } else {
      for (int first = 0; first < n_; first += kBatch * kThreads)
        batch(first, [&](int, const At& at) {
          if (at.k < n_) f(at);
        });
    }
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> sum_inputs(F f) const {
    S<double> sum;
    each([&](const At& at) { f(sum, at); });
    return across_block(sum);
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> sum_terms(F f) const {
    return across_block(own_terms<S>(f));
  }

  // The first warp alone computes g(the sums).
  template <template <class> class S, class F, class G>
  __device__ __forceinline__ Next sum_terms_once(F f, G g) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const double sum = folded(own_terms<S>(f), lane);
    S<double>* const warp_sums = next_buffer<S<double>>();
    if (lane % 8 == 0) reinterpret_cast<double*>(warp_sums + warp)[lane / 8] = sum;
    __syncthreads();
    if (warp == 0) {
      const Next next = g(across_warps(warp_sums));
      if (lane == 0) exchange_.next = next;
    }
    __syncthreads();
    return exchange_.next;
  }

  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> prepare_terms(double smallest, F f) {
    smallest_ = smallest;
    S<double> sum;
    if constexpr (kStorage == Storage::kRegisters) {
#pragma unroll
      for (int part = 0; part < kItems; part += kBatch) prepare_registers(part, sum, f);
    } else {
      each([&](const At& at) {
        f(sum, at);
        if constexpr (kStorage == Storage::kShared) {
          const auto [e, p] = term(at.m(), at.g(), smallest_);
          shared_[at.k] = e;  // each thread reads only its own coordinates: no barrier
          shared_[n_ + at.k] = p;
        }
      });
    }
    return across_block(sum);
  }

  __device__ void store_unchanged() const {
    each([](const At& at) { at.put(0, at.x.scale); });
  }

  __device__ void store_nan() const {
    const double nan = kInfinity - kInfinity;
    each([=](const At& at) { at.store(nan, nan); });
  }

  template <class S>
  __device__ __forceinline__ S across_block(S sum) const {
    sum = across_lanes(sum);
    if (kThreads == kWarp) return sum;
    S* const warp_sums = next_buffer<S>();
    if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = sum;
    __syncthreads();
    return across_warps(warp_sums);
  }

  // Before the inversion: v, and the h·v by which the change u of the matrix is multiplied.
  __device__ void record_matrix() const {
    const float coefficient = record_direction<kThreads>(call_, b(), exchange_.partials, *this);
    if (threadIdx.x == 0) exchange_.coefficient = coefficient;
    __syncthreads();
  }

  // After it: the row of y.
  __device__ void write_output() const {
    __syncthreads();  // all that is kept
    const int64_t to = call_.rows + b();
    if constexpr (kStaged) {
      write_norm<kThreads>(
          call_, to, exchange_.partials, [&](int k) { return staged(k).fallback; },
          [&](int k) { return staged(k).scale; });
    } else {
      const Matrix y{call_.y, call_.y_dtype, call_.n, 1};
      write_norm<kThreads>(
          call_, to, exchange_.partials, [&](int k) { return static_cast<float>(y.at(to, k)); },
          [&](int k) { return call_.new_scale_fp32[b() * call_.n + k]; });
    }
  }

 private:
  __device__ __forceinline__ static int place(int first, int j) {
    return first + j * kThreads + static_cast<int>(threadIdx.x);
  }

  // The thread's part of sum_terms.
  template <template <class> class S, class F>
  __device__ __forceinline__ S<double> own_terms(F f) const {
    S<double> sum;
    if constexpr (kStorage == Storage::kRegisters) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) f(sum, Term<double>{e_[j], p_[j]});
    } else if constexpr (kStorage == Storage::kShared) {
#pragma unroll 4
      for (int k = threadIdx.x; k < n_; k += kThreads)
        f(sum, Term<double>{shared_[k], shared_[n_ + k]});
    } else {
      for (int first = 0; first < n_; first += kBatch * kThreads)
        batch(first, [&](int, const At& at) { f(sum, inside(at)); });
    }
    return sum;
  }

  // The term of a coordinate that may lie beyond the row.
  __device__ __forceinline__ Term<double> inside(const At& at) const {
    const auto [e, p] = term(at.m(), at.g(), smallest_);
    return {at.k < n_ ? e : 1, at.k < n_ ? p : 0};
  }

  // The bits of a batch's inputs. They are converted later, so that the loads of all matrices are
  // in flight together.
  __device__ __forceinline__ void load(const Matrix& x, int first, Bits (&to)[kLoads]) const {
    switch (x.dtype) {
      case DType::kFp64:
        if constexpr (!kStaged) load_as<uint64_t>(x, first, to);
        return;
      case DType::kFp32: return load_as<uint32_t>(x, first, to);
      default: load_as<uint16_t>(x, first, to);
    }
  }

  template <class T>
  __device__ __forceinline__ void load_as(const Matrix& x, int first, Bits (&to)[kLoads]) const {
    const T* from = x.as<T>() + b() * x.row + place(first, 0) * x.column;
    const int64_t step = kThreads * x.column;
#pragma unroll
    for (int j = 0; j < kLoads; ++j, from += step) to[j] = place(first, j) < n_ ? *from : T{};
  }

  __device__ __forceinline__ static void convert(DType dtype, const Bits (&bits)[kLoads],
                                                 Inputs (&to)[kLoads], Input Inputs::*member) {
    const auto each_bits = [&](auto widened) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) to[j].*member = widened(bits[j]);
    };
    switch (dtype) {
      case DType::kFp64: return each_bits([](Bits x) { return from_fp64(x); });
      case DType::kFp32:
        return each_bits([](Bits x) { return from_bits(static_cast<uint32_t>(x)); });
      case DType::kBf16:
        return each_bits([](Bits x) { return bf16_to_fp32(static_cast<uint16_t>(x)); });
      default: each_bits([](Bits x) { return fp16_to_fp32(static_cast<uint16_t>(x)); });
    }
  }

  __device__ __forceinline__ static Input from_fp64(Bits bits) {
    Input x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }

  template <class S, class F>
  __device__ __forceinline__ void prepare_registers(int part, S& sum, F f) {
    batch(part * kThreads, [&](int j, const At& at) {
      if (at.k < n_) f(sum, at);
      const auto [e, p] = inside(at);
      e_[part + j] = e;
      p_[part + j] = p;
    });
  }

  // f(j, inputs) for the thread's coordinates of a batch; some may lie beyond the row.
  template <class F>
  __device__ __forceinline__ void from_memory(int first, F f) const {
    Bits scale[kLoads], other[kLoads], fallback[kLoads];
    load(call_.scale, first, scale);
    load(kUpdate ? call_.delta : call_.target, first, other);
    if constexpr (kUpdate) load(call_.fallback, first, fallback);
    Inputs x[kLoads];
    convert(call_.scale.dtype, scale, x, &Inputs::scale);
    convert(kUpdate ? call_.delta.dtype : call_.target.dtype, other, x, &Inputs::other);
    if constexpr (kUpdate) convert(call_.fallback.dtype, fallback, x, &Inputs::fallback);
    if constexpr (kRecord) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) x[j].scale = static_cast<float>(x[j].scale) + call_.offset;
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) f(j, x[j]);
  }

  // Each thread reads only what it wrote, so no barrier. It writes at least its first number: a
  // batch's coordinates beyond the row have a copy of it.
  __device__ __forceinline__ void stage() const {
    for (int first = 0; first < n_; first += kLoads * kThreads)
      from_memory(first, [&](int j, const Inputs& x) {
        const int k = place(first, j);
        if (k < n_ || k < kThreads) staged(k) = x;
      });
  }

  __device__ __forceinline__ Inputs& staged(int k) const {
    return reinterpret_cast<Inputs*>(shared_)[k];
  }

  // The norm's input and scale, of which no inputs are read any more: in their place, or in y's.
  __device__ __forceinline__ void keep(int k, float u, float plain, double new_scale) const {
    const float x = fmaf(exchange_.coefficient, u, plain);
    if constexpr (kStaged) {
      staged(k) = {static_cast<float>(new_scale), 0, rounded(call_.y_dtype, x)};
    } else {
      icl_patch::cuda::store(call_.y_dtype, call_.y, (call_.rows + b()) * call_.n + k, x);
    }
  }

  // f(j, at), as from_memory.
  template <class F>
  __device__ __forceinline__ void batch(int first, F f) const {
    if constexpr (kStaged) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int k = place(first, j);
        f(j, At{*this, k, staged(k < n_ ? k : static_cast<int>(threadIdx.x))});
      }
    } else {
      from_memory(first, [&](int j, const Inputs& x) { f(j, At{*this, place(first, j), x}); });
    }
  }

  template <class S>
  __device__ __forceinline__ S* next_buffer() const {
    static_assert(sizeof(S) <= kMaxValues * sizeof(double));
    turn_ ^= 1;
    return reinterpret_cast<S*>(exchange_.values[turn_]);
  }

  template <class S>
  __device__ __forceinline__ static S across_warps(const S* warp_sums) {
    constexpr int kLanes = kWarps > 8 ? 16 : kWarps > 1 ? 8 : 1;
    const int lane = threadIdx.x % kLanes;
    return across_lanes<kLanes>(lane < kWarps ? warp_sums[lane] : S{});
  }

  const Call& call_;
  const int n_;
  Shared& exchange_;
  double* const shared_;
  mutable int turn_ = 0;
  double power_ = 1, smallest_ = 0;
  Update update_;
  double e_[kStorage == Storage::kRegisters ? kItems : 1],
      p_[kStorage == Storage::kRegisters ? kItems : 1];
};

// Threads that a multiprocessor shall have registers for: of three blocks where shared memory may
// hold so many long rows. On sm_100 the compiler would spill for three.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kMostThreads = 512;
#else
constexpr int kMostThreads = 768;
#endif
constexpr int resident(Storage storage, bool staged) {
  return staged && storage == Storage::kNone ? kMostThreads : 512;
}

template <int kThreads, int kItems, Storage kStorage, bool kStaged, Op kOp>
__global__ __launch_bounds__(kThreads, resident(kStorage, kStaged) / kThreads) void invert_kernel(
    const __grid_constant__ Inversion call) {
  const int64_t b = blockIdx.x;
  BlockRow<kThreads, kItems, kStorage, kStaged, kOp> row(call);
  Outcome outcome;
  if constexpr (kOp == Op::kUpdate) {
    outcome = update_row(row, call.n, call.eps);
  } else {
    outcome = invert_row(row, call.n, {call.rms.at(b, 0), call.eps}, extent_of(row));
  }
  if (threadIdx.x == 0) {
    call.shift[b] = outcome.shift;
    call.status[b] = outcome.status;
    call.evaluations[b] = outcome.evaluations;
  }
}

// The first half of the blocks takes the rows without the context, which take longer.
template <int kThreads, int kItems, Storage kStorage, bool kStaged>
__global__ __launch_bounds__(kThreads, 512 / kThreads) void record_kernel(
    const __grid_constant__ NormRecording call) {
  const int64_t b = blockIdx.x;
  if (b >= call.rows) {
    const int64_t m = b - call.rows;
    write_norm<kThreads>(
        call, m, reinterpret_cast<RecordingExchange*>(shared_memory)->partials,
        [&](int k) { return rounded(call.y_dtype, static_cast<float>(call.context.at(m, k))); },
        [&](int k) { return static_cast<float>(call.scale.at(0, k)) + call.offset; });
    return;
  }
  BlockRow<kThreads, kItems, kStorage, kStaged, Op::kRecord> row(call);
  row.record_matrix();
  const Outcome outcome = update_row(row, call.n, call.eps);
  if (threadIdx.x == 0) call.status[b] = outcome.status;
  row.write_output();
}

template <int kThreads, int kItems, Storage kStorage, bool kStaged>
auto kernel_for(const Inversion& call) {
  return call.delta.data ? invert_kernel<kThreads, kItems, kStorage, kStaged, Op::kUpdate>
                         : invert_kernel<kThreads, kItems, kStorage, kStaged, Op::kInvert>;
}
template <int kThreads, int kItems, Storage kStorage, bool kStaged>
auto kernel_for(const NormRecording&) {
  return record_kernel<kThreads, kItems, kStorage, kStaged>;
}

template <class Call>
constexpr bool kRecords = std::is_same_v<Call, NormRecording>;
template <class Call>
constexpr int64_t kExchangeBytes =
    sizeof(std::conditional_t<kRecords<Call>, RecordingExchange, Exchange>);

// row_bytes: of the row in shared memory; most: the shared memory that a block may have.
template <int kThreads, int kItems, Storage kStorage, bool kStaged, class Call>
cudaError_t launch(const Call& call, cudaStream_t stream, int64_t row_bytes, int most) {
  const auto kernel = kernel_for<kThreads, kItems, kStorage, kStaged>(call);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(kRecords<Call> ? 2 * call.rows : call.rows));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kExchangeBytes<Call> + row_bytes;
  config.stream = stream;
  if (config.dynamicSmemBytes > 48 * 1024) {  // what every kernel may have
    // Always the same limit: another host thread may set it for a shorter row before this launch.
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return error;
  }
  return cudaLaunchKernelEx(&config, kernel, call);
}

constexpr int64_t kReserved = 1024;  // bytes of shared memory that CUDA reserves in every block

bool is_fp64(const Matrix& x) { return x.data && x.dtype == DType::kFp64; }

// The kernel depends on n, the device, the call and whether an input is fp64, so that a row's bits
// do not depend on the batch.
template <class Call>
cudaError_t launch_for(const Call& call, int32_t device, cudaStream_t stream) {
  int block_limit = 0, multiprocessor_limit = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&block_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessor_limit,
                                   cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  const auto fits = [=](int64_t bytes, int blocks) {
    const int64_t needed = bytes + kExchangeBytes<Call>;
    return needed <= block_limit && blocks * (needed + kReserved) <= multiprocessor_limit;
  };
  const auto run = [&](auto kernel, int64_t bytes) {
    return kernel(call, stream, bytes, block_limit);
  };
  const bool update = call.delta.data;
  const bool wide = call.hidden_is_fp64 || is_fp64(call.scale) || is_fp64(call.target) ||
                    is_fp64(call.delta) || (update && is_fp64(call.fallback));
  const int64_t staged =
      std::max<int64_t>(call.n, 512) * (update ? 3 : 2) * static_cast<int64_t>(sizeof(float));
  if (!wide && fits(staged, 1)) {
    if (call.n <= 128) return run(launch<32, 4, Storage::kRegisters, true, Call>, staged);
    if (call.n <= 1024) return run(launch<256, 4, Storage::kRegisters, true, Call>, staged);
    if (call.n <= 2048) return run(launch<512, 4, Storage::kRegisters, true, Call>, staged);
    if constexpr (!kRecords<Call>) {
      if (call.n <= 3072) return run(launch<512, 6, Storage::kRegisters, true, Call>, staged);
    }
    if (call.n <= 4096) return run(launch<512, 8, Storage::kRegisters, true, Call>, staged);
    // With several rows on a multiprocessor, one computes while another waits for its sums.
    if constexpr (!kRecords<Call>) {
      if (fits(staged, 2)) return run(launch<256, 4, Storage::kNone, true, Call>, staged);
    }
    return run(launch<512, 4, Storage::kNone, true, Call>, staged);
  }
  if constexpr (!kRecords<Call>) {  // its inputs are narrow
    if (call.n <= 256) return run(launch<32, 8, Storage::kRegisters, false, Call>, 0);
    if (call.n <= 2048) return run(launch<256, 8, Storage::kRegisters, false, Call>, 0);
    if (call.n <= 4096) return run(launch<512, 8, Storage::kRegisters, false, Call>, 0);
    const int64_t terms = 2 * call.n * static_cast<int64_t>(sizeof(double));
    if (fits(terms, 2)) return run(launch<256, 4, Storage::kShared, false, Call>, terms);
    if (fits(terms, 1)) return run(launch<512, 4, Storage::kShared, false, Call>, terms);
  }
  return run(launch<512, 4, Storage::kNone, false, Call>, 0);
}

// Returns null, or the error.
template <class Call>
const char* run_on(const Call& call, int32_t device, void* stream) {
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = launch_for(call, device, static_cast<cudaStream_t>(stream));
  if (current != device) cudaSetDevice(current);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the next caller would take for its own
  return cudaGetErrorString(error);
}

}  // namespace

const char* invert_rows(const Inversion& call, int32_t device, void* stream) {
  return run_on(call, device, stream);
}

const char* record_norm(const NormRecording& call, int32_t device, void* stream) {
  return run_on(call, device, stream);
}

}  // namespace icl_patch::cuda
