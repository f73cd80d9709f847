// decode_attention, on the CPU.
#include <optional>
#include <vector>

#include "bindings/tensors.h"

namespace icl_patch {
namespace {

// The keys that each row sees: their numbers, and how many they are.
void list_visible(const Tensor& mask, int64_t rows, int64_t keys, std::vector<int32_t>& visible,
                  std::vector<int64_t>& counts) {
  const auto* flags = static_cast<const bool*>(mask.const_data_ptr());
  visible.resize(rows * keys);
  for (int64_t row = 0; row < rows; ++row) {
    int32_t* to = visible.data() + row * keys;
    int64_t count = 0;
    for (int64_t k = 0; k < keys; ++k) {
      to[count] = static_cast<int32_t>(k);
      count += flags[row * mask.stride(0) + k * mask.stride(1)];
    }
    counts[row] = count;
  }
}

Tensor decode_attention(const Tensor& query, const Tensor& key, const Tensor& value, double scale,
                        std::optional<Tensor> mask) {
  check("query", query, query, {-1, -1, -1});
  const int64_t rows = query.size(0), heads = query.size(1), d = query.size(2);
  check("key", key, query, {rows, -1, -1, d});
  const int64_t groups = key.size(1), keys = key.size(2);
  check("value", value, query, {rows, groups, keys, -1});
  STD_TORCH_CHECK(groups ? heads % groups == 0 : heads == 0, "expected a multiple of ", groups,
                  " query heads, got ", heads);
  STD_TORCH_CHECK(key.scalar_type() == query.scalar_type() &&
                      value.scalar_type() == query.scalar_type(),
                  "expected query, key and value of one dtype");
  Attention call;
  call.heads = heads;
  call.groups = groups;
  call.keys = keys;
  call.d = d;
  call.e = value.size(3);
  call.query = {query.const_data_ptr(), dtype_of("query", query), query.stride(1),
                query.stride(2)};
  call.query_row = query.stride(0);
  call.key = {key.const_data_ptr(), dtype_of("key", key), key.stride(2), key.stride(3)};
  call.key_row = key.stride(0);
  call.key_group = key.stride(1);
  call.value = {value.const_data_ptr(), dtype_of("value", value), value.stride(2),
                value.stride(3)};
  call.value_row = value.stride(0);
  call.value_group = value.stride(1);
  call.scale = static_cast<float>(scale);
  std::vector<int64_t> counts(rows, keys);
  std::vector<int32_t> visible;
  if (mask) {
    check("mask", *mask, query, {rows, keys});
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, "expected a mask of bools");
    list_visible(*mask, rows, keys, visible, counts);
    call.visible = visible.data();
  }
  call.counts = counts.data();
  call.parts = (keys + Attention::kPart - 1) / Attention::kPart;
  Tensor y = allocate(query, {rows, heads, call.e}, query.scalar_type(), call.y);
  std::vector<float> partial(rows * heads * call.parts * (call.e + 2));
  call.partial = partial.data();
  // Rows see different numbers of keys: without the empty parts the threads share the work evenly.
  std::vector<int64_t> items;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t part = 0; part * Attention::kPart < counts[row]; ++part)
        items.push_back((row * groups + group) * call.parts + part);
  call.items = items.data();
  run_rows(&CpuDriver::attention_parts, call, items.size(), 2 * Attention::kPart * (d + call.e));
  run_rows(&CpuDriver::attention_outputs, call, rows * heads, call.parts * call.e);
  return y;
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) { ICL_PATCH_IMPL(decode_attention); }
