// patched_linear, linear_maps, add_low_rank, record_linear(s) and expert_linear, on the CPU.
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/tensors.h"

namespace icl_patch {
namespace {

// ---- running passes ----

// Rows of fp32, padded with zeros.
class PaddedRows {
 public:
  PaddedRows(int64_t count, int64_t k) : width((k + 31) / 32 * 32), lines_(count * width / kLine) {}
  float* operator[](int64_t m) { return lines_.empty() ? nullptr : lines_[0].values + m * width; }

  const int64_t width;

 private:
  static constexpr int64_t kLine = 16;
  struct alignas(64) Line {  // a cache line: a load across two of them takes twice as long
    float values[kLine];
  };
  std::vector<Line> lines_;
};

// Runs passes over weights of one shape side by side, in blocks of columns.
void run_passes(const std::vector<Linear>& passes) {
  const CpuDriver& driver = cpu_driver();
  const Linear& any = passes[0];
  const int64_t rank = any.factors.rank;
  int64_t rows = 0;
  for (const Linear& pass : passes) rows += pass.rows;
  PaddedRows z(rows, any.k);
  std::vector<float> coefficients(rows * rank);
  struct Inputs {
    float *z, *coefficients;
  };
  std::vector<Inputs> inputs;
  rows = 0;
  for (const Linear& pass : passes) {
    inputs.push_back({z[rows], coefficients.data() + rows * rank});
    driver.prepare_rows(pass, inputs.back().z, z.width, inputs.back().coefficients);
    rows += pass.rows;
  }
  const int64_t block = any.plain.data || any.transposed ? 512 : 16;  // columns, at least
  const int64_t blocks = (any.n + block - 1) / block;
  const int64_t block_work = block * (any.plain.data ? any.rows * rank : any.k);
  parallel(passes.size() * blocks, block_work, 65536, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t p = begin / blocks, from = begin % blocks;
      const int64_t to = std::min(blocks, from + end - begin);
      driver.linear_outputs(passes[p], inputs[p].z, z.width, inputs[p].coefficients, from * block,
                            std::min(to * block, any.n));
      begin += to - from;
    }
  });
}

// Allocates y and runs the call, in passes of as many rows as the driver takes.
Tensor run(Linear call, const Tensor& z, ScalarType out_dtype) {
  Tensor y = allocate(z, {call.all, call.n}, out_dtype, call.y);
  call.y_dtype = dtype_of("out_dtype", y);
  const int64_t streams = call.u ? 2 : 1, most = cpu_driver().pass_rows(call) / streams;
  for (; call.first * streams < call.all && call.n; call.first += most) {
    call.rows = std::min(most * streams, call.all - call.first * streams);
    run_passes({call});
  }
  return y;
}

// ---- arguments ----

// weight (N, K), or (E, N, K): then the first expert's.
void set_weight(Linear& call, const Tensor& weight) {
  const int64_t rows = weight.dim() - 2, columns = weight.dim() - 1;
  call.n = weight.size(rows);
  call.k = weight.size(columns);
  call.transposed = weight.stride(columns) != 1 && call.k > 1;
  call.weight = {weight.const_data_ptr(), dtype_of("weight", weight),
                 weight.stride(call.transposed ? columns : rows), 1};
  STD_TORCH_CHECK(call.weight.dtype == call.z.dtype, "expected z and weight of one dtype");
  STD_TORCH_CHECK(!call.transposed || weight.stride(rows) == 1 || call.n == 1,
                  "expected weight or its transpose with contiguous rows");
}

Linear linear(const Tensor& z, const Tensor& weight, const std::optional<Tensor>& bias) {
  check("z", z, z, {-1, -1});
  check("weight", weight, z, {-1, z.size(1)});
  Linear call;
  call.all = z.size(0);
  call.z = matrix("z", z, z, call.all, z.size(1));
  set_weight(call, weight);
  if (bias) {
    check("bias", *bias, z, {call.n});
    call.bias = matrix("bias", *bias, z, 1, call.n);
    STD_TORCH_CHECK(call.bias.dtype == call.z.dtype, "expected bias in z's dtype");
  }
  return call;
}

// u or v: (M, width) has rank 1; else (P, R, width).
Factor factor(const char* name, const Tensor& x, const Tensor& z, int64_t width) {
  const bool ranked = x.dim() == 3;
  if (ranked)
    check(name, x, z, {-1, -1, width});
  else
    check(name, x, z, {-1, width});
  return {{x.const_data_ptr(), dtype_of(name, x), ranked ? x.stride(1) : 0, x.stride(1 + ranked)},
          x.stride(0)};
}

// A single patch (1, R, ·) is shared by all rows unless there is an index.
void set_factors(Linear& call, const Tensor& z, const Tensor& u, const Tensor& v,
                 const std::optional<Tensor>& index) {
  Factors& factors = call.factors;
  factors.u = factor("u", u, z, call.n);
  factors.v = factor("v", v, z, call.k);
  const bool ranked = u.dim() == 3;
  const int64_t patches = u.size(0);
  factors.rank = ranked ? u.size(1) : 1;
  factors.shared = !index && ranked && patches == 1;
  STD_TORCH_CHECK(index || factors.shared || patches == call.all, "expected u for 1 or ", call.all,
                  " rows, got ", patches);
  STD_TORCH_CHECK(u.dim() == v.dim() && patches == v.size(0) && (!ranked || u.size(1) == v.size(1)),
                  "expected u and v of the same rows and rank");
  if (!index) return;
  STD_TORCH_CHECK(ranked, "expected u and v (P, R, .) with index");
  check("index", *index, z, {call.all});
  STD_TORCH_CHECK(index->is_contiguous() && index->scalar_type() == ScalarType::Long,
                  "expected index in contiguous int64");
  factors.index = static_cast<const int64_t*>(index->const_data_ptr());
  for (int64_t m = 0; m < call.all; ++m)
    STD_TORCH_CHECK(-1 <= factors.index[m] && factors.index[m] < patches,
                    "expected index from -1 to ", patches - 1, ", got ", factors.index[m]);
}

// ---- ops ----

Tensor patched_linear(const Tensor& z, const Tensor& weight, std::optional<Tensor> u,
                      std::optional<Tensor> v, std::optional<Tensor> bias,
                      std::optional<Tensor> index, std::optional<ScalarType> out_dtype) {
  Linear call = linear(z, weight, bias);
  STD_TORCH_CHECK(u.has_value() == v.has_value() && (u || !index),
                  "expected u and v together, and index only with them");
  if (u) set_factors(call, z, *u, *v, index);
  return run(call, z, out_dtype.value_or(z.scalar_type()));
}

using Biases = std::vector<std::optional<Tensor>>;

std::vector<Tensor> linear_maps(const Tensor& z, std::vector<Tensor> weights, Biases biases) {
  STD_TORCH_CHECK(weights.size() == biases.size(), "expected a bias or None for each weight");
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i)
    outputs.push_back(run(linear(z, weights[i], biases[i]), z, z.scalar_type()));
  return outputs;
}

Tensor add_low_rank(const Tensor& plain, const Tensor& z, const Tensor& u, const Tensor& v,
                    std::optional<Tensor> index, std::optional<ScalarType> out_dtype) {
  check("y", plain, plain, {-1, -1});
  check("z", z, plain, {plain.size(0), -1});
  Linear call;
  call.all = z.size(0);
  call.n = plain.size(1);
  call.k = z.size(1);
  call.z = matrix("z", z, z, call.all, call.k);
  call.plain = matrix("y", plain, z, call.all, call.n);
  set_factors(call, z, u, v, index);
  return run(call, z, out_dtype.value_or(plain.scalar_type()));
}

std::tuple<Tensor, Tensor> record_linear(const Tensor& z_pair, const Tensor& weight,
                                         const Tensor& v, std::optional<Tensor> bias) {
  Linear call = linear(z_pair, weight, bias);
  const int64_t pairs = call.all / 2;
  STD_TORCH_CHECK(call.all == 2 * pairs, "expected z_pair (2 M, K), got ", call.all, " rows");
  check("v", v, z_pair, {pairs, call.k});
  call.factors.rank = 1;
  call.factors.v = factor("v", v, z_pair, call.k);
  Tensor u = allocate(z_pair, {pairs, call.n}, call.u);
  return {run(call, z_pair, z_pair.scalar_type()), u};
}

// y and u of each map in turn.
std::vector<Tensor> record_linears(const Tensor& z_pair, std::vector<Tensor> weights,
                                   const Tensor& v, Biases biases) {
  STD_TORCH_CHECK(weights.size() == biases.size(), "expected a bias or None for each weight");
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto [y, u] = record_linear(z_pair, weights[i], v, biases[i]);
    outputs.push_back(y);
    outputs.push_back(u);
  }
  return outputs;
}

// x (M, K), which all slots of a row read, or (M, k, K); weight (E, N, K), bias (E, N), expert
// (M, k) -> (M, k, N).
Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& expert,
                     std::optional<Tensor> bias, std::optional<ScalarType> out_dtype) {
  check("expert", expert, x, {-1, -1});
  STD_TORCH_CHECK(expert.scalar_type() == ScalarType::Long, "expected expert in int64");
  const int64_t rows = expert.size(0), chosen = expert.size(1), slots = rows * chosen;
  const int64_t last = x.dim() - 1;
  if (last == 2)
    check("x", x, x, {rows, chosen, -1});
  else
    check("x", x, x, {rows, -1});
  check("weight", weight, x, {-1, -1, x.size(last)});
  Linear call;
  call.z = {x.const_data_ptr(), dtype_of("x", x), x.stride(0), x.stride(last)};
  set_weight(call, weight);
  call.slots_per_row = chosen;
  call.z_slot = last == 2 ? x.stride(1) : 0;
  const int64_t experts = weight.size(0);
  Matrix biases;
  if (bias) {
    check("bias", *bias, x, {experts, call.n});
    biases = matrix("bias", *bias, x, experts, call.n);
    STD_TORCH_CHECK(biases.dtype == call.z.dtype, "expected bias in x's dtype");
  }
  Tensor y = allocate(x, {rows, chosen, call.n}, out_dtype.value_or(x.scalar_type()), call.y);
  call.y_dtype = dtype_of("out_dtype", y);

  const auto* numbers = static_cast<const int64_t*>(expert.const_data_ptr());
  const auto expert_of = [&](int64_t slot) {
    return numbers[slot / chosen * expert.stride(0) + slot % chosen * expert.stride(1)];
  };
  // Sort the slots by their experts: count, add up, place.
  std::vector<int64_t> ends(experts + 1), order(slots);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t e = expert_of(slot);
    STD_TORCH_CHECK(0 <= e && e < experts, "expected expert from 0 to ", experts - 1, ", got ", e);
    ++ends[e + 1];
  }
  for (int64_t e = 0; e < experts; ++e) ends[e + 1] += ends[e];
  for (int64_t slot = 0; slot < slots; ++slot) order[ends[expert_of(slot)]++] = slot;

  const int64_t most = cpu_driver().pass_rows(call);
  std::vector<Linear> passes;
  call.slots = order.data();
  const Matrix first_weight = call.weight;
  for (int64_t e = 0; e < experts; ++e)
    for (; call.first < ends[e]; call.first += call.rows) {
      call.rows = std::min(most, ends[e] - call.first);
      call.weight = first_weight.shifted(e * weight.stride(0));
      if (bias) call.bias = biases.shifted(e * biases.row);
      passes.push_back(call);
    }
  // Side by side: all of them together are the work of a few rows.
  if (call.n && slots) run_passes(passes);
  return y;
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  ICL_PATCH_IMPL(patched_linear);
  ICL_PATCH_IMPL(linear_maps);
  ICL_PATCH_IMPL(add_low_rank);
  ICL_PATCH_IMPL(record_linear);
  ICL_PATCH_IMPL(record_linears);
  ICL_PATCH_IMPL(expert_linear);
}
