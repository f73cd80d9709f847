// Schemas, checks and registration of the native ops, on torch's stable ABI: one file serves every torch from 2.11 on, with or
// without CUDA. The drivers know nothing of torch.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu_drivers.h"
#include "rmsnorm_inverse_cuda.h"

#ifdef ICL_PATCH_CUDA
// A strong reference would keep the file from loading where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace icl_patch {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Float dtype_of(const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return Float::kDouble;
    case ScalarType::Float: return Float::kSingle;
    case ScalarType::BFloat16: return Float::kBrain;
    case ScalarType::Half: return Float::kHalf;
    default: STD_TORCH_CHECK(false, "expected ", name, " in fp64, fp32, bf16 or fp16");
  }
}

// Of what is computed in fp32.
Float narrow_dtype_of(const char* name, const Tensor& x) {
  const Float dtype = dtype_of(name, x);
  STD_TORCH_CHECK(dtype != Float::kDouble, "expected ", name, " in fp32, bf16 or fp16");
  return dtype;
}

int32_t device_type_of(const Tensor& x) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  return type;
}

// Contiguous, on the device of `like`, of up to three dimensions. Not new_empty, which the dispatcher would look up by its name.
Tensor empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  int64_t strides[3] = {1, 1, 1};
  for (size_t i = size.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(size.begin()[i], 1);
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(size.size(), size.begin(), strides, dtype_code, device_type_of(like), like.get_device_index(), &made));
  return Tensor(made);
}

// The dispatcher sends a mixed call to whichever device comes first with it.
void check_place(const char* name, const Tensor& x, const Tensor& reference) {
  STD_TORCH_CHECK(device_type_of(x) == device_type_of(reference) && x.get_device_index() == reference.get_device_index(),
                  "expected ", name, " on the device of the first argument");
}

// x as (rows, n); a vector (n,) is shared by all rows.
Matrix matrix(const char* name, const Tensor& x, const Tensor& reference, int64_t rows, int64_t n) {
  check_place(name, x, reference);
  const bool shared = x.dim() == 1 && x.size(0) == n;
  STD_TORCH_CHECK(shared || (x.dim() == 2 && x.size(0) == rows && x.size(1) == n),
                  "expected ", name, " (", rows, ", ", n, ") or (", n, ",)");
  return {x.const_data_ptr(), dtype_of(name, x), shared ? 0 : x.stride(0), x.stride(shared ? 0 : 1)};
}

struct CpuDriver {
  const char* name;
  bool supported;
  decltype(&portable::linear_outputs) linear_outputs;
  decltype(&portable::arrange) arrange;
  decltype(&portable::low_rank_outputs) low_rank_outputs;
  decltype(&portable::dot) dot;
  decltype(&portable::invert_rows) invert_rows;
  decltype(&portable::norm_rows) norm_rows;
  decltype(&portable::gated_outputs) gated_outputs;
  decltype(&portable::read_direction) read_direction;
  decltype(&portable::to_single) to_single;
};

#define ICL_PATCH_DRIVERS(isa)                                                                                              \
  isa::linear_outputs, isa::arrange, isa::low_rank_outputs, isa::dot, isa::invert_rows, isa::norm_rows, isa::gated_outputs, \
      isa::read_direction, isa::to_single

// The widest instruction set of this processor, or the one that ICL_PATCH_CPU names; null if it names none of this processor's.
const CpuDriver* find_cpu_driver() {
#ifdef ICL_PATCH_X86
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
#endif
  static const CpuDriver drivers[] = {
#ifdef ICL_PATCH_X86
      {"avx512_bf16", avx512 && __builtin_cpu_supports("avx512bf16"), ICL_PATCH_DRIVERS(avx512_bf16)},
      {"avx512", avx512, ICL_PATCH_DRIVERS(avx512)},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma"), ICL_PATCH_DRIVERS(avx2)},
#endif
      {"portable", true, ICL_PATCH_DRIVERS(portable)},
  };
  const char* wanted = std::getenv("ICL_PATCH_CPU");
  for (const CpuDriver& driver : drivers)
    if (driver.supported && (!wanted || !*wanted || !std::strcmp(wanted, driver.name))) return &driver;
  return nullptr;
}

const CpuDriver* cpu_driver() {
  static const CpuDriver* const driver = find_cpu_driver();
  return driver;
}

const CpuDriver& cpu() {
  const CpuDriver* driver = cpu_driver();
  STD_TORCH_CHECK(driver != nullptr, "ICL_PATCH_CPU names no instruction set of this processor");
  return *driver;
}

void run_cpu(const Inversion& call, const Tensor&) {
  const CpuDriver& driver = cpu();
  const int64_t grain = std::max<int64_t>(1, 16384 / call.n);
  torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) { driver.invert_rows(call, begin, end); });
}

#ifdef ICL_PATCH_CUDA
void run_cuda(const Inversion& call, const Tensor& on) {
  STD_TORCH_CHECK(call.n <= 1 << 30, "expected at most 2^30 elements a row, got ", call.n);
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  const char* error = cuda::invert_rows(call, on.get_device_index(), stream);
  STD_TORCH_CHECK(error == nullptr, "inverting RMSNorm on the device failed: ", error);
}
#endif

// Allocates the outputs in place of the call's null pointers and runs it.
template <void (*run)(const Inversion&, const Tensor&)>
Result finish(Inversion call, const Tensor& like) {
  Result result{empty(like, {call.rows, call.n}, call.hidden_is_double ? ScalarType::Double : ScalarType::Float),
                empty(like, {call.rows}, ScalarType::Double), empty(like, {call.rows, call.n}, ScalarType::Double),
                empty(like, {call.rows}, ScalarType::Char), empty(like, {call.rows}, ScalarType::Int)};
  auto& [hidden, shift, new_scale, status, evaluations] = result;
  call.hidden = hidden.mutable_data_ptr();
  call.shift = static_cast<double*>(shift.mutable_data_ptr());
  call.new_scale = static_cast<double*>(new_scale.mutable_data_ptr());
  call.status = static_cast<int8_t*>(status.mutable_data_ptr());
  call.evaluations = static_cast<int32_t*>(evaluations.mutable_data_ptr());
  if (call.rows) run(call, like);
  return result;
}

Inversion start(const char* name, const Tensor& first, double eps, bool bisection) {
  STD_TORCH_CHECK(first.dim() == 2 && first.size(1) > 0, "expected ", name, " (B, n) with n >= 1");
  STD_TORCH_CHECK(eps >= 0 && eps - eps == 0, "expected a finite eps >= 0, got ", eps);
  Inversion call;
  call.rows = first.size(0);
  call.n = first.size(1);
  call.eps = eps;
  call.bisection = bisection;
  return call;
}

template <void (*run)(const Inversion&, const Tensor&)>
Result invert_rmsnorm(const Tensor& target, const Tensor& scale, const Tensor& rms, double eps, std::optional<Tensor> fallback,
                      bool bisection) {
  Inversion call = start("target", target, eps, bisection);
  call.target = matrix("target", target, target, call.rows, call.n);
  call.scale = matrix("scale", scale, target, call.rows, call.n);
  STD_TORCH_CHECK(rms.dim() == 1 && rms.size(0) == call.rows, "expected rms (", call.rows, ",)");
  check_place("rms", rms, target);
  call.rms = {rms.const_data_ptr(), dtype_of("rms", rms), rms.stride(0), 1};
  if (fallback) call.fallback = matrix("fallback", *fallback, target, call.rows, call.n);
  call.hidden_is_double = call.target.dtype == Float::kDouble;
  return finish<run>(call, target);
}

template <void (*run)(const Inversion&, const Tensor&)>
Result stable_scale(const Tensor& delta, const Tensor& scale, const Tensor& hidden_down, double eps, bool bisection) {
  Inversion call = start("delta", delta, eps, bisection);
  call.delta = matrix("delta", delta, delta, call.rows, call.n);
  call.scale = matrix("scale", scale, delta, call.rows, call.n);
  call.fallback = matrix("hidden_down", hidden_down, delta, call.rows, call.n);
  call.hidden_is_double =
      call.delta.dtype == Float::kDouble || call.scale.dtype == Float::kDouble || call.fallback.dtype == Float::kDouble;
  return finish<run>(call, delta);
}

// ---- the patched linear map ----

// u or v as (P, R, width): (M, width) has rank 1, and a single patch is shared by all rows unless there is an index.
Factor factor(const char* name, const Tensor& x, const Tensor& z, int64_t width, Factors& factors, bool indexed) {
  check_place(name, x, z);
  const int64_t last = x.dim() - 1;
  STD_TORCH_CHECK((x.dim() == 2 || x.dim() == 3) && x.size(last) == width, "expected ", name, " (M, ", width, ") or (P, R, ", width, ")");
  const int64_t rank = x.dim() == 3 ? x.size(1) : 1;
  const bool shared = !indexed && x.dim() == 3 && x.size(0) == 1;
  STD_TORCH_CHECK(indexed || shared || x.size(0) == z.size(0), "expected ", name, " for 1 or ", z.size(0), " rows, got ", x.size(0));
  STD_TORCH_CHECK(factors.rank < 0 || (factors.rank == rank && factors.shared == shared), "expected u and v of the same rows and rank");
  factors.rank = rank;
  factors.shared = shared;
  return {{x.const_data_ptr(), narrow_dtype_of(name, x), x.dim() == 3 ? x.stride(1) : 0, x.stride(last)}, x.stride(0)};
}

// The matrix, or the matrices (E, N, K), in the last two dimensions.
void set_weight(Linear& call, const Tensor& weight, const Tensor& z) {
  check_place("weight", weight, z);
  const int64_t rows = weight.dim() - 2, columns = weight.dim() - 1;
  call.n = weight.size(rows);
  call.k = weight.size(columns);
  call.weight = weight.const_data_ptr();
  call.weight_dtype = narrow_dtype_of("weight", weight);
  STD_TORCH_CHECK(call.weight_dtype == narrow_dtype_of("z", z), "expected z and weight of one dtype");
  call.transposed = weight.stride(columns) != 1 && call.k > 1;
  STD_TORCH_CHECK(!call.transposed || weight.stride(rows) == 1 || call.n == 1, "expected weight or its transpose with contiguous rows");
  call.weight_stride = weight.stride(call.transposed ? columns : rows);
}

Linear linear(const Tensor& z, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(z.dim() == 2 && weight.dim() == 2 && weight.size(1) == z.size(1), "expected z (M, K) and weight (N, K)");
  Linear call;
  call.all = z.size(0);
  call.z = {z.const_data_ptr(), narrow_dtype_of("z", z), z.stride(0), z.stride(1)};
  set_weight(call, weight, z);
  if (bias) {
    call.bias = matrix("bias", *bias, z, 1, call.n);
    STD_TORCH_CHECK(call.bias.dtype == call.z.dtype, "expected bias in z's dtype");
  }
  return call;
}

// Rows of fp32, padded with zeros.
class Rows {
 public:
  Rows(int64_t count, int64_t k) : width((k + 31) / 32 * 32), lines_(count * width / 16) {}
  float* row(int64_t m) { return lines_.empty() ? nullptr : lines_[0].numbers + m * width; }

  const int64_t width;

 private:
  struct alignas(64) Line {  // a load across two of the cache's lines is two loads
    float numbers[16];
  };
  std::vector<Line> lines_;
};

// How many outputs are computed side by side, at least.
int64_t block_of(const Linear& call) { return call.plain.data || call.transposed ? 512 : 16; }

// z in fp32, and the coefficients z·v of every row and rank; then the outputs, side by side.
void run_pass(const Linear& call) {
  const CpuDriver& driver = cpu();
  const int64_t rank = call.factors.rank, patched_from = call.context_rows();
  Rows rows(call.rows, call.k);
  float* const z = rows.row(0);
  const int64_t width = rows.width;
  std::vector<float> direction(call.k), coefficients((call.rows - patched_from) * rank);
  for (int64_t m = 0; m < call.rows; ++m) driver.to_single(call.z, call.row_of(m), call.k, z + m * width);
  for (int64_t m = patched_from; m < call.rows; ++m) {
    const int64_t row = m - patched_from, patch = call.factors.patch_of(call.first + row);
    for (int64_t r = 0; patch >= 0 && r < rank; ++r) {
      driver.to_single(call.factors.v.rows(patch), r, call.k, direction.data());
      coefficients[row * rank + r] = driver.dot(z + m * width, direction.data(), call.k);
    }
  }
  const bool no_weight = call.plain.data != nullptr;
  if (!no_weight && !call.transposed)
    for (int64_t m = 0; m < call.rows; ++m) driver.arrange(call.weight_dtype, z + m * width, width);
  const int64_t block = block_of(call), blocks = (call.n + block - 1) / block;
  const int64_t work = block * (no_weight ? call.rows * rank : call.k);
  torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, 65536 / std::max<int64_t>(work, 1)), [&](int64_t begin, int64_t end) {
    begin *= block, end = std::min(end * block, call.n);
    if (no_weight)
      driver.low_rank_outputs(call, coefficients.data(), begin, end);
    else
      driver.linear_outputs(call, z, width, coefficients.data(), begin, end);
  });
}

// A pass over W for every 16 rows.
void run_linear(Linear call) {
  const int64_t streams = call.u ? 2 : 1, most = kMaxLinearRows / streams;
  for (; call.first * streams < call.all && call.n; call.first += most) {
    call.rows = std::min(most * streams, call.all - call.first * streams);
    run_pass(call);
  }
}

// The passes of every expert that a slot has chosen, side by side: all of them together are the work of a few rows. The slots of a row of x
// lie x_slot elements apart, rows x_row elements.
void run_experts(const std::vector<Linear>& passes, int64_t slots, int64_t chosen, int64_t x_row, int64_t x_slot) {
  if (passes.empty()) return;
  const CpuDriver& driver = cpu();
  const Linear& any = passes[0];
  Rows rows(slots, any.k);
  std::vector<const float*> inputs;
  int64_t place = 0;
  for (const Linear& call : passes) {
    inputs.push_back(rows.row(place));
    for (int64_t m = 0; m < call.rows; ++m) {
      const int64_t slot = call.row_of(m);
      Matrix x = call.z;
      x.data = static_cast<const char*>(x.data) + (slot / chosen * x_row + slot % chosen * x_slot) * size_of(x.dtype);
      float* const z = rows.row(place++);
      driver.to_single(x, 0, call.k, z);
      if (!call.transposed) driver.arrange(call.weight_dtype, z, rows.width);
    }
  }
  const int64_t block = block_of(any), blocks = (any.n + block - 1) / block, all = static_cast<int64_t>(passes.size()) * blocks;
  torch::stable::parallel_for(0, all, std::max<int64_t>(1, 65536 / std::max<int64_t>(block * any.k, 1)), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t pass = begin / blocks, from = begin % blocks, to = std::min(blocks, from + end - begin);
      driver.linear_outputs(passes[pass], inputs[pass], rows.width, nullptr, from * block, std::min(to * block, any.n));
      begin += to - from;
    }
  });
}

void set_output(Linear& call, Tensor& y) {
  call.y = y.mutable_data_ptr();
  call.y_dtype = narrow_dtype_of("out_dtype", y);
}

void set_factors(Linear& call, const Tensor& z, const Tensor& u, const Tensor& v, const std::optional<Tensor>& index) {
  call.factors.rank = -1;  // 0 is a rank too
  call.factors.u = factor("u", u, z, call.n, call.factors, index.has_value());
  call.factors.v = factor("v", v, z, call.k, call.factors, index.has_value());
  STD_TORCH_CHECK(u.dim() == v.dim() && u.size(0) == v.size(0), "expected u and v for the same rows, got ", u.size(0), " and ", v.size(0));
  if (!index) return;
  STD_TORCH_CHECK(u.dim() == 3, "expected u and v (P, R, .) with index");
  STD_TORCH_CHECK(index->dim() == 1 && index->size(0) == call.all && index->is_contiguous() && index->scalar_type() == ScalarType::Long,
                  "expected index (", call.all, ",) of contiguous int64");
  call.factors.index = static_cast<const int64_t*>(index->const_data_ptr());
  for (int64_t m = 0; m < call.all; ++m)
    STD_TORCH_CHECK(-1 <= call.factors.index[m] && call.factors.index[m] < u.size(0),
                    "expected index from -1 to ", u.size(0) - 1, ", got ", call.factors.index[m]);
}

Tensor patched_linear(const Tensor& z, const Tensor& weight, std::optional<Tensor> u, std::optional<Tensor> v, std::optional<Tensor> bias,
                      std::optional<Tensor> index, std::optional<ScalarType> out_dtype) {
  Linear call = linear(z, weight, bias);
  STD_TORCH_CHECK(u.has_value() == v.has_value() && (u || !index), "expected u and v together, and index only with them");
  if (u) set_factors(call, z, *u, *v, index);
  Tensor y = empty(z, {call.all, call.n}, out_dtype.value_or(z.scalar_type()));
  set_output(call, y);
  run_linear(call);
  return y;
}

Tensor add_low_rank(const Tensor& plain, const Tensor& z, const Tensor& u, const Tensor& v, std::optional<Tensor> index,
                    std::optional<ScalarType> out_dtype) {
  STD_TORCH_CHECK(plain.dim() == 2 && z.dim() == 2 && plain.size(0) == z.size(0), "expected y (M, N) and z (M, K)");
  Linear call;
  call.all = z.size(0);
  call.n = plain.size(1);
  call.k = z.size(1);
  call.z = matrix("z", z, z, call.all, call.k);
  call.plain = matrix("y", plain, z, call.all, call.n);
  STD_TORCH_CHECK(call.z.dtype != Float::kDouble && call.plain.dtype != Float::kDouble, "expected y and z in fp32, bf16 or fp16");
  set_factors(call, z, u, v, index);
  Tensor y = empty(z, {call.all, call.n}, out_dtype.value_or(plain.scalar_type()));
  set_output(call, y);
  run_linear(call);
  return y;
}

std::tuple<Tensor, Tensor> record_linear(const Tensor& z_pair, const Tensor& weight, const Tensor& v, std::optional<Tensor> bias) {
  Linear call = linear(z_pair, weight, bias);
  const int64_t pairs = call.all / 2;
  STD_TORCH_CHECK(call.all == 2 * pairs, "expected z_pair (2 M, K), got ", call.all, " rows");
  STD_TORCH_CHECK(v.dim() == 2 && v.size(0) == pairs && v.size(1) == call.k, "expected v (", pairs, ", ", call.k, ")");
  check_place("v", v, z_pair);
  call.factors.rank = 1;
  call.factors.v = {{v.const_data_ptr(), narrow_dtype_of("v", v), 0, v.stride(1)}, v.stride(0)};
  Tensor y = empty(z_pair, {call.all, call.n}, z_pair.scalar_type());
  Tensor u = empty(z_pair, {pairs, call.n}, ScalarType::Float);
  set_output(call, y);
  call.u = static_cast<float*>(u.mutable_data_ptr());
  run_linear(call);
  return {y, u};
}

// x (M, K) for all of a row's slots, or (M, k, K); weight (E, N, K), bias (E, N), expert (M, k) -> (M, k, N).
Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& expert, std::optional<Tensor> bias,
                     std::optional<ScalarType> out_dtype) {
  STD_TORCH_CHECK(expert.dim() == 2 && expert.scalar_type() == ScalarType::Long, "expected expert (M, k) in int64");
  check_place("expert", expert, x);
  const int64_t rows = expert.size(0), chosen = expert.size(1), slots = rows * chosen, last = x.dim() - 1;
  STD_TORCH_CHECK((x.dim() == 2 || (x.dim() == 3 && x.size(1) == chosen)) && x.size(0) == rows && weight.dim() == 3 &&
                      weight.size(2) == x.size(last),
                  "expected x (M, K) or (M, k, K) and weight (E, N, K)");
  Linear call;
  call.z = {x.const_data_ptr(), narrow_dtype_of("x", x), 0, x.stride(last)};
  set_weight(call, weight, x);
  const int64_t experts = weight.size(0), element = size_of(call.weight_dtype);
  if (bias) {
    check_place("bias", *bias, x);
    STD_TORCH_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == call.n && bias->scalar_type() == x.scalar_type(),
                    "expected bias (", experts, ", ", call.n, ") in x's dtype");
  }
  Tensor y = empty(x, {rows, chosen, call.n}, out_dtype.value_or(x.scalar_type()));
  set_output(call, y);

  const auto* numbers = static_cast<const int64_t*>(expert.const_data_ptr());
  const auto choice = [&](int64_t slot) { return numbers[slot / chosen * expert.stride(0) + slot % chosen * expert.stride(1)]; };
  std::vector<int64_t> next(experts + 1), order(slots);  // the slots, expert by expert
  for (int64_t slot = 0; slot < slots; ++slot) {
    STD_TORCH_CHECK(0 <= choice(slot) && choice(slot) < experts, "expected expert from 0 to ", experts - 1, ", got ", choice(slot));
    ++next[choice(slot) + 1];
  }
  for (int64_t e = 0; e < experts; ++e) next[e + 1] += next[e];
  for (int64_t slot = 0; slot < slots; ++slot) order[next[choice(slot)]++] = slot;  // next[e] becomes the end of e

  std::vector<Linear> passes;
  call.slots = order.data();
  for (int64_t e = 0; e < experts; ++e)
    for (; call.first < next[e]; call.first += call.rows) {
      call.rows = std::min(kMaxLinearRows, next[e] - call.first);
      call.weight = static_cast<const char*>(weight.const_data_ptr()) + e * weight.stride(0) * element;
      if (bias) call.bias = {static_cast<const char*>(bias->const_data_ptr()) + e * bias->stride(0) * element, call.z.dtype, 0, bias->stride(1)};
      passes.push_back(call);
    }
  if (call.n) run_experts(passes, slots, chosen, x.stride(0), x.dim() == 3 ? x.stride(1) : 0);
  return y;
}

// ---- the ops around it ----

int64_t rows_of(int64_t work) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(work, 1)); }

std::tuple<Tensor, Tensor> read_direction(const Tensor& z, bool wide) {
  STD_TORCH_CHECK(z.dim() == 2, "expected z (M, K)");
  const int64_t rows = z.size(0), k = z.size(1);
  const Matrix from = matrix("z", z, z, rows, k);
  const ScalarType dtype = wide ? ScalarType::Double : ScalarType::Float;
  Tensor v = empty(z, {rows, k}, dtype), inverse = empty(z, {rows}, dtype);
  auto *to = static_cast<char*>(v.mutable_data_ptr()), *inverses = static_cast<char*>(inverse.mutable_data_ptr());
  const CpuDriver& driver = cpu();
  const int64_t size = wide ? 8 : 4;
  torch::stable::parallel_for(0, rows, rows_of(k), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) driver.read_direction(from, m, k, to + m * k * size, inverses + m * size, wide);
  });
  return {v, inverse};
}

Norm norm(const char* name, const Tensor& x, const char* scale_name, const Tensor& scale, double eps, double offset, bool cast_first) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "expected ", name, " (M, d) with d >= 1");
  STD_TORCH_CHECK(eps >= 0 && eps - eps == 0, "expected a finite eps >= 0, got ", eps);
  Norm call;
  call.rows = x.size(0);
  call.n = x.size(1);
  call.x = matrix(name, x, x, call.rows, call.n);
  call.scale = matrix(scale_name, scale, x, call.rows, call.n);
  STD_TORCH_CHECK(call.x.dtype != Float::kDouble && call.scale.dtype != Float::kDouble, "expected fp32, bf16 or fp16");
  call.eps = static_cast<float>(eps);
  call.offset = static_cast<float>(offset);
  call.cast_first = cast_first;
  return call;
}

Tensor rms_norm(const Tensor& x, const Tensor& scale, double eps, double scale_offset, bool cast_first) {
  Norm call = norm("x", x, "scale", scale, eps, scale_offset, cast_first);
  Tensor y = empty(x, {call.rows, call.n}, x.scalar_type());
  call.y = y.mutable_data_ptr();
  const CpuDriver& driver = cpu();
  torch::stable::parallel_for(0, call.rows, rows_of(call.n), [&](int64_t begin, int64_t end) { driver.norm_rows(call, begin, end); });
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_pair(const Tensor& hidden, const Tensor& weight, double eps, double scale_offset,
                                                     bool cast_first) {
  Norm call = norm("hidden", hidden, "weight", weight, eps, scale_offset, cast_first);
  const int64_t pairs = call.rows / 2;
  STD_TORCH_CHECK(call.rows == 2 * pairs, "expected hidden (2 M, d), got ", call.rows, " rows");
  STD_TORCH_CHECK(weight.dim() == 1, "expected weight (", call.n, ",)");
  Tensor z_pair = empty(hidden, {call.rows, call.n}, hidden.scalar_type());
  Tensor delta = empty(hidden, {pairs, call.n}, ScalarType::Float);
  Tensor v = empty(hidden, {pairs, call.n}, ScalarType::Float);
  Tensor inverse_norm2 = empty(hidden, {pairs}, ScalarType::Float);
  call.y = z_pair.mutable_data_ptr();
  call.delta = static_cast<float*>(delta.mutable_data_ptr());
  call.v = static_cast<float*>(v.mutable_data_ptr());
  call.inverse_norm2 = static_cast<float*>(inverse_norm2.mutable_data_ptr());
  const CpuDriver& driver = cpu();
  torch::stable::parallel_for(0, pairs, rows_of(2 * call.n), [&](int64_t begin, int64_t end) { driver.norm_rows(call, begin, end); });
  return {z_pair, delta, v, inverse_norm2};
}

Tensor gated_product(const Tensor& gate, const Tensor& up, std::string activation) {
  STD_TORCH_CHECK(gate.dim() == 2 && up.dim() == 2, "expected gate and up (M, N)");
  Gated call;
  call.rows = gate.size(0);
  call.n = gate.size(1);
  call.gate = matrix("gate", gate, gate, call.rows, call.n);
  call.up = matrix("up", up, gate, call.rows, call.n);
  call.gelu = activation == "gelu_tanh";
  STD_TORCH_CHECK(call.gelu || activation == "silu", "expected activation gelu_tanh or silu, got ", activation);
  STD_TORCH_CHECK(call.gate.dtype == call.up.dtype && call.gate.dtype != Float::kDouble,
                  "expected gate and up of one dtype, fp32, bf16 or fp16");
  Tensor y = empty(gate, {call.rows, call.n}, gate.scalar_type());
  call.y = y.mutable_data_ptr();
  const CpuDriver& driver = cpu();
  torch::stable::parallel_for(0, call.rows * call.n, 8192, [&](int64_t begin, int64_t end) { driver.gated_outputs(call, begin, end); });
  return y;
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY(icl_patch, m) {
  m.def(
      "invert_rmsnorm(Tensor target, Tensor scale, Tensor rms, float eps=0.0, Tensor? fallback=None, bool bisection=False)"
      " -> (Tensor hidden, Tensor shift, Tensor new_scale, Tensor status, Tensor evaluations)");
  m.def(
      "stable_scale(Tensor delta, Tensor scale, Tensor hidden_down, float eps=0.0, bool bisection=False)"
      " -> (Tensor u, Tensor shift, Tensor new_scale, Tensor status, Tensor evaluations)");
  m.def(
      "patched_linear(Tensor z, Tensor weight, Tensor? u=None, Tensor? v=None, Tensor? bias=None, Tensor? index=None,"
      " ScalarType? out_dtype=None) -> Tensor");
  m.def("add_low_rank(Tensor y, Tensor z, Tensor u, Tensor v, Tensor? index=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("expert_linear(Tensor x, Tensor weight, Tensor expert, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("read_direction(Tensor z, bool wide=False) -> (Tensor v, Tensor inverse_norm2)");
  m.def("record_linear(Tensor z_pair, Tensor weight, Tensor v, Tensor? bias=None) -> (Tensor y, Tensor u)");
  m.def("rms_norm(Tensor x, Tensor scale, float eps, float scale_offset=0.0, bool cast_first=True) -> Tensor");
  m.def(
      "norm_pair(Tensor hidden, Tensor weight, float eps, float scale_offset=0.0, bool cast_first=True)"
      " -> (Tensor z_pair, Tensor delta, Tensor v, Tensor inverse_norm2)");
  m.def("gated_product(Tensor gate, Tensor up, str activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  m.impl("invert_rmsnorm", TORCH_BOX(&icl_patch::invert_rmsnorm<&icl_patch::run_cpu>));
  m.impl("stable_scale", TORCH_BOX(&icl_patch::stable_scale<&icl_patch::run_cpu>));
  m.impl("patched_linear", TORCH_BOX(&icl_patch::patched_linear));
  m.impl("add_low_rank", TORCH_BOX(&icl_patch::add_low_rank));
  m.impl("expert_linear", TORCH_BOX(&icl_patch::expert_linear));
  m.impl("read_direction", TORCH_BOX(&icl_patch::read_direction));
  m.impl("record_linear", TORCH_BOX(&icl_patch::record_linear));
  m.impl("rms_norm", TORCH_BOX(&icl_patch::rms_norm));
  m.impl("norm_pair", TORCH_BOX(&icl_patch::norm_pair));
  m.impl("gated_product", TORCH_BOX(&icl_patch::gated_product));
}

#ifdef ICL_PATCH_CUDA
STABLE_TORCH_LIBRARY_IMPL(icl_patch, CUDA, m) {
  m.impl("invert_rmsnorm", TORCH_BOX(&icl_patch::invert_rmsnorm<&icl_patch::run_cuda>));
  m.impl("stable_scale", TORCH_BOX(&icl_patch::stable_scale<&icl_patch::run_cuda>));
}
#endif

// What was built and what is used, for icl_patch.ops.native.
extern "C" __attribute__((visibility("default"))) const char* icl_patch_cpu_instructions() {
  const icl_patch::CpuDriver* driver = icl_patch::cpu_driver();
  return driver ? driver->name : "";
}

extern "C" __attribute__((visibility("default"))) const char* icl_patch_cuda_architectures() {
#ifdef ICL_PATCH_CUDA
  return ICL_PATCH_CUDA;
#else
  return "";
#endif
}
