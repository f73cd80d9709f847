// The products of the CPU driver on tiles, with the model of the instructions in place of a
// processor's: what csrc/bindings/linear.cpp does with a call, for Python's ctypes.
#define ICL_PATCH_ISA tiles
#define ICL_PATCH_TILES ModelTiles
#include "cpu/linear.cpp"

using namespace icl_patch;

// Runs a call over its passes. `cut` splits the outputs of each, as two threads do.
static void run(Linear call, int64_t cut) {
  const int64_t streams = call.u ? 2 : 1, most = tiles::pass_rows(call) / streams;
  const int64_t width = (call.k + 31) / 32 * 32, rank = call.factors.rank;
  for (; call.first * streams < call.all; call.first += most) {
    call.rows = std::min(most * streams, call.all - call.first * streams);
    std::vector<float> z(call.rows * width + 16), coefficients(call.rows * rank);
    tiles::prepare_rows(call, z.data(), width, coefficients.data());
    tiles::linear_outputs(call, z.data(), width, coefficients.data(), 0, cut);
    tiles::linear_outputs(call, z.data(), width, coefficients.data(), cut, call.n);
  }
}

// z (rows, k) and weight (n, k) in bf16 with their strides; slots (rows,), the row of z and y that
// each row of a pass stands for, or null; bias (n,) in bf16, or null; factors u (rows, rank, n) and
// v (rows, rank, k) in fp32; y (rows, n) in fp32 or bf16.
extern "C" void patched_linear(int64_t rows, int64_t n, int64_t k, int64_t rank, int64_t cut,
                               const void* z, int64_t z_row, int64_t z_column, const void* weight,
                               int64_t weight_row, const int64_t* slots, const void* bias,
                               const void* u, const void* v, bool narrow, void* y) {
  Linear call;
  call.all = rows;
  call.n = n;
  call.k = k;
  call.z = {z, DType::kBf16, z_row, z_column};
  call.slots = slots;
  call.weight = {weight, DType::kBf16, weight_row, 1};
  call.bias = {bias, DType::kBf16, 0, 1};
  call.factors.rank = rank;
  call.factors.u = {{u, DType::kFp32, n, 1}, rank * n};
  call.factors.v = {{v, DType::kFp32, k, 1}, rank * k};
  call.y = y;
  call.y_dtype = narrow ? DType::kBf16 : DType::kFp32;
  run(call, cut);
}

// z (2 pairs, k), the context's rows first; v (pairs, k) in fp32; y (2 pairs, n) and u (pairs, n)
// in fp32.
extern "C" void record_linear(int64_t pairs, int64_t n, int64_t k, int64_t cut, const void* z,
                              const void* weight, const void* v, float* y, float* u) {
  Linear call;
  call.all = 2 * pairs;
  call.n = n;
  call.k = k;
  call.z = {z, DType::kBf16, k, 1};
  call.weight = {weight, DType::kBf16, k, 1};
  call.factors.rank = 1;
  call.factors.v = {{v, DType::kFp32, 0, 1}, k};
  call.y = y;
  call.y_dtype = DType::kFp32;
  call.u = u;
  run(call, cut);
}

// One multiplication of tiles: sums (16, columns) += wide (16, 32) pairs (16, columns, 2).
extern "C" void multiply_add(int64_t columns, float* sums, const void* wide, const void* pairs) {
  tiles::ModelTiles model(columns);
  model.load<0>(sums, columns * 4);
  model.load<4>(pairs, columns * 4);
  model.load<6>(wide, 64);
  model.multiply_add<0, 6, 4>();
  model.store<0>(sums, columns * 4);
}
