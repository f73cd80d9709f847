// Runs the portable CPU drivers on numbers of its own and writes the results to standard output:
// for each a line "name bytes", then the bytes. Built for two processors, it shows where they
// differ.
#include "cpu/drivers.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

using namespace icl_patch;

namespace {

constexpr DType kDTypes[] = {DType::kFp64, DType::kFp32, DType::kBf16, DType::kFp16};
const char* const kNames[] = {"fp64", "fp32", "bf16", "fp16"};

uint64_t state = 1;

// About normal: a sum of four uniform numbers.
double random_number() {
  double sum = 0;
  for (int i = 0; i < 4; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    sum += static_cast<double>(state >> 11) * 0x1p-53 - 0.5;
  }
  return sum * 1.75;
}

// Contiguous rows of random numbers, rounded to a dtype.
struct Numbers {
  std::vector<char> bytes;
  Matrix matrix;

  Numbers(DType dtype, int64_t rows, int64_t columns, double scale = 1, double offset = 0)
      : bytes(rows * columns * size_of(dtype)) {
    for (int64_t i = 0; i < rows * columns; ++i) set(dtype, i, offset + scale * random_number());
    matrix = {bytes.data(), dtype, columns, 1};
  }
  void set(DType dtype, int64_t i, double value) {
    const float narrow = static_cast<float>(value);
    const uint16_t bits = dtype == DType::kBf16 ? fp32_to_bf16(narrow) : fp32_to_fp16(narrow);
    char* to = bytes.data() + i * size_of(dtype);
    if (dtype == DType::kFp64) memcpy(to, &value, 8);
    else if (dtype == DType::kFp32) memcpy(to, &narrow, 4);
    else memcpy(to, &bits, 2);
  }
};

template <class T>
void report(const std::string& name, const std::vector<T>& values) {
  std::printf("%s %zu\n", name.c_str(), values.size() * sizeof(T));
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

void invert(int dtype_index, int64_t n, bool update) {
  const DType dtype = kDTypes[dtype_index];
  const int64_t rows = 9;
  Numbers target(dtype, rows, n, update ? 0.1 : 1), scale(dtype, 1, n, 0.3, 1);
  Numbers rms(dtype, rows, 1, 0.2, 1), fallback(dtype, rows, n);
  const double special[] = {0, std::numeric_limits<double>::quiet_NaN(),
                            std::numeric_limits<double>::infinity(), 1e-7};
  for (int64_t row = 0; row < 4; ++row) target.set(dtype, row * n + n / 2, special[row]);
  for (int64_t i = 0; i < n; ++i) target.set(dtype, 4 * n + i, 0);
  std::vector<double> hidden64(rows * n), shift(rows), new_scale(rows * n);
  std::vector<float> hidden32(rows * n);
  std::vector<int8_t> status(rows);
  std::vector<int32_t> evaluations(rows);
  Inversion call;
  call.rows = rows;
  call.n = n;
  (update ? call.delta : call.target) = target.matrix;
  call.scale = scale.matrix;
  call.scale.row = 0;
  call.rms = rms.matrix;
  call.fallback = fallback.matrix;
  call.eps = 1e-6;
  call.hidden_is_fp64 = dtype == DType::kFp64;
  call.hidden = call.hidden_is_fp64 ? static_cast<void*>(hidden64.data()) : hidden32.data();
  call.shift = shift.data();
  call.new_scale = new_scale.data();
  call.status = status.data();
  call.evaluations = evaluations.data();
  portable::invert_rows(call, 0, rows);
  const std::string name = std::string("inversion/") + kNames[dtype_index] + "/" +
                           std::to_string(n) + (update ? "/update" : "");
  if (call.hidden_is_fp64) report(name + "/hidden", hidden64);
  else report(name + "/hidden", hidden32);
  report(name + "/shift", shift);
  report(name + "/new_scale", new_scale);
  report(name + "/status", status);
  report(name + "/evaluations", evaluations);
}

void multiply(int dtype_index, bool transposed) {
  const DType dtype = kDTypes[dtype_index];
  const int64_t all = 5, n = 37, k = 150, rank = 2, width = (k + 31) / 32 * 32;
  Numbers z(dtype, all, k), weight(dtype, transposed ? k : n, transposed ? n : k);
  Numbers bias(dtype, 1, n);
  Numbers u(DType::kFp32, all * rank, n), v(DType::kFp32, all * rank, k);
  for (const int64_t rows : {int64_t{1}, all}) {  // the first row alone, then beside others
    Linear call;
    call.rows = call.all = rows;
    call.n = n;
    call.k = k;
    call.z = z.matrix;
    call.weight = weight.matrix;
    call.transposed = transposed;
    call.bias = bias.matrix;
    call.bias.row = 0;
    call.factors.rank = rank;
    call.factors.u = {u.matrix, rank * n};
    call.factors.v = {v.matrix, rank * k};
    call.y_dtype = dtype;
    std::vector<char> y(rows * n * size_of(dtype));
    call.y = y.data();
    std::vector<float> inputs(rows * width), coefficients(rows * rank);
    portable::prepare_rows(call, inputs.data(), width, coefficients.data());
    portable::linear_outputs(call, inputs.data(), width, coefficients.data(), 0, n);
    const std::string form = transposed ? "/transposed/" : "/plain/";
    report(std::string("linear/") + kNames[dtype_index] + form + std::to_string(rows), y);
  }
}

void row_ops(int dtype_index, int64_t n) {
  const DType dtype = kDTypes[dtype_index];
  const std::string end = std::string("/") + kNames[dtype_index] + "/" + std::to_string(n);
  const int64_t rows = 6;
  Numbers x(dtype, rows, n), scale(dtype, 1, n, 0.3, 1);
  for (const bool cast_first : {false, true}) {
    Norm call;
    call.rows = rows;
    call.n = n;
    call.x = x.matrix;
    call.scale = scale.matrix;
    call.scale.row = 0;
    call.eps = 1e-6f;
    call.cast_first = cast_first;
    std::vector<char> y(rows * n * size_of(dtype));
    std::vector<float> delta(rows / 2 * n), v(rows / 2 * n), inverse_norm2(rows / 2);
    call.y = y.data();
    call.delta = delta.data();
    call.v = v.data();
    call.inverse_norm2 = inverse_norm2.data();
    portable::norm_rows(call, 0, rows / 2);
    const std::string name = (cast_first ? "norm/cast" : "norm") + end;
    report(name + "/y", y);
    report(name + "/delta", delta);
    report(name + "/v", v);
    report(name + "/inverse_norm2", inverse_norm2);
  }
  Numbers gate(dtype, rows, n, 20), up(dtype, rows, n);
  for (const bool gelu : {false, true}) {
    Gated call;
    call.rows = rows;
    call.n = n;
    call.gate = gate.matrix;
    call.up = up.matrix;
    call.gelu = gelu;
    std::vector<char> y(rows * n * size_of(dtype));
    call.y = y.data();
    portable::gated_outputs(call, 0, rows * n);
    report((gelu ? "gelu" : "silu") + end, y);
  }
}

}  // namespace

int main() {
  for (int dtype = 0; dtype < 4; ++dtype)
    for (const int64_t n : {1, 7, 64, 1000})
      for (const bool update : {false, true}) invert(dtype, n, update);
  for (int dtype = 1; dtype < 4; ++dtype) {
    for (const bool transposed : {false, true}) multiply(dtype, transposed);
    for (const int64_t n : {5, 700}) row_ops(dtype, n);
  }
}
