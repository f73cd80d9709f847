// Enough of CUDA to run a kernel without a GPU: a block's threads are fibers of one thread, which
// change at every barrier and shuffle. A warp runs as far as it can before another does, the first
// or the last one first: code that lacks a barrier between two warps overtakes itself.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y = 1, z = 1;
  dim3(unsigned x = 1) : x(x) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace emulated {

constexpr unsigned kWarp = 32, kStack = 1 << 16;
inline int shared_memory_limit = 0;  // what the device is said to have

struct Barrier {
  unsigned arrived = 0, generation = 0;
};

using Place = void*[5];  // of __builtin_setjmp, which makes no system call, as swapcontext does

struct Start {
  ucontext_t context;
  char stack[kStack];
};

struct Fiber {
  Place place;
  std::unique_ptr<Start> start{new Start};  // apart: the scheduler reads the rest of all fibers
  bool begun = false, done = false;
  const Barrier* at = nullptr;  // where it waits, for the generation after this one
  unsigned generation = 0;

  bool ready() const { return !done && (!at || at->generation != generation); }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  std::vector<double> exchanged;
  Barrier all;
  Place scheduler;
  unsigned current = 0;
  void (*run)(void*) = nullptr;
  void* argument = nullptr;
};

inline Block* block = nullptr;

// Each in a function of its own, as the builtins ask for.
[[noreturn]] __noinline__ inline void go_to(Place& place) { __builtin_longjmp(place, 1); }
__noinline__ inline void leave(Place& place, Place& next) {
  if (!__builtin_setjmp(place)) go_to(next);
}
__noinline__ inline void run(Fiber& fiber) {
  if (__builtin_setjmp(block->scheduler)) return;
  if (fiber.begun) go_to(fiber.place);
  fiber.begun = true;
  setcontext(&fiber.start->context);
}

inline void wait(Barrier& barrier, unsigned size) {
  if (++barrier.arrived == size) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  Fiber& fiber = block->fibers[block->current];
  fiber.at = &barrier;
  fiber.generation = barrier.generation;
  leave(fiber.place, block->scheduler);
  fiber.at = nullptr;
}

inline void begin() {
  block->run(block->argument);
  block->fibers[block->current].done = true;
  go_to(block->scheduler);
}

}  // namespace emulated

struct Coordinates {
  unsigned x;
};
inline Coordinates threadIdx, blockIdx;

inline void __syncthreads() {
  emulated::wait(emulated::block->all, emulated::block->fibers.size());
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  emulated::Block& block = *emulated::block;
  const unsigned thread = block.current;
  emulated::Barrier& warp = block.warps[thread / emulated::kWarp];
  block.exchanged[thread] = value;
  emulated::wait(warp, emulated::kWarp);
  const T other = static_cast<T>(block.exchanged[thread ^ distance]);
  emulated::wait(warp, emulated::kWarp);
  return other;
}

template <class Kernel, class Call>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, const Call& call) {
  static unsigned turn = 0;
  struct Work {
    Kernel kernel;
    const Call* call;
  } work{kernel, &call};
  const unsigned threads = config->blockDim.x;
  emulated::Block block;
  block.fibers.resize(threads);
  block.warps.resize(threads / emulated::kWarp);
  block.exchanged.resize(threads);
  block.argument = &work;
  block.run = [](void* argument) {
    const Work& work = *static_cast<Work*>(argument);
    work.kernel(*work.call);
  };
  emulated::block = &block;
  for (unsigned b = 0; b < config->gridDim.x; ++b) {
    for (emulated::Fiber& fiber : block.fibers) {
      ucontext_t& context = fiber.start->context;
      getcontext(&context);
      context.uc_stack.ss_sp = fiber.start->stack;
      context.uc_stack.ss_size = emulated::kStack;
      fiber.begun = fiber.done = false;
      fiber.at = nullptr;
      makecontext(&context, emulated::begin, 0);
    }
    const bool backwards = ++turn % 2;
    for (unsigned left = threads; left;) {
      unsigned next = 0;
      while (next < threads && !block.fibers[backwards ? threads - 1 - next : next].ready()) ++next;
      if (next == threads) return cudaErrorInvalidValue;  // some wait where the others never come
      block.current = backwards ? threads - 1 - next : next;
      threadIdx.x = block.current;
      blockIdx.x = b;
      emulated::run(block.fibers[block.current]);
      left -= block.fibers[block.current].done;
    }
  }
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return bytes <= emulated::shared_memory_limit ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = emulated::shared_memory_limit +
           (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? 1024 : 0);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
